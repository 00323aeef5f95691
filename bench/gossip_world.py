"""Peers that gossip over unequal lines, in virtual time: the protocol's own decisions, no bytes.

What decides is the real code: `Matchmaker`, `OwnRounds` and `Patience` of each peer, and the rules
of protocol/schedule/rounds.py. What is pretended is the rest: messages take the latency of their
pair, steps the time of their machine, and an exchange the rate of its line, where peers behind one
uplink share it (gossip/lines.py). So a few hundred rounds of two dozen peers take seconds, from a
seed.

    train |-- quota --|-- past it, while the exchange before is under way --|-- next round ...
    free  |-- looking for a partner --|-- exchange --|

Two things are better than in the daemon: a trainer is slowed down by nothing, so its speed beside
its speed alone is 1 by construction; and peers know each other's true places and speeds, where the
daemon reckons them from what it heard last (peer/rounds/pace.py). No peer ever fails.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bench.gossip.agenda import Agenda
from bench.gossip.lines import SharedLines
from bench.gossip.world import World
from peer.averaging.gossip.lane import MIN_SEARCH_S
from protocol.gossip import matchmaking as m
from protocol.gossip.matchmaking import WAIT_ROUNDS, Patience
from protocol.outcomes import SkipReason
from protocol.schedule.rounds import OwnRounds, RoundPlan, keep_together

GROUP: Final = "group"
FOREVER: Final = 10**9
LEAST_SCATTER: Final = 0.3
_EPSILON: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Side:
    """One peer's side of an exchange.

    Attributes:
        step: nominal step of its snapshot.
        age: nominal steps from the snapshot to the merge.
    """

    peer: int
    step: float
    age: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange that has ended; the first side asked."""

    began_s: float
    ended_s: float
    sides: tuple[Side, Side]


@dataclass(slots=True)
class PeerRecord:
    """What one peer has done.

    Attributes:
        nominal: steps. own_steps: trained ones, those of the round in training among them.
        searched_s: in searches that found somebody. exchanged_s: in exchanges.
    """

    nominal: float = 0.0
    own_steps: int = 0
    averaged: int = 0
    skipped: dict[SkipReason, int] = field(default_factory=dict)
    searched_s: float = 0.0
    exchanged_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Peer:
    """One simulated peer."""

    place: int
    maker: m.Matchmaker
    rounds: OwnRounds
    record: PeerRecord
    plan: RoundPlan
    owed: float
    patience: Patience = field(default_factory=Patience)
    began_s: float = 0.0
    step_s: float = 1.0
    snapshot: m.RoundSnapshot = field(default=m.RoundSnapshot(-1, 0))
    freed_s: float = 0.0
    next_round_s: float = 0.0
    quota_done: bool = False
    settled: bool = True
    free: dict[str, m.RoundSnapshot] = field(default_factory=dict)
    tick_s: float = math.inf

    def round_steps(self, now_s: float) -> int:
        """Whole own steps in this round."""
        return int((now_s - self.began_s) / self.step_s + _EPSILON)

    def own_steps(self, now_s: float) -> int:
        """All of them."""
        return self.record.own_steps + self.round_steps(now_s)

    def nominal(self, now_s: float) -> float:
        """The nominal step by now."""
        return self.plan.start_step + self.plan.stride * self.round_steps(now_s)


class GossipWorld:
    """Runs peers until a time. See the top of the file.

    Attributes:
        records: by place.
        exchanges: that have ended, in order.
    """

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._rng = random.Random(seed)
        self._agenda = Agenda()
        self._lines = SharedLines(self._agenda)
        self._ids = [f"peer{place:03d}" for place in range(world.num_peers)]
        self._places = {peer_id: place for place, peer_id in enumerate(self._ids)}
        self.records = [PeerRecord() for _ in self._ids]
        self.exchanges: list[Exchange] = []
        self._peers = [self._new_peer(place) for place in range(world.num_peers)]

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self._agenda.now_s

    def _new_peer(self, place: int) -> _Peer:
        world = self._world
        rounds = OwnRounds(self._ids[place], world.inner_steps, lambda _: FOREVER, 0, 0.0)
        maker = m.Matchmaker(GROUP, self._ids[place], world.inner_steps)
        owed = world.owed(place)
        return _Peer(place, maker, rounds, self.records[place], rounds.plan(owed), owed)

    def run(self, until_s: float) -> None:
        """Let all of them train and average."""
        for peer in self._peers:
            self._begin(peer)
        self._agenda.run(until_s)
        for peer in self._peers:
            peer.record.nominal = peer.nominal(self.now_s)
            peer.record.own_steps = peer.own_steps(self.now_s)

    # --- training ---------------------------------------------------------------------------------
    def _places_of_others(self, peer: _Peer) -> list[float]:
        return [each.nominal(self.now_s) for each in self._peers if each is not peer]

    def _begin(self, peer: _Peer) -> None:
        world = self._world
        places = self._places_of_others(peer)
        owed = keep_together(peer.owed, peer.rounds.step, places, world.inner_steps)
        peer.plan = peer.rounds.plan(owed)
        scattered = max(LEAST_SCATTER, self._rng.gauss(1.0, world.scatter))
        peer.step_s = world.step_s[peer.place] * scattered
        peer.began_s, peer.quota_done = self.now_s, False
        round_ = peer.plan.round
        self._agenda.after(peer.plan.quota * peer.step_s, lambda: self._quota_done(peer, round_))

    def _quota_done(self, peer: _Peer, round_: int) -> None:
        if peer.plan.round == round_:
            peer.quota_done = True
            self._close_if_due(peer)

    def _close_when_stepped(self, peer: _Peer) -> None:
        """The step in progress counts."""
        into_s = (self.now_s - peer.began_s) % peer.step_s
        self._agenda.after(peer.step_s - into_s, lambda: self._close_if_due(peer))

    def _close_if_due(self, peer: _Peer) -> None:
        if not (peer.quota_done and peer.settled):
            return
        own_steps, step = peer.round_steps(self.now_s), peer.nominal(self.now_s)
        peer.rounds.closed(step, self._places_of_others(peer))
        peer.record.own_steps += own_steps
        peer.snapshot = m.RoundSnapshot(peer.plan.round, int(peer.rounds.step))
        peer.settled, peer.freed_s = False, self.now_s
        self._begin(peer)
        self._look(peer)

    def _round_s(self, peer: _Peer) -> float:
        return peer.owed * self._world.step_s[peer.place]

    # --- looking for a partner --------------------------------------------------------------------
    def _look(self, peer: _Peer) -> None:
        round_s = self._round_s(peer)
        peer.next_round_s = peer.plan.quota * self._world.step_s[peer.place]
        fresh_s = peer.patience.for_fresh_s(peer.next_round_s)
        search_s = max(MIN_SEARCH_S, WAIT_ROUNDS * round_s)
        self._announce(peer, peer.snapshot)
        self._see(peer)
        until_s = self.now_s + search_s
        self._do(peer, peer.maker.search(self.now_s, peer.snapshot, self.now_s + fresh_s, until_s))

    def _send(
        self,
        sender: _Peer,
        receiver_id: str,
        told: Callable[[m.Matchmaker], list[m.MatchCommand]],
    ) -> None:
        receiver = self._peers[self._places[receiver_id]]
        latency_s = self._world.line(sender.place, receiver.place).latency_s
        self._agenda.after(latency_s, lambda: self._do(receiver, told(receiver.maker)))

    def _announce(self, peer: _Peer, snapshot: m.RoundSnapshot | None) -> None:
        for other in self._peers:
            if other is not peer:
                latency_s = self._world.line(peer.place, other.place).latency_s
                self._agenda.after(latency_s, partial(self._heard, other, peer, snapshot))

    def _heard(self, peer: _Peer, teller: _Peer, snapshot: m.RoundSnapshot | None) -> None:
        peer.free.pop(self._ids[teller.place], None)
        if snapshot is not None:
            peer.free[self._ids[teller.place]] = snapshot
        if peer.maker.is_looking:
            self._see(peer)

    def _see(self, peer: _Peer) -> None:
        free = sorted(peer.free.items())
        self._do(peer, peer.maker.seen(self.now_s, free, len(self._peers) - 1))

    def _do(self, peer: _Peer, commands: list[m.MatchCommand]) -> None:
        for command in commands:
            self._carry_out(peer, command)
        due_s = peer.maker.next_deadline_s
        if due_s is not None and due_s < peer.tick_s:
            peer.tick_s = due_s
            self._agenda.after(due_s - self.now_s + _EPSILON, lambda: self._tick(peer, due_s))

    def _tick(self, peer: _Peer, due_s: float) -> None:
        if peer.tick_s == due_s:
            peer.tick_s = math.inf
            self._do(peer, peer.maker.tick(self.now_s))

    def _carry_out(self, peer: _Peer, command: m.MatchCommand) -> None:
        own_id = self._ids[peer.place]
        match command:
            case m.SendProposal(other, _):
                ours = peer.snapshot
                self._send(peer, other, lambda maker: maker.asked(self.now_s, own_id, ours))
            case m.Withdraw(other, round_):
                self._send(peer, other, lambda maker: maker.withdrawn(self.now_s, own_id, round_))
            case m.RefuseProposal(other, round_, refusal):
                self._send(
                    peer, other, lambda maker: maker.refused(self.now_s, own_id, round_, refusal)
                )
            case m.Paired(other, _, None):
                self._announce(peer, None)
                self._exchange(peer, self._peers[self._places[other]])
            case m.Paired(other, _, int(proposed)):
                self._send(peer, other, lambda maker: maker.accepted(own_id, proposed))
                self._announce(peer, None)
            case m.Unmatched(_, reason):
                self._announce(peer, None)
                peer.record.skipped[reason] = peer.record.skipped.get(reason, 0) + 1
                self._settle(peer)

    # --- exchanges --------------------------------------------------------------------------------
    def _exchange(self, one: _Peer, other: _Peer) -> None:
        """From the moment at which the asker knows of the yes."""
        began_s = self.now_s
        round_trip_s = 2 * self._world.line(one.place, other.place).latency_s
        alone_s = self._world.alone_s(one.place, other.place)

        def arrived() -> None:
            self._agenda.after(round_trip_s, lambda: self._exchanged(one, other, began_s))

        self._lines.begin(alone_s, arrived)

    def _exchanged(self, one: _Peer, other: _Peer, began_s: float) -> None:
        sides = self._side(one), self._side(other)
        self.exchanges.append(Exchange(began_s, self.now_s, sides))
        for peer in (one, other):
            seconds, waited_s = self.now_s - began_s, began_s - peer.freed_s
            peer.record.averaged += 1
            peer.record.exchanged_s += seconds
            peer.record.searched_s += waited_s
            peer.patience.exchanged(waited_s, seconds, peer.next_round_s)
            self._settle(peer)

    def _side(self, peer: _Peer) -> Side:
        step = peer.snapshot.step
        return Side(peer.place, float(step), peer.nominal(self.now_s) - step)

    def _settle(self, peer: _Peer) -> None:
        peer.settled = True
        self._do(peer, peer.maker.end(peer.snapshot.round))
        if peer.quota_done:
            self._close_when_stepped(peer)
