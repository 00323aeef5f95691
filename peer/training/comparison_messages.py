"""What daemon and trainer say to each other about the outputs of two snapshots.

daemon                              trainer
                                    RoundClosed(r, slot)
(a partner's codes are laid beside them)
Compare(r)                          both run on the probe batch; theta is as before
                                    Compared(r, divergence)
Apply(r)

The codes of a partner lie in a region of their own in the memory for codes (shared.py). The daemon
writes them there only when no `Compare` is on its way. How outputs are compared: divergence.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare the outputs of the pending snapshot of `round` with those of the partner's codes."""

    round: int


@dataclass(frozen=True, slots=True)
class Compared:
    """How far the outputs of two snapshots are apart on the probe batch.

    Attributes:
        divergence: mean Jensen-Shannon divergence, nats per token, 0 to ln 2; None when it is no
            number, as with weights that overflow.
        seconds: for which training stood still.
    """

    round: int
    divergence: float | None
    seconds: float
