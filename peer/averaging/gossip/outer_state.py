"""The outer state of one peer: slow weights, outer momentum, and the round they stand at.

Invariants:

- phi and delta belong together: a step checks everything it reads before it writes the first value.
- A round is stepped at most once, and rounds only rise.
- `version` rises with every change of phi, so a reader of shared memory can say which phi it took.

The state may be that of a part of the vectors: spans of them, stepped as one. Then a step works on
a copy of those values, which are written back when it has succeeded.

One thread at a time may call a method (the daemon runs them as blocking work); nothing here locks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from peer.codec import BLOCK, TILE, CodeBuffer, Codec, codes_as_tensor
from peer.codec.compiled import in_chunks
from protocol.content.samples import Float32Vector
from protocol.errors import LocalProtocolError, RemoteProtocolError

from .outer_step import PLAIN_AVERAGE, NolocoFactors, OuterStepMeasures, outer_step

# --- how far a partner's vector is from ours: one pass over both ----------------------------------

LOOPS_OF: Final = "noloco"
"""The loops that read two vectors of codes stand with this way's (protocol/run/ways.py)."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Root mean squares per value; not finite where a sum is not.

    Attributes:
        distance: of ours less theirs.
        own: of ours.
    """

    distance: float
    own: float


def apart(
    own_codes: Sequence[torch.Tensor], their_codes: Sequence[torch.Tensor], codec: Codec, size: int
) -> Apart:
    """The distance of two peers' vectors.

    Args:
        own_codes, their_codes: one vector each, or more that belong together; valid ones.
        size: values of one vector.
    """
    distance = own = 0.0
    for ours, theirs in zip(own_codes, their_codes, strict=True):
        squares = _fused_squares(ours, theirs, codec, size) or _squares(ours, theirs, codec, size)
        distance, own = distance + squares[0], own + squares[1]
    values = max(1, size * len(own_codes))
    return Apart(_root(distance / values), _root(own / values))


def _fused_squares(
    ours: torch.Tensor, theirs: torch.Tensor, codec: Codec, size: int
) -> tuple[float, float] | None:
    """The same by a compiled loop, in a quarter of the time; None where none fits."""
    fused = codec.fused_loops(LOOPS_OF, (ours, theirs), ())
    if fused is None:
        return None
    arrays = (*fused.codes[0], *fused.codes[1])
    sums = in_chunks(
        lambda first, last: fused.kernels.apart_blocks(*arrays, first, last), size // BLOCK
    )
    return sum(distance for distance, _ in sums), sum(own for _, own in sums)


def _squares(
    ours: torch.Tensor, theirs: torch.Tensor, codec: Codec, size: int
) -> tuple[float, float]:
    """Sums of squares, of ours less theirs and of ours, tile by tile."""
    scratch = torch.empty(2, min(TILE, size), dtype=torch.float32, device=ours.device)
    distance = own = 0.0
    for start in range(0, size, TILE):
        stop = min(size, start + TILE)
        one, other = scratch[:, : stop - start]
        codec.decode_range(ours, start, stop, one)
        codec.decode_range(theirs, start, stop, other)
        own += float(torch.dot(one, one))
        one.sub_(other)
        distance += float(torch.dot(one, one))
    return distance, own


def _root(mean_square: float) -> float:
    return math.sqrt(mean_square) if mean_square >= 0 else math.nan


# --- outer state ----------------------------------------------------------------------------------


class OuterState:
    """Holds phi and delta (fp32 [P], the caller's memory, changed in place).

    Args:
        spans: start and stop of each piece of the part that is stepped here; None for all.

    Attributes:
        version: rises with every change of phi.
        round: round of the last step; -1 before the first.
        replicas_apart: `replica_distance` of the last step in a pair, over the root mean square of
            phi.
    """

    def __init__(
        self,
        phi_P: Float32Vector,
        delta_P: Float32Vector,
        codec: Codec,
        factors: NolocoFactors,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Raises ValueError unless both are writable fp32 vectors of one length."""
        if phi_P.shape != delta_P.shape or not (phi_P.flags.writeable and delta_P.flags.writeable):
            raise ValueError("phi and delta must be writable and of one length")
        self.phi_P, self.delta_P = phi_P, delta_P
        self.version, self.round = 0, -1
        self._phi, self._delta = torch.from_numpy(phi_P), torch.from_numpy(delta_P)
        self._spans = [slice(*span) for span in spans or [(0, phi_P.size)]]
        self._size = sum(span.stop - span.start for span in self._spans)
        self._codec, self._factors = codec, factors
        self.replicas_apart: float | None = None

    @property
    def needs_phi_codes(self) -> bool:
        """Whether the codes of phi travel too."""
        return self._factors.pulls

    def with_phi(self, theta_codes: memoryview) -> memoryview:
        """Codes of theta, and behind them those of phi. Raises ValueError if phi is not finite."""
        both = memoryview(bytearray(2 * len(theta_codes)))
        both[: len(theta_codes)] = theta_codes
        phi_codes = torch.frombuffer(both[len(theta_codes) :], dtype=torch.uint8)
        self._codec.encode(self._part(self._phi), phi_codes)
        return both

    def step(
        self,
        round: int,
        own_codes: CodeBuffer,
        partner_codes: CodeBuffer | None = None,
        *,
        plain: bool = False,
        own_share: float = 0.5,
    ) -> OuterStepMeasures:
        """Take the outer step of `round` with the partner's codes, or alone.

        Args:
            round: number of the round; higher than that of the step before.
            own_codes: codes of our theta, and behind them those of our phi before the step where
                gamma != beta.
            partner_codes: the partner's; None alone.
            plain: phi becomes the mean of theta, whatever the run's factors are.
            own_share: weight of our theta in the pair's mean.

        Raises:
            LocalProtocolError: our own codes are bad or the round was stepped before; nothing was
                written.
            RemoteProtocolError: the partner's codes are bad; nothing was written.
        """
        if round <= self.round:
            raise LocalProtocolError(
                f"outer step of round {round} after that of round {self.round}"
            )
        members = [self._own(own_codes)]
        if partner_codes is not None:
            members.append(self._partners(partner_codes))
        theta_codes = [codes[0] for codes in members]
        phi_codes = [codes[1] for codes in members] if self.needs_phi_codes and not plain else []
        is_even = partner_codes is None or own_share == 0.5
        shares = None if is_even else (own_share, 1 - own_share)
        phi, delta = self._part(self._phi), self._part(self._delta)
        factors = PLAIN_AVERAGE if plain else self._factors
        if plain and self._factors.remembers:
            delta.zero_()
        measures = outer_step(phi, delta, theta_codes, self._codec, factors, phi_codes, shares)
        self._put_back(self._phi, phi)
        if self._factors.remembers:
            self._put_back(self._delta, delta)
        if measures.replica_distance is not None:
            phi_rms = float(torch.linalg.vector_norm(phi)) / math.sqrt(max(1, phi.numel()))
            self.replicas_apart = measures.replica_distance / phi_rms if phi_rms else None
        self.version, self.round = self.version + 1, round
        return measures

    def apart(self, own_codes: CodeBuffer, partner_codes: CodeBuffer) -> Apart:
        """How far the partner's vectors are from ours. Raises as `step` does."""
        ours, theirs = self._own(own_codes), self._partners(partner_codes)
        return apart(ours, theirs, self._codec, self._size)

    def moved(self, own_codes: CodeBuffer) -> float:
        """How far our theta is from phi, root mean square per value.

        Raises:
            LocalProtocolError: our own codes are bad.
        """
        codes = self._own(own_codes)[0]
        move = torch.empty(self._size)
        self._codec.decode(codes, move)
        move.sub_(self._part(self._phi))
        return float(torch.linalg.vector_norm(move)) / math.sqrt(max(1, self._size))

    def stands_after(self, round: int) -> None:
        """Phi and delta hold the first state, as it stood after the step of `round`; -1 for none.

        It has the version of one that took those steps here. Momentum that nobody will use, left by
        an older loco-peer, is dropped: it would be sent to every joiner.
        """
        self.version, self.round = round + 1, round
        if not self._factors.remembers:
            for span in self._spans:
                if self._delta[span].any():
                    self._delta[span].zero_()

    def _part(self, vector_P: torch.Tensor) -> torch.Tensor:
        """The part of a vector that is stepped here: a copy, unless it is of one piece."""
        pieces = [vector_P[span] for span in self._spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _put_back(self, vector_P: torch.Tensor, part: torch.Tensor) -> None:
        if len(self._spans) == 1:
            return
        sizes = [span.stop - span.start for span in self._spans]
        for span, piece in zip(self._spans, part.split(sizes), strict=True):
            vector_P[span] = piece

    def _own(self, codes: CodeBuffer) -> list[torch.Tensor]:
        if (vectors := self._valid(codes)) is None:
            raise LocalProtocolError("our own codes are missing or not valid")
        return vectors

    def _partners(self, codes: CodeBuffer) -> list[torch.Tensor]:
        if (vectors := self._valid(codes)) is None:
            raise RemoteProtocolError("the partner's codes are missing, malformed or not finite")
        return vectors

    def _valid(self, codes: CodeBuffer) -> list[torch.Tensor] | None:
        """Codes of theta, and those of phi where they travel too, if all are there and valid."""
        each_bytes = self._codec.code_bytes(self._size)
        vectors = list(codes_as_tensor(codes).split(each_bytes))
        due = [each_bytes] * (2 if self.needs_phi_codes else 1)
        if [each.numel() for each in vectors] != due:
            return None
        return vectors if all(self._codec.validate(each) for each in vectors) else None
