"""How much is trained: a few steps for a test, a minute, or the study.

A step is ten microbatches: with four of six stages visited there are ten choices of relay stages,
so every relay stage trains six microbatches of each step (constraint CC2).
"""

from dataclasses import replace
from typing import Final

from bench.quality.settings import Setting

STAGES: Final = 6
VISITED: Final = 4
"""SkipPipe's published case: a third of the stages is skipped."""
MICROBATCHES: Final = 10
COLUMNS: Final = 4
"""Replicas of each stage where there are several."""
_MODEL: Final = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_layers": STAGES,
    "num_heads": 4,
    "context_length": 128,
}
SMOKE: Final = Setting(
    "smoke",
    steps=6,
    batch_size=20,
    inner_steps=3,
    warmup_steps=2,
    curve_every=3,
    curve_blocks=2,
    final_blocks=2,
    replicas=1,
    model={**_MODEL, "hidden_size": 32, "intermediate_size": 64, "context_length": 16},
)
QUICK: Final = Setting(
    "quick",
    steps=40,
    batch_size=20,
    inner_steps=10,
    warmup_steps=8,
    curve_every=20,
    final_blocks=32,
    replicas=1,
    model=_MODEL,
)
FULL: Final = Setting(
    "full",
    steps=400,
    batch_size=20,
    inner_steps=20,
    warmup_steps=40,
    curve_every=40,
    curve_blocks=16,
    final_blocks=128,
    replicas=1,
    model=_MODEL,
)
"""A million bytes of text; one to two minutes of a core for each run."""
LONG: Final = replace(FULL, name="long", steps=1600, curve_every=160)
"""Four times as long, to see which way the differences go."""
