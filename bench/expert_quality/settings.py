"""How much is trained: a few steps of a tiny model, or the study of one machine.

A budget is PARTS parts of equally many steps of the medium size; every arm spends the same.
"""

from dataclasses import dataclass, replace
from typing import Final

from bench.quality.settings import Setting
from peer.cli.new import MUON_RATE
from protocol.run.run_spec import RunSpec

from .arms import MEDIUM, PARTS, Training
from .domains import DOMAINS, Domain

TEXT_BYTES: Final = 1 << 20
WARMUP_OF: Final = 10
"""Warm-up takes one step in so many of a model's own."""


@dataclass(frozen=True, slots=True)
class ExpertSetting(Setting):
    """One length of the study; `steps` are the whole budget.

    Attributes:
        sizes: width of the feed-forward layers, by size.
        text_bytes: to train on, of each domain at most.
    """

    sizes: tuple[tuple[str, int], ...] = (("small", 280), (MEDIUM, 384), ("large", 488))
    domains: tuple[Domain, ...] = DOMAINS
    text_bytes: int = TEXT_BYTES

    def steps_of(self, parts: int) -> int:
        return self.steps * parts // PARTS

    def spec_of(self, training: Training, seed: int, parts: int | None = None) -> RunSpec:
        """The run spec of one model; its schedule is laid out for all of its own steps.

        Args:
            parts: what is trained of them, where that is asked for; all by default.
        """
        steps = self.steps_of(training.parts if parts is None else parts)
        tree = Setting.spec(self, seed).model_dump()
        tree["model"]["intermediate_size"] = dict(self.sizes)[training.size]
        tree["training"]["total_steps"] = steps
        tree["sync"]["inner_steps"] = 1
        rate = {"learning_rate": MUON_RATE * self.learning_rate}
        warm = {"warmup_steps": max(1, steps // WARMUP_OF), "name": "muon", "muon": rate}
        tree["optimizer"].update(warm)
        return RunSpec.model_validate(tree)


SMOKE: Final = ExpertSetting(
    "smoke",
    steps=48,
    batch_size=1,
    inner_steps=1,
    warmup_steps=1,
    curve_every=1,
    curve_blocks=2,
    final_blocks=2,
    replicas=1,
    model={
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_heads": 2,
        "context_length": 16,
    },
    precision="fp32",
    sizes=(("small", 48), (MEDIUM, 64), ("large", 80)),
    text_bytes=1 << 14,
)
SHORT: Final = replace(
    SMOKE,
    name="short",
    steps=480,
    batch_size=8,
    curve_every=10,
    curve_blocks=16,
    final_blocks=128,
    model={},
    sizes=(("small", 280), (MEDIUM, 384), ("large", 488)),
    text_bytes=TEXT_BYTES,
)
"""0.9M parameters; some minutes of a free core for a seed."""
FULL: Final = replace(SHORT, name="full", steps=1920, curve_every=40, final_blocks=512)
"""Four times as long."""
