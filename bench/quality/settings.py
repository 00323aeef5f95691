"""How much is trained: a few steps for tests, minutes on a CPU, or a study for a GPU.

`late` starts all replicas from one trained checkpoint, at the low rate at which runs end: replicas
are close, so what codes round away is largest in comparison.
"""

from dataclasses import dataclass, field, replace
from importlib.metadata import distribution
from typing import Any, Final

from protocol.run.run_spec import RunSpec

LEARNING_RATE: Final = 2e-3
"""Best for one peer alone in 250 steps of batch 8 (docs/log.md); the same for all arms."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One length of training.

    Attributes:
        batch_size: sequences per step and replica.
        inner_steps: H of the arms that do not change it.
        curve_every: steps between two points of the loss curve.
        curve_blocks, final_blocks: held-out sequences behind a point, and behind the last figures.
        source: as in a run spec, or `sources:NAME`: the Python files of an installed package.
        model: of the run spec, where it differs from its defaults.
        trained_steps: of the checkpoint that the replicas start from; 0 starts from the seed.
        precision: of forward pass and Muon: fp32, bf16, or auto for what the device computes in.
    """

    name: str
    steps: int
    batch_size: int
    inner_steps: int
    warmup_steps: int
    curve_every: int
    curve_blocks: int = 16
    final_blocks: int = 128
    replicas: int = 8
    learning_rate: float = LEARNING_RATE
    schedule: str = "cosine"
    source: str = "stdlib"
    model: dict[str, Any] = field(default_factory=dict)
    trained_steps: int = 0
    precision: str = "auto"

    def spec(self, seed: int) -> RunSpec:
        """The run spec of one run: model, data, optimizer and schedule."""
        return RunSpec.model_validate(
            {
                "name": f"quality-{self.name}",
                "seed": seed,
                "model": self.model,
                "data": {
                    "source": _located(self.source),
                    "validation_blocks": self.final_blocks,
                },
                "optimizer": {
                    "learning_rate": self.learning_rate,
                    "warmup_steps": self.warmup_steps,
                    "schedule": self.schedule,
                },
                "training": {"total_steps": self.steps, "batch_size": self.batch_size},
                "sync": {"inner_steps": self.inner_steps},
            }
        )


def _located(source: str) -> str:
    """A source for a run spec: where this machine has the package that it names."""
    kind, _, package = source.partition(":")
    if kind != "sources":
        return source
    return f"text:{distribution(package).locate_file(package)}/**/*.py"


_TINY_MODEL: Final = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 1,
    "num_heads": 2,
    "context_length": 16,
}
SMOKE: Final = Setting(
    "smoke", 16, 1, 4, 2, 8, curve_blocks=2, final_blocks=4, replicas=4, model=_TINY_MODEL
)
SMOKE_LATE: Final = replace(SMOKE, name="smoke-late", learning_rate=2e-4, trained_steps=16)
SHORT: Final = Setting("short", 256, 4, 8, 24, 32)
LONG: Final = replace(SHORT, name="long", steps=1024, curve_every=64)
"""Four times as long, to see which way the differences go; half an hour for four arms on a CPU."""
UNSEEN: Final = "sources:transformers"
"""Fifty million bytes that chose no rate and no arm: what is trained for long reads none twice."""
LONGER: Final = replace(LONG, name="longer", steps=4096, curve_every=128, source=UNSEEN)
"""Sixteen times as long as the short one: more than an hour for an arm on a core."""
LARGER: Final = replace(
    LONG,
    name="larger",
    source=UNSEEN,
    model={"hidden_size": 384, "intermediate_size": 1024, "num_layers": 6, "num_heads": 6},
    precision="bf16",
)
"""Ten million parameters, in bf16 as on a GPU: up to an hour for an arm on a core that computes in
bf16 (`avx512_bf16` or `amx_bf16` in its flags), and several times that on one that does not."""
FULL: Final = Setting("full", 2400, 8, 50, 120, 200, curve_blocks=64, final_blocks=512)
SHORT_LATE: Final = Setting(
    "short-late", 96, 4, 8, 8, 32, learning_rate=2e-4, schedule="constant", trained_steps=256
)
FULL_LATE: Final = Setting(
    "full-late",
    1000,
    8,
    50,
    50,
    200,
    curve_blocks=64,
    final_blocks=512,
    learning_rate=2e-4,
    schedule="constant",
    trained_steps=2400,
)
LATE_OF: Final = {SMOKE.name: SMOKE_LATE, SHORT.name: SHORT_LATE, FULL.name: FULL_LATE}

STREAMING_SMOKE: Final = replace(
    SMOKE,
    steps=24,
    batch_size=2,
    inner_steps=12,
    curve_every=12,
    model={**_TINY_MODEL, "num_layers": 4},
)
STREAMING_SHORT: Final = Setting("short", 300, 4, 30, 30, 30, replicas=4)
"""Ten rounds of 30 steps, three of 100."""
STREAMING_FULL: Final = Setting(
    "full", 3000, 16, 30, 150, 150, curve_blocks=64, final_blocks=512, replicas=4
)
