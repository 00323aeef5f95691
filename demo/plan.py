"""What the demo trains: the swarm's run, and the run of one peer alone that it is compared with.

The swarm's run is what `loco-peer new` writes, but shorter, and at the best rate of one alone for
so few steps: optimizer, and how pairs average, are the preset's. Fragments and a pipeline average
more often than its H says, for it was chosen for longer runs; fragments are smaller, too, and have
another outer optimizer (`DILOCO`) than `loco-peer new --method diloco` writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import tomlkit

from peer.cli.new import preset_spec
from protocol.run.run_spec import RunSpec

PEERS: Final = 4
STEPS: Final = {"noloco": 300, "diloco": 280, "pipeline": 300}
"""Inner steps of the swarm's run, by method, for six minutes on two slow cores; that of pairs alone
was measured there. Fragments take more of the CPU than vectors, and all four peers train to the
very end. In a pipeline only two of the four have data, and each of their microbatches passes
through all stages."""
METHODS: Final = tuple(STEPS)
PRESET: Final = "demo"
MUON_RATE: Final = 1.2e-2
"""The best rate of one alone, which the swarm is compared with, in as few steps as it trains here
(docs/results/learning.md); the preset's 8e-3 is better in twice as many."""
INNER_STEPS: Final = 10
"""Steps of a round of the lone peer, of fragments and of stages."""
VALIDATE_EVERY: Final = 4
"""Such rounds: a validation costs about as much as three inner steps."""
DILOCO: Final = {
    "blocks_per_fragment": 2,
    "learning_rate": 1.0,
    "momentum": 0.0,
    "overlap_steps": 3,
}
"""Averaging of three fragments; no outer momentum, which costs more than it gives in so short a run
(docs/log.md). A fragment's trip takes one or two steps where four trainers share two cores."""
PIPELINE: Final = {"stages": 2}
"""Two data peers and two relays."""
BOX_METHODS: Final = ("noloco", "diloco")
"""Methods by which a peer of several processes averages; a stage of a pipeline is one's."""
MICRO_BATCH: Final = 4
"""Sequences of a microbatch: two of them are a step's batch, so one travels while one computes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One demo.

    Attributes:
        seed: of the weights, the data's order and the pairing.
        steps: nominal inner steps of the swarm's run; None are the method's.
        method: how the swarm averages; `pipeline` averages in pairs, stage by stage.
        device: that all peers compute on.
        box: processes in which the last peer trains, as a machine with so many GPUs does.
    """

    seed: int = 0
    steps: int | None = None
    method: str = METHODS[0]
    device: str = "cpu"
    box: int = 1

    def options_of(self, number: int) -> list[str]:
        """What the peer of this number is told beside what all are told."""
        return ["--gpus", str(self.box)] if self.box > 1 and number == PEERS else []

    @property
    def total_steps(self) -> int:
        """Nominal inner steps of the swarm's run."""
        return self.steps or STEPS[self.method]

    def swarm_spec(self) -> RunSpec:
        """The run of the four peers."""
        short_rounds = {"inner_steps": INNER_STEPS, "validate_every": VALIDATE_EVERY}
        changes: dict[str, dict[str, Any]] = {}
        if self.method == "diloco":
            sync = {**short_rounds, "method": "diloco", "noloco": None, "diloco": DILOCO}
            changes = {"sync": sync}
        elif self.method == "pipeline":
            micro_batch = {"micro_batch": MICRO_BATCH}
            changes = {"sync": short_rounds, "training": micro_batch, "pipeline": PIPELINE}
        return self._spec("demo", self.total_steps, changes)

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
            "alpha": 0.0,
            "beta": 1.0,
            "codec": "fp32",
            "final_averaging": False,
        }
        return self._spec("alone", steps, {"sync": sync})

    def _spec(self, name: str, steps: int, changes: Mapping[str, Mapping[str, Any]]) -> RunSpec:
        tree = preset_spec(PRESET).model_dump()
        tree |= {"name": name, "seed": self.seed}
        tree["optimizer"]["warmup_steps"] = min(60, steps // 10)
        tree["optimizer"]["muon"]["learning_rate"] = MUON_RATE
        tree["training"]["total_steps"] = steps
        for section, keys in changes.items():
            tree[section] |= keys
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
