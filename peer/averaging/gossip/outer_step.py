"""The outer step of NoLoCo: gossip averaging of slow weights in pairs.

Idea. Each peer i holds slow weights phi_i and an outer momentum delta_i. After a round of inner
training it has fast weights theta_i; with Delta_i = theta_i - phi_i the step over a group of n
peers (a random pair: n = 2) is

    delta_i <- alpha delta_i + (beta / n) sum_j Delta_j - gamma (phi_i - (1 / n) sum_j phi_j)
    phi_i   <- phi_i + delta_i

alpha is the outer momentum, beta the outer learning rate, gamma the pull to the group's mean,
without which the peers would drift apart: no step here ever sees all of them. (NoLoCo, arXiv
2506.10911, eq. 1 to 3. Its eq. 2 is printed with -beta; the derivation needs +beta, and with -beta
the weights run away from the optimum.) Rewritten with means over the group:

    delta_i <- alpha delta_i + beta (mean theta - phi_i) + (gamma - beta) (mean phi - phi_i)

so with gamma = beta, the default, only theta travels.

Rules:

- theta is what the *codes* say, for our own as for the partner's: both peers of a pair compute the
  same mean, bit for bit. (0.5 a + 0.5 b commutes, and halving is exact.)
- A peer without partner takes the step with n = 1; the gamma term vanishes.
- A group of all peers is DiLoCo with heavy-ball momentum: phi stays equal everywhere.
- Stability for n = 2: gamma < sqrt(2 + alpha^2).
- With alpha = 0 delta is neither read nor written. It stays zero, so it is neither sent nor kept
  (peer/content/fetching.py, peer/state/checkpoints.py). The final averaging makes it zero.

The step runs in place, tile by tile: one pass over memory, no vector of scratch. Separately rounded
fp32 operations only (no fused multiply-add), so a step can be reproduced on another machine; long
int8 vectors go through a compiled loop that does the same (int8_step.py).

`OuterState` holds phi and delta of one peer, and the round at which they stand:

- A step checks all that it reads before it writes the first value.
- A round is stepped at most once, and rounds only rise.
- It may step a part of the vectors, spans of them as one: it works on a copy of those values, and
  writes it back when the step has succeeded.
- One thread at a time may call a method (the daemon runs them as blocking work): nothing locks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from peer.codec import BLOCK, TILE, CodeBuffer, Codec, codes_as_tensor, decoded_tiles
from peer.codec.compiled import in_chunks
from protocol.content.samples import Float32Vector
from protocol.errors import LocalProtocolError, RemoteProtocolError

WAY: Final = "noloco"
"""The name under which a codec's row has compiled loops for this way (protocol/run/ways.py)."""


# --- the step of a group --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NolocoFactors:
    """alpha: outer momentum; beta: outer learning rate; gamma: pull to the group's mean."""

    alpha: float
    beta: float
    gamma: float

    @property
    def pulls(self) -> bool:
        """Whether gamma differs from beta: then phi travels too."""
        return self.gamma != self.beta

    @property
    def remembers(self) -> bool:
        return self.alpha != 0


PLAIN_AVERAGE: Final = NolocoFactors(alpha=0.0, beta=1.0, gamma=1.0)
"""In the final averaging: nothing more is trained, so momentum leads nowhere."""


def outer_step(
    phi_P: torch.Tensor,
    delta_P: torch.Tensor,
    theta_codes: Sequence[torch.Tensor],
    codec: Codec,
    factors: NolocoFactors,
    phi_codes: Sequence[torch.Tensor] = (),
    shares: Sequence[float] | None = None,
) -> float | None:
    """Take the step of a group, ourselves first: one of us alone, a pair, or more.

    Args:
        phi_P, delta_P: fp32 [P], overwritten (delta not where alpha is 0).
        theta_codes: of each member, valid ones (`codec.validate`).
        phi_codes: in the same order; read by a group of more than one with gamma != beta.
        shares: weight of each member in the means; equal ones when not given.

    Returns:
        Root mean square of our theta less the mean of the others' (the partner's); None alone.
    """
    if len(theta_codes) == 1:
        shares, phi_codes = None, ()
    squares = None
    if shares is None and not (factors.pulls and phi_codes):
        squares = fused_step(phi_P, delta_P, theta_codes, codec, factors.alpha, factors.beta)
    if squares is None:
        squares = _plain_step(phi_P, delta_P, theta_codes, phi_codes, codec, factors, shares)
    own_share = shares[0] if shares else 1 / len(theta_codes)
    return _root_mean(squares, phi_P.numel()) / (1 - own_share) if own_share < 1 else None


def fused_step(
    phi_P: torch.Tensor,
    delta_P: torch.Tensor,
    theta_codes: Sequence[torch.Tensor],
    codec: Codec,
    alpha: float,
    beta: float,
) -> float | None:
    """Step phi and delta in place by the codec's compiled loop (int8_step.py), with gamma = beta.

    Returns:
        The sum of squares of our values less the mean; None, and nothing done, where no compiled
        loop fits: another code, a short vector, a larger group, numba missing.
    """
    if len(theta_codes) > 2:  # the loops know one of us alone, and a pair
        return None
    fused = codec.fused_loops(WAY, theta_codes, (phi_P, delta_P))
    if fused is None:
        return None
    arrays = (
        *fused.codes[0],
        *fused.codes[-1],
        phi_P.detach().numpy(),
        delta_P.detach().numpy(),
        (np.float32(1 / len(theta_codes)), np.float32(alpha), np.float32(beta)),
    )
    squares = in_chunks(
        lambda first, last: fused.kernels.step_blocks(*arrays, first, last), phi_P.numel() // BLOCK
    )
    return float(sum(squares))


def _plain_step(
    phi_P: torch.Tensor,
    delta_P: torch.Tensor,
    theta_codes: Sequence[torch.Tensor],
    phi_codes: Sequence[torch.Tensor],
    codec: Codec,
    factors: NolocoFactors,
    shares: Sequence[float] | None,
) -> float:
    """Step tile by tile, of any code, group and factors; returns the sum of `fused_step`."""
    alpha, pull = float(np.float32(factors.alpha)), factors.gamma - factors.beta
    scratch = torch.empty(4, TILE, dtype=torch.float32, device=theta_codes[0].device)
    squares = 0.0
    for start in range(0, phi_P.numel(), TILE):
        phi, delta = phi_P[start : start + TILE], delta_P[start : start + TILE]
        mean, own, spare, move = scratch[:, : phi.numel()]
        group_mean(theta_codes, codec, start, mean, own, spare, shares)
        squares += _squares(own.sub_(mean))
        if not alpha:
            delta = move.zero_()
        delta.mul_(alpha)
        delta.add_(mean.sub_(phi).mul_(factors.beta))
        if pull and phi_codes:
            group_mean(phi_codes, codec, start, mean, own, spare, shares)
            delta.add_(mean.sub_(phi).mul_(pull))
        phi.add_(delta)
    return squares


def _squares(values: torch.Tensor) -> float:
    return float(torch.dot(values, values))


def _root_mean(squares: float, values: int) -> float:
    return math.sqrt(squares / max(1, values)) if squares >= 0 else math.nan


def group_mean(
    group_codes: Sequence[torch.Tensor],
    codec: Codec,
    start: int,
    out_mean: torch.Tensor,
    out_own: torch.Tensor,
    scratch: torch.Tensor,
    shares: Sequence[float] | None = None,
) -> None:
    """Write the mean of the decoded values from `start` on, and the first member's own values.

    All three are fp32 [n]; values start .. start + n - 1 are read. Members weigh as `shares` says.
    """
    weights = shares or [1.0 / len(group_codes)] * len(group_codes)
    codec.decode(group_codes[0], out_own, start)
    torch.mul(out_own, weights[0], out=out_mean)
    for codes, weight in zip(group_codes[1:], weights[1:], strict=True):
        codec.decode(codes, scratch, start)
        out_mean.add_(scratch.mul_(weight))


# --- how far a partner's vector is from ours: one pass over both ----------------------------------


@dataclass(frozen=True, slots=True)
class Distances:
    """Root mean squares, of ours less theirs and of ours; not finite where a sum is not."""

    distance: float
    own: float


def distances(
    own_codes: Sequence[torch.Tensor], their_codes: Sequence[torch.Tensor], codec: Codec, size: int
) -> Distances:
    """The distance of two peers' vectors: one each, or more that belong together; valid ones."""
    distance = own = 0.0
    for ours, theirs in zip(own_codes, their_codes, strict=True):
        pair = ours, theirs, codec, size
        squares = _fused_distances(*pair) or _plain_distances(*pair)
        distance, own = distance + squares[0], own + squares[1]
    values = size * len(own_codes)
    return Distances(_root_mean(distance, values), _root_mean(own, values))


def _fused_distances(
    ours: torch.Tensor, theirs: torch.Tensor, codec: Codec, size: int
) -> tuple[float, float] | None:
    """The sums of squares by a compiled loop, in a quarter of the time; None where none fits."""
    fused = codec.fused_loops(WAY, (ours, theirs), ())
    if fused is None:
        return None
    arrays = (*fused.codes[0], *fused.codes[1])
    sums = in_chunks(
        lambda first, last: fused.kernels.distance_blocks(*arrays, first, last), size // BLOCK
    )
    return sum(distance for distance, _ in sums), sum(own for _, own in sums)


def _plain_distances(
    ours: torch.Tensor, theirs: torch.Tensor, codec: Codec, size: int
) -> tuple[float, float]:
    """Sums of squares, of ours less theirs and of ours, tile by tile."""
    distance = own = 0.0
    for _, (one, other) in decoded_tiles([ours, theirs], codec, size):
        own += _squares(one)
        distance += _squares(one.sub_(other))
    return distance, own


# --- outer state ----------------------------------------------------------------------------------


class OuterState:
    """Holds phi and delta (fp32 [P], the caller's memory, changed in place).

    Args:
        spans: start and stop of each piece of the part that is stepped here; None for all.

    Attributes:
        round: round of the last step; -1 before the first.
        replicas_apart: how far our theta was from the partner's in the last step of a pair, over
            the root mean square of phi.
    """

    def __init__(
        self,
        phi_P: Float32Vector,
        delta_P: Float32Vector,
        codec: Codec,
        factors: NolocoFactors,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.phi_P, self.delta_P = phi_P, delta_P
        self.round = -1
        self._phi, self._delta = torch.from_numpy(phi_P), torch.from_numpy(delta_P)
        self._spans = [slice(*span) for span in spans or [(0, phi_P.size)]]
        self._size = sum(span.stop - span.start for span in self._spans)
        self._codec, self._factors = codec, factors
        self._vector_bytes = codec.code_bytes(self._size)
        self.replicas_apart: float | None = None

    @property
    def needs_phi_codes(self) -> bool:
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
    ) -> float | None:
        """Take the outer step of `round` with the partner's codes, or alone.

        Args:
            own_codes: of our theta, and behind them of our phi where gamma != beta.
            plain: phi becomes the mean of theta, whatever the run's factors are.
            own_share: weight of our theta in the pair's mean.

        Returns:
            How far the partner's theta is from ours, root mean square; None alone.

        Raises:
            LocalProtocolError: our own codes are bad, or the round was stepped before.
            RemoteProtocolError: the partner's codes are bad.
        """
        if round <= self.round:
            raise LocalProtocolError(
                f"outer step of round {round} after that of round {self.round}"
            )
        members = [self._vectors(own_codes)]
        if not self._are_valid(members[0]):
            raise LocalProtocolError("our own codes are missing or not valid")
        if partner_codes is not None:
            members.append(self._vectors(partner_codes))
            if not self._are_valid(members[1]):
                raise RemoteProtocolError("the partner's codes are missing or not valid")
        theta_codes = [codes[0] for codes in members]
        phi_codes = [codes[-1] for codes in members] if self.needs_phi_codes else []
        shares = None if own_share == 0.5 else (own_share, 1 - own_share)
        phi, delta = self._part(self._phi), self._part(self._delta)
        factors = PLAIN_AVERAGE if plain else self._factors
        if plain and self._factors.remembers:
            delta.zero_()
        distance = outer_step(phi, delta, theta_codes, self._codec, factors, phi_codes, shares)
        self._put_back(self._phi, phi)
        if self._factors.remembers:
            self._put_back(self._delta, delta)
        if distance is not None:
            phi_rms = float(torch.linalg.vector_norm(phi)) / math.sqrt(max(1, phi.numel()))
            self.replicas_apart = distance / phi_rms if phi_rms else None
        self.round = round
        return distance

    def without_partner(
        self, own_codes: CodeBuffer, partner_codes: CodeBuffer, own_share: float
    ) -> None:
        """Take the partner out of the last step: it was taken alone, except for rounding.

        It moved phi and delta by beta times what the partner had moved the mean. (Where phi
        travels too, it moved them by more: that is not taken back here.)
        """
        assert not self.needs_phi_codes
        own, theirs = self._vectors(own_codes)[0], self._vectors(partner_codes)[0]
        factor = -self._factors.beta * (1 - own_share)
        phi, delta = self._part(self._phi), self._part(self._delta)
        for start, (pulled, before) in decoded_tiles([theirs, own], self._codec, self._size):
            pulled.sub_(before).mul_(factor)
            phi[start : start + TILE].add_(pulled)
            if self._factors.remembers:
                delta[start : start + TILE].add_(pulled)
        self._put_back(self._phi, phi)
        if self._factors.remembers:
            self._put_back(self._delta, delta)

    def distances(self, own_codes: CodeBuffer, partner_codes: CodeBuffer) -> Distances:
        """How far the partner's vectors are from ours; both are valid, or nothing finite comes."""
        ours, theirs = self._vectors(own_codes), self._vectors(partner_codes)
        return distances(ours, theirs, self._codec, self._size)

    def distance_from_phi(self, own_codes: CodeBuffer) -> float:
        """How far our theta is from phi, root mean square per value."""
        move = torch.empty(self._size)
        self._codec.decode(self._vectors(own_codes)[0], move)
        move.sub_(self._part(self._phi))
        return float(torch.linalg.vector_norm(move)) / math.sqrt(max(1, self._size))

    def set_first_round(self, round: int) -> None:
        """Phi and delta hold the first state, as it stood after the step of `round`; -1 for none.

        Momentum that nobody will use, left by an older loco-peer, is dropped: it would be sent to
        every joiner.
        """
        self.round = round
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

    def _vectors(self, codes: CodeBuffer) -> list[torch.Tensor]:
        """Codes of theta, and those of phi where they travel too."""
        return list(codes_as_tensor(codes).split(self._vector_bytes))

    def _are_valid(self, vectors: list[torch.Tensor]) -> bool:
        due = [self._vector_bytes] * (2 if self.needs_phi_codes else 1)
        sizes = [each.numel() for each in vectors]
        return sizes == due and all(self._codec.validate(each) for each in vectors)
