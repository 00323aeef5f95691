"""What the demo trains: the swarm's run, and the run of one peer alone that it is compared with."""

from dataclasses import dataclass
from typing import Any, Final

import tomlkit

from protocol.run.pipeline_section import PipelineSection
from protocol.run.run_spec import RunSpec

PEERS: Final = 4
STEPS: Final = {"noloco": 360, "diloco": 280, "pipeline": 300}
"""Inner steps of the swarm's run, by method, for six minutes on two slow cores; that of pairs alone
was measured there. Fragments take more of the CPU than vectors, and all four peers train to the
very end. In a pipeline only two of the four have data, and each of their microbatches passes
through all stages."""
METHODS: Final = tuple(STEPS)
INNER_STEPS: Final = 10
LEARNING_RATE: Final = 2e-3
"""AdamW's, for embedding and norms."""
MUON_RATE: Final = 8e-3
LONE_MUON_RATE: Final = 8e-3
"""One alone ends at 1.380 with it after 640 steps, at 1.427 with twice as much, and at 1.581 with
AdamW at its best rate (docs/results/optimizers.md)."""
AVERAGING: Final = {"alpha": 0.0, "beta": 1.0}
"""Plain pair averaging. In so short a run outer momentum costs more than it gives (docs/log.md)."""
VALIDATE_EVERY: Final = 4
"""Rounds: a validation costs about as much as three inner steps."""
DILOCO: Final = {
    "blocks_per_fragment": 2,
    "learning_rate": 1.0,
    "momentum": 0.0,
    "overlap_steps": 3,
}
"""Averaging of three fragments; no outer momentum, for the same reason. A fragment's trip takes one
or two steps where four trainers share two cores (docs/log.md)."""
PIPELINE: Final = {"stages": 2}
"""Two data peers and two relays: peers take the stages that need them."""
MICRO_BATCH: Final = 4
"""Sequences of a microbatch: two of them are a step's batch, so one travels while one computes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One demo.

    Attributes:
        seed: of the weights, the data's order and the pairing.
        steps: nominal inner steps of the swarm's run; None are the method's.
        method: how the swarm averages; `pipeline` averages in pairs, stage by stage.
    """

    seed: int = 0
    steps: int | None = None
    method: str = METHODS[0]

    @property
    def total_steps(self) -> int:
        """Nominal inner steps of the swarm's run."""
        return self.steps or STEPS[self.method]

    def swarm_spec(self) -> RunSpec:
        """The run of the four peers."""
        way: dict[str, Any] = dict(AVERAGING)
        if self.method == "diloco":
            way = {"method": "diloco", "diloco": DILOCO}
        sync = {"inner_steps": INNER_STEPS, "validate_every": VALIDATE_EVERY, **way}
        spec = self._spec("demo", self.total_steps, MUON_RATE, sync)
        if self.method != "pipeline":
            return spec
        training = spec.training.model_copy(update={"micro_batch": MICRO_BATCH})
        pipeline = PipelineSection.model_validate(PIPELINE)
        return spec.model_copy(update={"training": training, "pipeline": pipeline})

    @property
    def sends_per_round(self) -> int:
        """Parts in which a peer sends its weights in one round."""
        spec = self.swarm_spec()
        if spec.sync.diloco is None:
            return 1
        return 1 + -(-spec.model.num_layers // spec.sync.diloco.blocks_per_fragment)

    def lone_spec(self, tokens: int) -> RunSpec:
        """The run of one peer alone that trains `tokens`, or a few steps more.

        Its schedule is the swarm's, stretched to its own length.
        """
        steps, inner_steps = whole_rounds(-(-tokens // self.swarm_spec().tokens_per_step))
        # With alpha = 0 and beta = 1 the outer step of a peer alone changes nothing: plain Muon.
        sync = {
            "inner_steps": inner_steps,
            "validate_every": VALIDATE_EVERY,
            **AVERAGING,
            "codec": "fp32",
            "final_averaging": False,
        }
        return self._spec("alone", steps, LONE_MUON_RATE, sync)

    def _spec(self, name: str, steps: int, rate: float, sync: dict[str, Any]) -> RunSpec:
        tree = {
            "name": name,
            "seed": self.seed,
            "optimizer": {
                "name": "muon",
                "learning_rate": LEARNING_RATE,
                "warmup_steps": min(60, steps // 10),
                "muon": {"learning_rate": rate},
            },
            "training": {"total_steps": steps, "batch_size": 8},
            "sync": sync,
        }
        return RunSpec.model_validate(tree)


def whole_rounds(steps: int) -> tuple[int, int]:
    """Steps and steps per round of a run that does `steps`, or the fewest more.

    A run ends with a whole round; a round length near the swarm's that divides the steps is chosen.
    """
    lengths = range(INNER_STEPS - 3, INNER_STEPS + 4)
    inner_steps = min(lengths, key=lambda n: (-steps % n, abs(n - INNER_STEPS)))
    surplus = -steps % inner_steps
    return steps + surplus, inner_steps


def to_toml(spec: RunSpec) -> str:
    """The run spec as TOML, as people write it."""
    return tomlkit.dumps(spec.model_dump(mode="json", exclude_none=True))
