"""A free peer averages with any other free peer: the rule of protocol/gossip/matchmaking.py,
abstractly.

A round closes when its quota is done and the exchange before it has ended. A peer that has closed
one is free, and exchanges with a random other that is free. Three parts can be left out:

  debt       protocol/schedule/own_rounds.py, rule 2: what was trained past a quota shortens later
  ones savings    protocol/gossip/patience.py, rule 2: now and then a longer wait for a new partner
  put off    protocol/gossip/matchmaking.py, rule 5: peers met last go behind those not met of late
"""

from collections import deque
from dataclasses import dataclass, field

from protocol.gossip.matchmaking import PUT_OFF_SHARE
from protocol.gossip.patience import Patience
from protocol.schedule.own_rounds import LEAST_QUOTA_SHARE, MAX_DEBT_ROUNDS

from .swarm import Swarm, Trainee


@dataclass(frozen=True, slots=True)
class Parts:
    """Which parts of the rule are there."""

    debt: bool = True
    savings: bool = True
    put_off: bool = True


@dataclass(slots=True, eq=False)
class _Peer:
    trainee: Trainee
    patience: Patience = field(default_factory=Patience)
    met: deque[int] = field(default_factory=deque)
    debt: float = 0.0
    snapshot: float = 0.0
    quota_done: bool = False
    settled: bool = True
    freed: float = 0.0
    fresh_until: float = 0.0


class FreeWithFree:
    """See the top of the file."""

    def __init__(self, swarm: Swarm, parts: Parts) -> None:
        self._swarm = swarm
        self._parts = parts
        self._peers = [_Peer(trainee) for trainee in swarm.peers]
        self._free: list[_Peer] = []
        others = len(self._peers) - 1
        self._put_off = max(1, others // PUT_OFF_SHARE) if parts.put_off else 0

    def start(self) -> None:
        """Let all train."""
        for peer in self._peers:
            self._open(peer)

    # --- rounds -----------------------------------------------------------------------------------
    def _open(self, peer: _Peer) -> None:
        quota = max(LEAST_QUOTA_SHARE, 1 - peer.debt) if self._parts.debt else 1.0
        peer.quota_done = False
        self._swarm.open_round(peer.trainee, quota, lambda: self._quota_done(peer))

    def _quota_done(self, peer: _Peer) -> None:
        peer.quota_done = True
        if peer.settled:
            self._close(peer)

    def _close(self, peer: _Peer) -> None:
        swarm = self._swarm
        debt = peer.debt + swarm.trained(peer.trainee) - 1
        peer.debt = min(MAX_DEBT_ROUNDS, max(0.0, debt))
        self._open(peer)
        peer.snapshot, peer.settled, peer.freed = peer.trainee.step, False, swarm.now
        wait = peer.patience.for_fresh_s(1.0) if self._put_off else 0.0
        peer.fresh_until = swarm.now + wait
        self._free.append(peer)
        self._match(peer)
        if peer in self._free and wait:
            swarm.agenda.after(wait, lambda: self._match(peer) if peer in self._free else None)

    # --- pairs ------------------------------------------------------------------------------------
    def _match(self, peer: _Peer) -> None:
        others = [other for other in self._free if other is not peer]
        fresh = [other for other in others if not self._has_met(peer, other)]
        fit = fresh or [other for other in others if self._is_patient_no_more(peer, other)]
        if fit:
            self._exchange(peer, self._swarm.rng.choice(fit))

    def _has_met(self, one: _Peer, other: _Peer) -> bool:
        return other.trainee.place in one.met or one.trainee.place in other.met

    def _is_patient_no_more(self, one: _Peer, other: _Peer) -> bool:
        return self._swarm.now >= max(one.fresh_until, other.fresh_until) - 1e-9

    def _exchange(self, one: _Peer, other: _Peer) -> None:
        swarm, began = self._swarm, self._swarm.now
        swarm.meet(one.trainee, other.trainee)
        for peer, partner in ((one, other), (other, one)):
            self._free.remove(peer)
            if self._put_off:
                peer.met.append(partner.trainee.place)
                while len(peer.met) > self._put_off:
                    peer.met.popleft()
        swarm.swap(one.trainee, other.trainee, lambda: self._exchanged((one, other), began))

    def _exchanged(self, peers: tuple[_Peer, _Peer], began: float) -> None:
        swarm = self._swarm
        for peer in peers:
            peer.trainee.ages.append(swarm.nominal(peer.trainee) - peer.snapshot)
            waited = began - peer.freed if self._parts.savings else float("inf")
            peer.patience.exchanged(waited, swarm.now - began, 1.0)
        for peer in peers:
            peer.settled = True
            if peer.quota_done:
                self._close(peer)
