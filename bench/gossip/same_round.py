"""Pairs within one round, by number: the rule that the project had before.

The rules
  1. A peer that has closed round r exchanges with one that has closed round r, and with nobody
     else. It looks for at most half a round; then round r is not averaged.
  2. If nobody who has closed r is free, a random peer that trains r holds its proposal. That peer
     closes r early for its sake, once half of its quota is done and its own exchange has ended.
  3. A round closes when its quota is done and the exchange before it has ended. Its number says
     where the peer stands: what is trained past the quota does not count.
  4. A peer behind the middle of the others shortens its quota by its lag, at most by half. One that
     is more than one round behind the newest closes at once, is not averaged, and goes on there.
  5. An exchange that takes longer than a round is given up.

Matching is kinder here than it was in truth: it takes no time, and a peer that may take somebody
free never waits for one that still trains.
"""

from dataclasses import dataclass
from statistics import median
from typing import Final

from .lines import Transfer
from .swarm import Swarm, Trainee

SEARCH: Final = 0.5
LEAST_QUOTA: Final = 0.5
EARLY: Final = 0.5
MAX_EXCHANGE: Final = 1.0


@dataclass(slots=True, eq=False)
class _Peer:
    """One peer.

    Attributes:
        round: in training.
        closed: the round that is being settled.
        searching: it looks for a partner for that round.
        holds: a proposal for the round in training waits here.
    """

    trainee: Trainee
    round: int = 0
    quota: float = 1.0
    quota_done: bool = False
    closed: int = -1
    settled: bool = True
    searching: bool = False
    holds: bool = False
    jumped: bool = False


class SameRound:
    """See the top of the file."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._peers = [_Peer(trainee) for trainee in swarm.peers]

    def start(self) -> None:
        """Let all train."""
        for peer in self._peers:
            self._open(peer, 0)

    # --- rounds -----------------------------------------------------------------------------------
    def _open(self, peer: _Peer, round_: int) -> None:
        others = [self._place(other) for other in self._peers if other is not peer]
        lag = median(others) - round_
        peer.quota = min(1.0, max(LEAST_QUOTA, 1 - lag))
        peer.round, peer.quota_done = round_, False
        peer.holds = peer.jumped = False
        self._swarm.open_round(peer.trainee, peer.quota, lambda: self._quota_done(peer))
        peer.trainee.step = float(round_)
        self._leave_behind()

    def _place(self, peer: _Peer) -> float:
        """Where it stands (rule 3)."""
        return peer.round + min(1.0, self._swarm.trained(peer.trainee) / peer.quota)

    def _leave_behind(self) -> None:
        """Rule 4."""
        newest = max(peer.round for peer in self._peers)
        for peer in self._peers:
            if newest - peer.round > 1 and not peer.jumped:
                peer.jumped = True
                self._close_if_due(peer)

    def _quota_done(self, peer: _Peer) -> None:
        peer.quota_done = True
        self._close_if_due(peer)

    def _close_if_due(self, peer: _Peer) -> None:
        early = peer.holds and self._swarm.trained(peer.trainee) >= EARLY * peer.quota - 1e-9
        if peer.settled and (peer.quota_done or peer.jumped or early):
            self._close(peer)

    def _close(self, peer: _Peer) -> None:
        closed, jumped = peer.round, peer.jumped
        newest = max(other.round for other in self._peers)
        following = newest if newest - closed > 2 or jumped else closed + 1
        peer.closed, peer.settled = closed, jumped
        self._open(peer, following)
        if not jumped:
            peer.searching = True
            self._look(peer)

    # --- pairs ------------------------------------------------------------------------------------
    def _look(self, peer: _Peer) -> None:
        swarm, round_ = self._swarm, peer.closed
        free = [p for p in self._peers if p is not peer and p.searching and p.closed == round_]
        if free:
            self._exchange(peer, swarm.rng.choice(free))
            return
        coming = [p for p in self._peers if p is not peer and p.round == round_]
        if coming:
            self._hold(swarm.rng.choice(coming))
        swarm.agenda.after(SEARCH, lambda: self._give_up_search(peer, round_))

    def _hold(self, peer: _Peer) -> None:
        """Rule 2."""
        swarm, round_ = self._swarm, peer.round
        peer.holds = True
        left = (EARLY * peer.quota - swarm.trained(peer.trainee)) * peer.trainee.pace
        swarm.agenda.after(left, lambda: self._close_if_due(peer) if peer.round == round_ else None)

    def _give_up_search(self, peer: _Peer, round_: int) -> None:
        if peer.searching and peer.closed == round_:
            self._settle(peer)

    def _settle(self, peer: _Peer) -> None:
        peer.searching, peer.settled = False, True
        self._close_if_due(peer)

    # --- exchanges --------------------------------------------------------------------------------
    def _exchange(self, one: _Peer, other: _Peer) -> None:
        swarm = self._swarm
        one.searching = other.searching = False
        snapshots = one.closed + 1, other.closed + 1
        over = False

        def done() -> None:
            nonlocal over
            over = True
            swarm.meet(one.trainee, other.trainee)
            for peer, snapshot in zip((one, other), snapshots, strict=True):
                peer.trainee.ages.append(self._place(peer) - snapshot)
            self._settle(one)
            self._settle(other)

        def too_long(transfer: Transfer) -> None:
            if not over:
                swarm.give_up(transfer, one.trainee, other.trainee)
                self._settle(one)
                self._settle(other)

        transfer = swarm.swap(one.trainee, other.trainee, done)
        swarm.agenda.after(MAX_EXCHANGE, lambda: too_long(transfer))
