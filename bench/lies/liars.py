"""What liars send. They know all: what the honest peers send, and how far they would be let go.

A peer's *move* is what its weights have come away from the slow weights that it started the round
with; fragments send it with the other sign. A liar trains as the others do, and lies only in what
it sends:

    flip        the opposite of its move
    scale-10    ten times its move; scale-100 a hundred times
    noise       a random vector, ten times as long as its move
    replay      what it has sent first, again and again
    nan         codes that stand for no numbers
    huge        values near the largest that codes may hold
    inner       the opposite of the mean of the honest moves, as long as one of them
    collude     all liars push in one direction, against the first mean of the honest moves, as far
                as is let through

Owners of chunks have another power, for nobody works their averages out again:

    owner-near  the opposite of the true average, as long as is let through
    owner-far   the same a hundred times as long as the true one
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch

from peer.codec import LARGEST_MAGNITUDE

from .pieces import Pieces

JUST_BELOW: Final = 0.99
"""Share of a bound that liars use, so that rounding does not carry them over it."""
HUGE: Final = LARGEST_MAGNITUDE / 2
FAR: Final = 100.0
_SCALES: Final = {"flip": -1.0, "scale-10": 10.0, "scale-100": 100.0}
_NOISE: Final = 10.0
_NO_NUMBER: Final = 0xFF
"""A byte that makes scales and values NaN in every codec when it stands everywhere."""


def rms(values: torch.Tensor) -> float:
    """Root mean square, the length of a vector per value."""
    return float(torch.linalg.vector_norm(values.double())) / math.sqrt(max(1, values.numel()))


def of_length(values: torch.Tensor, length: float) -> torch.Tensor:
    """The vector in that direction whose root mean square is `length`."""
    return values * (length / max(rms(values), 1e-30))


@dataclass(frozen=True, slots=True)
class Scene:
    """The scene of a lie.

    Attributes:
        part: which vector it is about: a fragment's index; 0 where the whole model is one.
        move: the liar's own.
        honest: the moves of the honest peers.
        reach: length of the longest vector that is let through.
    """

    part: int
    move: torch.Tensor
    honest: Sequence[torch.Tensor]
    reach: float


class Liars:
    """All liars of a run, who are of one mind."""

    def __init__(self, attack: str, seed: int) -> None:
        self.attack = attack
        self._generator = torch.Generator().manual_seed(seed)
        self._first_codes: dict[Hashable, torch.Tensor] = {}
        self._directions: dict[int, torch.Tensor] = {}

    def lied_move(self, scene: Scene) -> torch.Tensor:
        """The move that a liar says it has made."""
        if self.attack in _SCALES:
            return scene.move * _SCALES[self.attack]
        if self.attack == "noise":
            noise = torch.randn(scene.move.shape, generator=self._generator)
            return of_length(noise, _NOISE * rms(scene.move))
        if self.attack == "inner":
            mean = torch.stack(list(scene.honest)).mean(0)
            return of_length(-mean, median(rms(move) for move in scene.honest))
        if self.attack == "collude":
            if scene.part not in self._directions:
                self._directions[scene.part] = -torch.stack(list(scene.honest)).mean(0)
            return of_length(self._directions[scene.part], JUST_BELOW * scene.reach)
        return scene.move

    def lied_codes(self, liar: Hashable, values: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        """The codes of values that a liar sends, unless its lie is in the codes themselves."""
        if self.attack == "nan":
            return torch.full((pieces.code_bytes,), _NO_NUMBER, dtype=torch.uint8)
        codes = pieces.encoded(torch.full_like(values, HUGE) if self.attack == "huge" else values)
        if self.attack == "replay":
            return self._first_codes.setdefault(liar, codes)
        return codes

    def owned_average(self, mean: torch.Tensor, reach: float) -> torch.Tensor:
        """The values of which an owner makes the result that it signs."""
        if self.attack == "owner-near":
            return of_length(-mean, JUST_BELOW * reach)
        return mean * -FAR if self.attack == "owner-far" else mean
