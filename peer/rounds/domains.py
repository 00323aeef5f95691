"""Held-out blocks of the domains of a run with experts, and what our weights say of them.

A peer measures its slow weights on one domain after another, its own one first, each time that it
validates; so the matrix costs what validation costs. At the end of training it measures all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.content.samples import Float32Vector, stamp_of


@dataclass(frozen=True, slots=True)
class HeldOutBlocks:
    """The blocks of a domain that claims are of (protocol/experts/claims.py), [B, T+1] tokens.

    Attributes:
        number: of the expert whose domain it is.
        digest: of the blob of all its held-out blocks.
    """

    number: int
    name: str
    digest: str
    tokens_BT: npt.NDArray[Any]

    @property
    def claims(self) -> int:
        """The number of tokens that a claim is of."""
        sequences, length = self.tokens_BT.shape
        return int(sequences * (length - 1))


@dataclass(frozen=True, slots=True)
class ToldLogProbs:
    """Log-probabilities of a text's true tokens under some weights, fp32 values in a row.

    Attributes:
        stamp, step: of the weights.
    """

    stamp: str
    step: int
    log_probs: npt.NDArray[np.float32]

    @property
    def loss(self) -> float:
        return -float(self.log_probs.mean(dtype=np.float64))


def told_by(stamp: str, step: int, log_probs: bytes) -> ToldLogProbs | None:
    """Log-probabilities from a trainer's answer; None where the weights have diverged."""
    values = np.frombuffer(log_probs, "<f4")
    return ToldLogProbs(stamp, step, values) if np.isfinite(values).all() else None


HeldOut = Callable[[], Sequence[HeldOutBlocks]]
"""The domains whose held-out blocks are here by now, ours among them."""


@dataclass(eq=False)
class MeasuredDomains:
    """The domains that our expert is measured on.

    Args:
        own: the number of our expert.

    Attributes:
        told: the newest of each domain, by digest.
    """

    own: int
    held_out: HeldOut
    slow_P: Float32Vector
    told: dict[str, ToldLogProbs] = field(default_factory=dict)
    _turns: int = 0

    @property
    def in_turn(self) -> Sequence[HeldOutBlocks]:
        """The held-out blocks of all domains, ours first."""
        return sorted(self.held_out(), key=lambda each: (each.number != self.own, each.number))

    def next(self) -> HeldOutBlocks:
        here = self.in_turn
        self._turns += 1
        return here[(self._turns - 1) % len(here)]

    def stamp(self) -> str:
        """A name of the weights as they lie there now."""
        return stamp_of(self.slow_P)
