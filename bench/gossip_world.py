"""Peers that gossip over unequal lines, in virtual time: the protocol's own decisions, no bytes.

What decides is the real code: `Matchmaker`, `OwnRounds` and `Patience` of each peer. What is
pretended is the rest: messages take the latency of their pair, steps the time of their machine, and
an exchange its vector over the rate of its line, where peers behind one uplink share it. So a few
hundred rounds of two dozen peers take seconds, from a seed.

    train |-- quota --|-- past it, while the exchange before is under way --|-- next round ...
    free  |-- looking for a partner --|-- exchange --|
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from protocol import matchmaking_events as m
from protocol.gossip_patience import Patience
from protocol.matchmaking import Matchmaker
from protocol.outcomes import SkipReason
from protocol.own_rounds import OwnRounds, RoundPlan
from protocol.rounds import keep_together

GROUP: Final = "group"
BEAT_S: Final = 1.0
FOREVER: Final = 10**9


@dataclass(frozen=True, slots=True)
class Line:
    """The line between two peers, one way: latency, and how long a whole vector takes alone."""

    latency_s: float
    vector_s: float


@dataclass(frozen=True, slots=True)
class World:
    """What peers live in.

    Attributes:
        lines: by pair of places, lower first.
        uplinks: place to (name of a shared uplink, how long a vector takes on it alone).
        step_s: by place: mean seconds of an own step.
        scatter: standard deviation of a round's seconds, as a share.
        inner_steps: H.
    """

    lines: Mapping[tuple[int, int], Line]
    uplinks: Mapping[int, tuple[str, float]]
    step_s: tuple[float, ...]
    scatter: float
    inner_steps: int

    @property
    def num_peers(self) -> int:
        """How many live in it."""
        return len(self.step_s)

    def line(self, one: int, other: int) -> Line:
        """The line between two places."""
        return self.lines[min(one, other), max(one, other)]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange that has ended.

    Attributes:
        step: nominal step of its snapshot, by side. age: nominal steps from it to the merge.
        slow: it outlasted both quotas: the line held the peers up.
    """

    peers: tuple[int, int]
    began_s: float
    ended_s: float
    steps: tuple[float, float]
    ages: tuple[float, float]


@dataclass(slots=True)
class PeerRecord:
    """What one peer has done.

    Attributes:
        trained: nominal steps. searched_s: in all searches. exchanged_s: in all exchanges.
    """

    trained: float = 0.0
    averaged: int = 0
    skipped: dict[SkipReason, int] = field(default_factory=dict)
    searched_s: float = 0.0
    exchanged_s: float = 0.0
    held_up: int = 0


@dataclass(slots=True)
class _Peer:
    """One simulated peer."""

    place: int
    maker: Matchmaker
    rounds: OwnRounds
    patience: Patience
    record: PeerRecord
    plan: RoundPlan
    began_s: float = 0.0
    step_s: float = 0.0
    snapshot: m.Snapshot | None = None
    freed_s: float = 0.0
    quota_done: bool = False
    settled: bool = True
    free: dict[str, m.Snapshot] = field(default_factory=dict)
    busy_with: int | None = None

    def nominal(self, now_s: float) -> float:
        """The nominal step by now."""
        return self.plan.start_step + self.plan.stride * (now_s - self.began_s) / self.step_s


class GossipWorld:
    """Runs peers until a time. See the top of the file.

    Attributes:
        records: by place.
        exchanges: that have ended, in order.
    """

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._rng = random.Random(seed)
        self._count = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.now_s = 0.0
        self.ids = [f"peer{place:03d}" for place in range(world.num_peers)]
        self._places = {peer_id: place for place, peer_id in enumerate(self.ids)}
        self.records = [PeerRecord() for _ in self.ids]
        self.exchanges: list[Exchange] = []
        self._uplink_use: dict[str, int] = {}
        self._peers = [self._new_peer(place) for place in range(world.num_peers)]

    def __repr__(self) -> str:
        return f"<GossipWorld of {len(self.ids)} at {self.now_s:.1f} s>"

    def _new_peer(self, place: int) -> _Peer:
        world = self._world
        rounds = OwnRounds(world.inner_steps, FOREVER, 0, 0.0)
        maker = Matchmaker(GROUP, self.ids[place], world.inner_steps)
        owed = self._owed(place)
        return _Peer(place, maker, rounds, Patience(), self.records[place], rounds.plan(owed))

    def _owed(self, place: int) -> float:
        """Steps of a round: the middle peer does H."""
        middle = sorted(self._world.step_s)[len(self._world.step_s) // 2]
        return self._world.inner_steps * middle / self._world.step_s[place]

    def run(self, until_s: float) -> None:
        """Let all of them train and average."""
        for peer in self._peers:
            peer.step_s = self._world.step_s[peer.place]
        for peer in self._peers:
            self._begin(peer)
        self._after(BEAT_S, self._beat)
        while self._agenda and self._agenda[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._agenda)
            action()
        for peer in self._peers:
            peer.record.trained = peer.nominal(until_s)

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now_s + delay_s, next(self._count), action))

    # --- training ---------------------------------------------------------------------------------
    def _begin(self, peer: _Peer) -> None:
        others = [each.nominal(self.now_s) for each in self._peers if each is not peer]
        owed, inner_steps = self._owed(peer.place), self._world.inner_steps
        peer.plan = peer.rounds.plan(keep_together(owed, peer.rounds.step, others, inner_steps))
        scattered = max(0.3, self._rng.gauss(1.0, self._world.scatter))
        peer.step_s = self._world.step_s[peer.place] * scattered
        peer.began_s, peer.quota_done = self.now_s, False
        round_ = peer.plan.round
        self._after(peer.plan.quota * peer.step_s, lambda: self._quota_done(peer, round_))

    def _quota_done(self, peer: _Peer, round_: int) -> None:
        if peer.plan.round == round_:
            peer.quota_done = True
            self._close_if_due(peer)

    def _close_if_due(self, peer: _Peer) -> None:
        if not (peer.quota_done and peer.settled):
            return
        step = peer.nominal(self.now_s)
        peer.rounds.closed(step, [p.nominal(self.now_s) for p in self._peers if p is not peer])
        peer.snapshot = m.Snapshot(peer.plan.round, int(peer.rounds.step))
        peer.settled, peer.freed_s = False, self.now_s
        self._begin(peer)
        round_s = self._round_s(peer)
        fresh_s = peer.patience.for_fresh_s(round_s)
        self._announce(peer, peer.snapshot)
        self._feed(peer, self._seen(peer))
        search_s = max(2.0, 2 * round_s)
        event = m.BecameFree(peer.snapshot, self.now_s + fresh_s, self.now_s + search_s)
        self._feed(peer, event)

    def _round_s(self, peer: _Peer) -> float:
        return self._owed(peer.place) * self._world.step_s[peer.place]

    # --- messages ---------------------------------------------------------------------------------
    def _send(self, sender: _Peer, receiver_id: str, event: m.Event) -> None:
        receiver = self._peers[self._places[receiver_id]]
        latency_s = self._world.line(sender.place, receiver.place).latency_s
        self._after(latency_s, lambda: self._feed(receiver, event))

    def _announce(self, peer: _Peer, snapshot: m.Snapshot | None) -> None:
        for other in self._peers:
            if other is not peer:
                latency_s = self._world.line(peer.place, other.place).latency_s
                self._after(latency_s, lambda other=other: self._heard(other, peer, snapshot))

    def _heard(self, peer: _Peer, teller: _Peer, snapshot: m.Snapshot | None) -> None:
        teller_id = self.ids[teller.place]
        if snapshot is None:
            peer.free.pop(teller_id, None)
        else:
            peer.free[teller_id] = snapshot
        self._feed(peer, self._seen(peer))

    def _seen(self, peer: _Peer) -> m.PeersSeen:
        return m.PeersSeen(tuple(sorted(peer.free.items())), len(self._peers) - 1)

    def _beat(self) -> None:
        for peer in self._peers:
            if peer.maker.is_looking:
                self._feed(peer, self._seen(peer))
        self._after(BEAT_S, self._beat)

    def _feed(self, peer: _Peer, event: m.Event) -> None:
        for command in peer.maker.step(self.now_s, event):
            self._carry_out(peer, command)
        due_s = peer.maker.next_deadline_s
        if due_s is not None and not isinstance(event, m.Tick):
            self._after(max(0.0, due_s - self.now_s) + 1e-9, lambda: self._feed(peer, m.Tick()))

    def _carry_out(self, peer: _Peer, command: m.Command) -> None:
        own_id = self.ids[peer.place]
        match command:
            case m.Propose(other, _):
                assert peer.snapshot is not None
                self._send(peer, other, m.ProposalReceived(own_id, peer.snapshot))
            case m.Withdraw(other, round_):
                self._send(peer, other, m.ProposalWithdrawn(own_id, round_))
            case m.AcceptProposal(other, round_):
                self._send(peer, other, m.ProposalAccepted(own_id, round_))
            case m.RefuseProposal(other, round_, reason):
                self._send(peer, other, m.ProposalRefused(own_id, round_, reason))
            case m.Paired(other, _, leading):
                self._announce(peer, None)
                if leading:
                    self._exchange(peer, self._peers[self._places[other]])
            case m.Unmatched(_, reason):
                self._announce(peer, None)
                skipped = peer.record.skipped
                skipped[reason] = skipped.get(reason, 0) + 1
                self._settle(peer)

    # --- exchanges --------------------------------------------------------------------------------
    def _exchange(self, one: _Peer, other: _Peer) -> None:
        """From the moment at which the asker knows of the yes."""
        seconds = self._seconds(one.place, other.place)
        uplinks = self._uplinks_of(one.place, other.place)
        for name in uplinks:
            self._uplink_use[name] = self._uplink_use.get(name, 0) + 1
        began_s = self.now_s
        self._after(seconds, lambda: self._exchanged(one, other, began_s, uplinks))

    def _uplinks_of(self, *places: int) -> list[str]:
        uplinks = self._world.uplinks
        return [uplinks[place][0] for place in places if place in uplinks]

    def _seconds(self, one: int, other: int) -> float:
        """Of a vector each way; a shared uplink is divided by the exchanges that use it now."""
        line = self._world.line(one, other)
        shared = [
            self._world.uplinks[place][1] * (1 + self._uplink_use.get(name, 0))
            for place in (one, other)
            if place in self._world.uplinks
            for name in [self._world.uplinks[place][0]]
        ]
        return 2 * line.latency_s + max([line.vector_s, *shared])

    def _exchanged(self, one: _Peer, other: _Peer, began_s: float, uplinks: list[str]) -> None:
        for name in uplinks:
            self._uplink_use[name] -= 1
        peers = (one, other)
        snapshots = [peer.snapshot for peer in peers]
        assert all(snapshots)
        steps = tuple(float(each.step) for each in snapshots if each is not None)
        ages = tuple(p.nominal(self.now_s) - s for p, s in zip(peers, steps, strict=True))
        self.exchanges.append(
            Exchange((one.place, other.place), began_s, self.now_s, steps, ages)  # type: ignore[arg-type]
        )
        for peer in peers:
            seconds = self.now_s - began_s
            peer.record.averaged += 1
            peer.record.exchanged_s += seconds
            peer.record.searched_s += began_s - peer.freed_s
            peer.record.held_up += seconds > self._round_s(peer)
            peer.patience.exchanged(began_s - peer.freed_s, seconds, self._round_s(peer))
            self._settle(peer)

    def _settle(self, peer: _Peer) -> None:
        assert peer.snapshot is not None
        peer.settled = True
        self._feed(peer, m.RoundSettled(peer.snapshot.round))
        self._close_if_due(peer)


def unequal_world(num_peers: int, ratio: float, seed: int, *, round_s: float = 60.0) -> World:
    """A seeded world of unequal peers.

    Args:
        ratio: exchange over round, of the middle pair.
        round_s: of the middle peer.

    Lines have 4 to 140 ms, and rates within a factor of 1.5 of the middle; speeds are spread from
    half to twice the middle; rounds scatter by 25%; two peers are behind one uplink, which carries
    one of their exchanges at the middle rate.
    """
    rng = random.Random(f"{num_peers}/{seed}")
    inner_steps = 60
    vector_s = ratio * round_s
    lines = {
        pair: Line(rng.uniform(0.004, 0.140), vector_s * math.exp(rng.uniform(-0.4, 0.4)))
        for pair in itertools.combinations(range(num_peers), 2)
    }
    speeds = [2 ** rng.uniform(-1, 1) for _ in range(num_peers)]
    middle = sorted(speeds)[num_peers // 2]
    step_s = tuple(round_s / inner_steps * middle / speed for speed in speeds)
    uplinks = {0: ("home", vector_s), 1: ("home", vector_s)}
    return World(lines, uplinks, step_s, 0.25, inner_steps)
