"""A peer that closes a round asks anybody, free or not, as AD-PSGD does (arXiv 1710.06952).

The asked peer takes a snapshot of its present weights and answers at once; nobody waits for anybody
to become free. What it costs depends on who merges:

  PULL   the asker merges, the asked peer does not: only one vector travels. The mean of all peers'
         weights is not kept, and several may pull from one peer at the same time.
  BOTH   both merge, and the asked peer may be in several exchanges at once. So that each peer
         averages once a round on the average, it asks in every second round.
  ONCE   both merge, and each snapshot is in one exchange: a peer that was asked since it last
         closed a round asks nobody at the next close, and one that is in an exchange, or has had
         this round's, refuses. The asker then tries others at random; if all refuse, its round is
         not averaged.

Rounds are those of free_with_free.py, debt included: a round closes when its quota is done and the
exchange that the peer asked for has ended.
"""

from dataclasses import dataclass
from enum import Enum, auto

from protocol.schedule.own_rounds import LEAST_QUOTA_SHARE, MAX_DEBT_ROUNDS

from .swarm import Swarm, Trainee


class Merging(Enum):
    """The sides that merge, and what."""

    PULL = auto()
    BOTH = auto()
    ONCE = auto()


@dataclass(slots=True, eq=False)
class _Peer:
    """One peer.

    Attributes:
        spent: it has had its exchange of the round in training (ONCE), or asked in the last one
            (BOTH).
    """

    trainee: Trainee
    debt: float = 0.0
    quota_done: bool = False
    settled: bool = True
    spent: bool = False


class AskAnybody:
    """See the top of the file."""

    def __init__(self, swarm: Swarm, merging: Merging) -> None:
        self._swarm = swarm
        self._merging = merging
        self._peers = [_Peer(trainee) for trainee in swarm.peers]

    def start(self) -> None:
        """Let all train."""
        for peer in self._peers:
            if self._merging is Merging.BOTH:
                peer.spent = self._swarm.rng.random() < 0.5
            self._open(peer)

    # --- rounds -----------------------------------------------------------------------------------
    def _open(self, peer: _Peer) -> None:
        peer.quota_done = False
        quota = max(LEAST_QUOTA_SHARE, 1 - peer.debt)
        self._swarm.open_round(peer.trainee, quota, lambda: self._quota_done(peer))

    def _quota_done(self, peer: _Peer) -> None:
        peer.quota_done = True
        if peer.settled:
            self._close(peer)

    def _close(self, peer: _Peer) -> None:
        debt = peer.debt + self._swarm.trained(peer.trainee) - 1
        peer.debt = min(MAX_DEBT_ROUNDS, max(0.0, debt))
        self._open(peer)
        asks, peer.spent = not peer.spent, False
        if self._merging is Merging.PULL or asks:
            peer.spent = self._merging is Merging.BOTH
            self._ask(peer)

    # --- exchanges --------------------------------------------------------------------------------
    def _ask(self, peer: _Peer) -> None:
        others = [other for other in self._peers if other is not peer]
        if self._merging is Merging.ONCE:
            others = [other for other in others if other.settled and not other.spent]
        if not others:
            return
        asked = self._swarm.rng.choice(others)
        self._swarm.meet(peer.trainee, asked.trainee)
        if self._merging is Merging.PULL:
            self._pull(peer, asked)
        else:
            self._swap(peer, asked)

    def _pull(self, peer: _Peer, asked: _Peer) -> None:
        swarm, snapshot = self._swarm, peer.trainee.step
        peer.settled = False

        def done() -> None:
            peer.trainee.ages.append(swarm.nominal(peer.trainee) - snapshot)
            self._settle(peer)

        swarm.pull(peer.trainee, asked.trainee, done)

    def _swap(self, peer: _Peer, asked: _Peer) -> None:
        swarm = self._swarm
        snapshots = [swarm.nominal(each.trainee) for each in (peer, asked)]
        waiting: tuple[_Peer, ...] = (peer,)
        if self._merging is Merging.ONCE:
            asked.spent = True
            waiting = (peer, asked)
        for each in waiting:
            each.settled = False

        def done() -> None:
            for each, snapshot in zip((peer, asked), snapshots, strict=True):
                each.trainee.ages.append(swarm.nominal(each.trainee) - snapshot)
            for each in waiting:
                self._settle(each)

        swarm.swap(peer.trainee, asked.trainee, done)

    def _settle(self, peer: _Peer) -> None:
        peer.settled = True
        if peer.quota_done:
            self._close(peer)
