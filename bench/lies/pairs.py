"""Peers that average in pairs, some of which lie: the daemon's outer steps without its lines.

Judgement, clipping and step are the daemon's (peer/averaging/gossip/lane.py), and a partner
whose vector is implausible rests as the matchmaker lets it rest, in rounds of ROUND_S. Pairs are
the greedy matching of those that may meet, by the matchmaker's rank; training waits for them. Codes
that are not valid end an exchange (`bad_vector`), as they do in peer/averaging/gossip/exchanges.py.
"""

from collections.abc import Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
import trio

from peer.averaging.gossip.exchange_session import (
    Averaged,
    AverageEnded,
    OwnVector,
    RoundOutcome,
    Skipped,
)
from peer.averaging.gossip.gossip import Gossip
from peer.averaging.gossip.lane import FARTHEST_AT_FIRST, PairLane
from peer.averaging.gossip.outer_step import NolocoFactors, OuterState
from peer.codec import Codec, get_codec
from peer.facts import Facts
from protocol.gossip.final_averaging import Meeting
from protocol.gossip.matchmaking import RESTS, pair_rank
from protocol.membership.book import BackOff, Fault
from protocol.outcomes import SkipReason
from protocol.run.run_spec import RunSpec
from simulation.work import SimulatedWork

from .arms import HostileArm
from .figures import Figures
from .liars import Liars, Scene, rms
from .pieces import Pieces, view_of

ROUND_S: Final = 60.0
"""Length of a round, by which rests are counted."""


class _Quiet:
    """Takes events, and tells nobody."""

    def emit(self, name: str, /, **fields: object) -> None:
        """Nothing."""


class _Rest:
    """The part of gossip that an outer step speaks to: a partner is doubted, or believed."""

    def __init__(self) -> None:
        self._doubted = BackOff(*RESTS)
        self.now_s = 0.0
        self.packer = self

    def doubt(self, peer_id: str, _: Fault) -> None:
        """Let it rest."""
        self._doubted.failed(peer_id, self.now_s)

    async def learn(self, own: memoryview, theirs: memoryview) -> None:
        """Nothing is learnt of it."""

    def doubts(self, peer_id: str) -> bool:
        """Whether it rests."""
        return not self._doubted.is_due(peer_id, self.now_s)


class _WatchedSteps(PairLane):
    """The daemon's outer steps, whose judgements can be looked at, or left out."""

    defended = True
    last_share: float | None = None

    def reach(self, own_rms: float) -> float:
        """The largest distance that is let through."""
        return self._plausibility.bound(FARTHEST_AT_FIRST * own_rms)

    async def _judged(
        self, ended: AverageEnded, meeting: Meeting | None
    ) -> tuple[AverageEnded, float]:
        judged, share = await super()._judged(ended, meeting)
        if not self.defended:
            judged, share = ended, 1.0
        self.last_share = share if isinstance(judged.outcome, Averaged) else None
        return judged, share


class _Peer:
    """One peer: its fast weights, which the caller trains, and its outer state."""

    def __init__(self, name: str, theta_P: torch.Tensor, spec: RunSpec, codec: Codec) -> None:
        self.name, self.theta_P = name, theta_P
        phi_P = theta_P.detach().numpy().copy()
        self.phi_P = torch.from_numpy(phi_P)
        factors = NolocoFactors(spec.sync.alpha, spec.sync.beta, spec.sync.effective_gamma)
        outer = OuterState(phi_P, phi_P * 0, codec, factors)
        self.rest = _Rest()
        parts: Any = SimpleNamespace(
            spec=spec,
            services=SimpleNamespace(facts=Facts(name, 1), work=SimulatedWork()),
            observe_round=lambda _timing: None,
        )
        gossip = cast(Gossip, self.rest)
        self.steps = _WatchedSteps(parts, outer, gossip, _Quiet(), trio.Lock())


async def _untried(_own: OwnVector) -> float | None:
    """Averages are judged by distances alone here; bench.hostile_long measures trials."""
    return None


class GossipSwarm:
    """Averages the weights of peers, the liars last; their training is the caller's."""

    def __init__(
        self, thetas: Sequence[torch.Tensor], spec: RunSpec, arm: HostileArm, names: Sequence[str]
    ) -> None:
        """Args: names: their peer ids."""
        self.figures = Figures()
        self._spec, self._arm = spec, arm
        codec = get_codec(spec.sync.codec)
        self._pieces = Pieces(codec, [thetas[0].numel()])
        self._peers = [
            _Peer(name, theta_P, spec, codec) for name, theta_P in zip(names, thetas, strict=True)
        ]
        for peer in self._peers:
            peer.steps.defended = arm.defence == "on"
        self._liars = Liars(arm.attack, spec.seed)

    def after_step(self, step: int) -> None:
        """Average when a round is done; the first step is 1."""
        if step % self._spec.sync.round_steps == 0:
            self._close(step // self._spec.sync.round_steps - 1)

    def settle(self) -> None:
        """Nothing is on its way."""

    def judged(self) -> list[torch.Tensor]:
        """Slow weights of the honest peers."""
        return [peer.phi_P for peer in self._peers[: self._arm.honest]]

    def _close(self, round_: int) -> None:
        codes = [self._pieces.encoded(peer.theta_P.detach()) for peer in self._peers]
        moves = [peer.theta_P.detach() - peer.phi_P for peer in self._peers]
        for peer in self._peers:
            peer.rest.now_s = round_ * ROUND_S
        partners = self._partners(round_)
        outcomes = [
            self._outcome(own, partners.get(own), codes, moves) for own in range(len(self._peers))
        ]
        for own, peer in enumerate(self._peers):
            trio.run(self._step, peer, round_, codes[own], outcomes[own])
            self._note(own, partners.get(own))
        for peer, own_codes in zip(self._peers, codes, strict=True):
            with torch.no_grad():
                peer.theta_P.add_(peer.phi_P - self._pieces.decoded(own_codes))

    def _partners(self, round_: int) -> dict[int, int]:
        """The pairs of a round, both ways."""
        group, peers = f"hostile-{self._spec.seed}", self._peers

        def rank(pair: tuple[int, int]) -> bytes:
            one, other = ((peers[place].name, round_) for place in pair)
            return pair_rank(group, one, other)

        found: dict[int, int] = {}
        for one, other in sorted(combinations(range(len(peers)), 2), key=rank):
            if found.keys().isdisjoint((one, other)) and self._may_meet(one, other):
                found[one], found[other] = other, one
        return found

    def _may_meet(self, one: int, other: int) -> bool:
        first, second = self._peers[one], self._peers[other]
        return not (first.rest.doubts(second.name) or second.rest.doubts(first.name))

    def _outcome(
        self,
        own: int,
        partner: int | None,
        codes: Sequence[torch.Tensor],
        moves: Sequence[torch.Tensor],
    ) -> RoundOutcome:
        """The exchange as one peer sees it. Liars tell each other the truth."""
        if partner is None:
            return Skipped(SkipReason.NO_PARTNER)
        sent = codes[partner]
        if self._is_liar(partner) and not self._is_liar(own):
            sent = self._lie(partner, self._peers[own], moves)
        name = self._peers[partner].name
        if not self._pieces.are_valid(sent):
            return Skipped(SkipReason.BAD_VECTOR, name)
        return Averaged(name, self._spec.sync.round_steps, view_of(sent))

    def _lie(self, liar: int, to: _Peer, moves: Sequence[torch.Tensor]) -> torch.Tensor:
        theta_P = to.theta_P.detach()
        reach = to.steps.reach(rms(theta_P))
        scene = Scene(0, moves[liar], moves[: self._arm.honest], reach)
        base_P = theta_P if self._liars.attack == "collude" else self._peers[liar].phi_P
        return self._liars.lied_codes(liar, base_P + self._liars.lied_move(scene), self._pieces)

    async def _step(
        self, peer: _Peer, round_: int, codes: torch.Tensor, outcome: RoundOutcome
    ) -> None:
        sync = self._spec.sync
        own = OwnVector(
            round=round_,
            step=(round_ + 1) * sync.round_steps,
            final=False,
            steps=sync.round_steps,
            tokens=0,
            digest="",
            payload=view_of(codes),
        )
        peer.steps.last_share = None
        await peer.steps.apply(AverageEnded(own, outcome, 0.0, 0.0), None, 0.0, _untried)

    def _note(self, own: int, partner: int | None) -> None:
        if self._is_liar(own):
            return
        share = self._peers[own].steps.last_share
        if partner is None or share is None:
            self.figures.note_lost(by_liar=partner is not None and self._is_liar(partner))
        else:
            weight = share / 2
            self.figures.note_averaged(weight if self._is_liar(partner) else 0.0)
            if not self._is_liar(partner):
                self.figures.note_honest(share)

    def _is_liar(self, index: int) -> bool:
        return index >= self._arm.honest and self._arm.liars > 0
