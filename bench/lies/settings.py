"""Sizes of the study: a late phase, as in quality/settings.py, of 16 small peers.

All peers start from one trained checkpoint and train at a constant low rate, where seeds scatter
little. The checkpoint is of a swarm that averages gradients: 4 x 8 sequences a step are its batch,
as many as the 16 peers have together.
"""

from dataclasses import replace
from typing import Final

from bench.quality.settings import SMOKE, Setting

from .arms import PEERS

_SMALL_MODEL: Final = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "context_length": 64,
}
TRAINED: Final = Setting(
    "hostile-trained", 384, 8, 4, 24, 384, final_blocks=32, replicas=4, model=_SMALL_MODEL
)
HOSTILE: Final = Setting(
    "hostile",
    steps=64,
    batch_size=2,
    inner_steps=4,
    warmup_steps=8,
    curve_every=64,
    final_blocks=32,
    replicas=PEERS,
    learning_rate=5e-4,
    schedule="constant",
    model=_SMALL_MODEL,
    trained_steps=384,
)
"""16 rounds of 4 steps."""
LONG: Final = replace(
    HOSTILE,
    name="hostile-long",
    steps=800,
    curve_every=40,
    final_blocks=128,
    learning_rate=1e-3,
    trained_steps=96,
)
"""200 rounds from an early checkpoint: honest peers gain some tenths of a nat."""
SMOKE_TRAINED: Final = replace(SMOKE, name="hostile-smoke-trained")
SMOKE_HOSTILE: Final = replace(
    SMOKE, name="hostile-smoke", steps=24, inner_steps=2, replicas=PEERS, trained_steps=16
)
BASES: Final = {HOSTILE.name: TRAINED, SMOKE_HOSTILE.name: SMOKE_TRAINED}
