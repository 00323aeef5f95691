"""The arms of the study: ways in which N replicas train together.

`noloco` is the paper's method with its defaults (alpha 0.5, beta = gamma = 0.7, pairs, blocking,
fp32). Each arm below it changes one factor, but for two ladders and a search:

    comparison      ddp, noloco, diloco, diloco-2h, none
    explanation     ddp, plain-all-h1, plain-all, plain, noloco: from averaged gradients to averaged
                    weights in each step, then every H steps, then in pairs, then outer momentum
    closing         at no more bytes than noloco in fp32: what int8 buys is spent on shorter rounds,
                    and the learning rate fits the outer gain
    ways            the run spec's defaults as a whole (alpha 0.3, int8, overlap), with the whole
                    model at once and in fragments (streaming gossip)
    optimizers      Muon in AdamW's place, at rates around AdamW's: averaged gradients, plain pairs
                    in int8 every 2, 8 and 16 steps, partners by a bit of their numbers, averages
                    that come late, and weights of all every step and every second

All train the same tokens in the same order, from the same weights, and at the same learning rate
unless they say otherwise.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

from peer.averaging.gossip.outer_step import NolocoFactors
from protocol.run.run_spec import RunSpec
from protocol.run.sections import OptimizerSection

from .additions import NOTHING_ADDED, Additions

Group = Literal["gradients", "pairs", "all", "nobody"]
"""A group that averages: gradients of all in each step, weights in pairs or of all, or none."""

Partners = Literal["hash", "bits"]
"""Random partners, or those whose numbers differ in one bit, in turn."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train together.

    Attributes:
        gamma: pull to the group's mean; None is beta, as in the paper's code.
        rounds_of: length of a round, in the setting's H; 0 is a round of one step.
        code: what travels, by its name in exchange.py.
        delay: share of a round after which the others' vectors arrive; training goes on meanwhile.
        rate_of: learning rate, in the setting's.
        blocks_per_fragment: pairs average fragments of so many blocks, each with its own partner
            and moment; 0 averages the whole at once.
        muon: learning rate of Muon for the matrices of the blocks, in that of AdamW, which trains
            the rest; 0 trains all with AdamW.
        partners: how pairs find each other (pairing.py).
        additions: what is tried beside that (tried.py).
    """

    name: str
    group: Group = "pairs"
    alpha: float = 0.5
    beta: float = 0.7
    rounds_of: float = 1.0
    code: str = "fp32"
    delay: float = 0.0
    gamma: float | None = None
    rate_of: float = 1.0
    blocks_per_fragment: int = 0
    muon: float = 0.0
    partners: Partners = "hash"
    additions: Additions = NOTHING_ADDED

    def spec(self, spec: RunSpec) -> RunSpec:
        """The run spec of a setting, with this arm's inner optimizer."""
        if not self.muon:
            return spec
        tree = spec.optimizer.model_dump(exclude={"name", "muon"})
        rate = self.muon * spec.optimizer.learning_rate
        muon = {"learning_rate": rate, "adjust_lr": "match_rms_adamw"}
        optimizer = OptimizerSection.model_validate({**tree, "name": "muon", "muon": muon})
        return spec.model_copy(update={"optimizer": optimizer})

    @property
    def factors(self) -> NolocoFactors:
        """Those of the outer step."""
        return NolocoFactors(self.alpha, self.beta, self.beta if self.gamma is None else self.gamma)

    def factors_at(self, round_: int) -> NolocoFactors:
        """The same in a round: what is added may change them."""
        return self.additions.factors_at(round_, self.factors)

    def inner_steps(self, setting_inner_steps: int) -> int:
        """H of this arm."""
        return max(1, round(self.rounds_of * setting_inner_steps))

    def delay_steps(self, setting_inner_steps: int) -> int:
        """Steps trained between the close of a round and its outer step."""
        return round(self.delay * self.inner_steps(setting_inner_steps))


REFERENCE: Final = "noloco"
"""The arm of which one factor is changed, and with which codes are compared: fp32."""

_STUDY: Final = (
    Arm("ddp", "gradients"),
    Arm(REFERENCE),
    Arm("diloco", "all", alpha=0.3),
    Arm("diloco-2h", "all", alpha=0.3, rounds_of=2),
    Arm("none", "nobody"),
    Arm("plain", alpha=0.0, beta=1.0),
    Arm("plain-all", "all", alpha=0.0, beta=1.0),
    Arm("plain-all-h1", "all", alpha=0.0, beta=1.0, rounds_of=0),
    Arm("int8", code="int8"),
    Arm("bf16", code="bf16"),
    Arm("overlap", delay=0.2),
    Arm("alpha-0", alpha=0.0),
    Arm("alpha-0.3", alpha=0.3),
    Arm("alpha-0.8", alpha=0.8),
    Arm("beta-0.5", beta=0.5),
    Arm("beta-1", beta=1.0),
    Arm("gamma-0.35", gamma=0.35),
    Arm("gamma-1", gamma=1.0),
    Arm("h-half", rounds_of=0.5),
    Arm("h-double", rounds_of=2),
)
_CLOSING: Final = (
    Arm("int8-quarter-h", code="int8", rounds_of=0.25),
    Arm("plain-int8-quarter-h", alpha=0.0, beta=1.0, code="int8", rounds_of=0.25),
    Arm("rate-half", rate_of=0.5),
    Arm("rate-double", rate_of=2.0),
    Arm("plain-rate-double", alpha=0.0, beta=1.0, rate_of=2.0),
    Arm(
        "plain-int8-quarter-h-rate-double",
        alpha=0.0,
        beta=1.0,
        code="int8",
        rounds_of=0.25,
        rate_of=2.0,
    ),
)
_EXTRA: Final = (
    Arm("modulo8", code="modulo8"),
    Arm("modulo4", code="modulo4"),
    Arm("int4", code="int4"),
    Arm("int8-diff", code="int8-diff"),
    Arm("fp32-4h", rounds_of=4),
    Arm("noloco-8h", rounds_of=8),
    Arm("alpha-0.3-8h", alpha=0.3, rounds_of=8),
    Arm("int8-overlap", code="int8", delay=0.2),
)
_WAYS: Final = (
    Arm("default", alpha=0.3, code="int8", delay=0.2),
    Arm("default-rate-half", alpha=0.3, code="int8", delay=0.2, rate_of=0.5),
    Arm("default-rate-double", alpha=0.3, code="int8", delay=0.2, rate_of=2.0),
    Arm("streaming", alpha=0.3, code="int8", delay=0.2, blocks_per_fragment=2),
)
_RATES: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Learning rates of Muon, in AdamW's."""


def _plain_int8(name: str, rounds_of: float, code: str = "int8", **changes: Any) -> Arm:
    return Arm(name, alpha=0.0, beta=1.0, code=code, rounds_of=rounds_of, **changes)


_OPTIMIZERS: Final = (
    *(
        Arm(f"all-h{h}-muon-{rate:g}", "all", alpha=0.0, beta=1.0, rounds_of=h / 8, muon=rate)
        for h in (1, 2)
        for rate in (4.0, 8.0, 16.0, 32.0)
    ),
    Arm("ddp-rate-half", "gradients", rate_of=0.5),
    Arm("ddp-rate-double", "gradients", rate_of=2.0),
    Arm("ddp-rate-4", "gradients", rate_of=4.0),
    _plain_int8("plain-int8", 1.0),
    _plain_int8("plain-int8-rate-half", 1.0, rate_of=0.5),
    _plain_int8("plain-int8-rate-double", 1.0, rate_of=2.0),
    _plain_int8("plain-int8-quarter-h-rate-half", 0.25, rate_of=0.5),
    *(Arm(f"ddp-muon-{rate:g}", "gradients", muon=rate) for rate in _RATES),
    *(_plain_int8(f"pairs-h2-muon-{rate:g}", 0.25, muon=rate) for rate in _RATES),
    *(_plain_int8(f"pairs-h8-muon-{rate:g}", 1.0, muon=rate) for rate in _RATES),
    *(_plain_int8(f"bits-h2-muon-{rate:g}", 0.25, muon=rate, partners="bits") for rate in _RATES),
    _plain_int8("pairs-h2-diff", 0.25, "int8-diff"),
    _plain_int8("pairs-h1-diff", 0.0, "int8-diff"),
    *(
        _plain_int8(f"pairs-h{h}-muon-{rate:g}-diff", h / 8, "int8-diff", muon=rate)
        for h in (1, 2)
        for rate in (2.0, 4.0, 8.0)
    ),
    _plain_int8("bits-h2-adamw", 0.25, partners="bits"),
    *(
        Arm(f"default-muon-{rate:g}", alpha=0.3, code="int8", delay=0.2, muon=rate)
        for rate in _RATES
    ),
    *(_plain_int8(f"pairs-h16-muon-{rate:g}", 2.0, muon=rate) for rate in _RATES),
    *(
        _plain_int8(f"pairs-h{h}-muon-{rate:g}-late-{late:g}", h / 8, muon=rate, delay=late)
        for h in (8, 16)
        for rate in (4.0, 8.0, 16.0)
        for late in (0.25, 0.7)
    ),
    _plain_int8("plain-int8-late-0.25", 1.0, delay=0.25),
)

ARMS: Final = {arm.name: arm for arm in (*_STUDY, *_CLOSING, *_EXTRA, *_WAYS, *_OPTIMIZERS)}
STUDY_ARMS: Final = tuple(arm.name for arm in _STUDY)
"""What runs unless arms are named; the rest: the search for what closes the gap; codes of the late
phase, one of them too coarse, which shows that the comparison can see it; fp32 at int8's bytes;
rounds of the run spec's length, for the long setting; overlap as a daemon has it; and the run
spec's defaults, with the whole model at once and in fragments (streaming gossip)."""
CODE_ARMS: Final = (REFERENCE, "bf16", "int8", "int8-diff", "modulo8", "modulo4", "int4")
"""Arms that run in a late phase."""
