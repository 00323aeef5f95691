"""How a large corpus comes to many peers: 100 GB of tokens, 64 peers, one of which has them.

The decisions are the real ones (data plan, needs, requests); links and trainers are modelled, so
that an hour of 64 peers takes minutes here. A link serves one request after another at its rate; a
trainer takes its steps in time, and stands still where a piece of the next one is not here. The
founder is switched off as soon as every piece is on some other peer, if that comes to pass.

Printed: when peers took their first step, how long they stood still, what they fetched, what they
hold, and when the founder was not needed any more.

    python -m bench.corpus --full
"""

import heapq
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np

from bench.report import Report, options
from protocol.content.needs import CorpusNeeds, kept_pieces
from protocol.content.scheduler import Request, Scheduler
from protocol.schedule.data_plan import DataPlan, Members

PIECE_BYTES = 4 << 20
BLOCK_TOKENS = 2048
TOKEN_BYTES = 2
BLOCKS_PER_PIECE = PIECE_BYTES // (BLOCK_TOKENS * TOKEN_BYTES)
BATCH = 8
ROUND_STEPS = 500
FIRST_BLOCKS = 1024
ANNOUNCED_S = 10.0
"""What a peer has, the others learn within so long."""
LATENCY_S = 0.1


@dataclass(frozen=True)
class World:
    gigabytes: float
    peers: int
    hours: float
    step_s: float
    founder_mbps: float
    up_mbps: float
    down_mbps: float

    @property
    def num_pieces(self) -> int:
        return int(self.gigabytes * 1e9 / PIECE_BYTES)


@dataclass
class Peer:
    name: str
    here: np.ndarray
    requests: Scheduler
    up_s: float
    """For one piece."""
    down_s: float
    plan: DataPlan
    members: Members
    up_free_s: float = 0.0
    down_free_s: float = 0.0
    alive: bool = True
    place: tuple[int, int] = (0, 0)
    steps: deque[set[int]] = field(default_factory=deque)
    missing: set[int] = field(default_factory=set)
    stood_since_s: float = 0.0
    stood_s: float = 0.0
    first_step_s: float | None = None
    done_steps: int = 0
    fetched: int = 0
    given: int = 0

    def begin_round(self) -> None:
        """Plan a round: the pieces of each of its steps."""
        epoch, position = self.place
        needs = CorpusNeeds(self.plan, epoch, position, self.name, self.members, FIRST_BLOCKS)
        peers = [name for name, _ in self.members]
        kept = kept_pieces(len(self.here), self.name, peers)
        self.requests.want(needs.first, needs.soon, kept)
        taken = self.plan.take(epoch, position, ROUND_STEPS * BATCH, self.name, self.members)
        pieces = (taken.blocks // BLOCKS_PER_PIECE).reshape(ROUND_STEPS, BATCH)
        self.steps = deque(set(row) for row in pieces.tolist())
        self.place = taken.epoch, taken.position


class Simulation:
    def __init__(self, world: World) -> None:
        self.world = world
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        names = ["founder", *(f"peer-{number:02d}" for number in range(1, world.peers))]
        members = tuple((name, 4) for name in names)
        plan = DataPlan(1, world.num_pieces * BLOCKS_PER_PIECE, BLOCKS_PER_PIECE)
        megabits = PIECE_BYTES * 8 / 1e6
        self.peers: dict[str, Peer] = {}
        for name in names:
            here = np.full(world.num_pieces, name == "founder")
            up = world.founder_mbps if name == "founder" else world.up_mbps
            down = world.founder_mbps if name == "founder" else world.down_mbps
            requests = Scheduler(name, here)
            self.peers[name] = Peer(
                name, here, requests, megabits / up, megabits / down, plan, members
            )
        self.copies = np.zeros(world.num_pieces, np.int64)
        """Copies of each piece, beside the founder's."""
        self.free_of_founder_s: float | None = None

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + seconds, self._count, action))

    def run(self) -> None:
        for number, peer in enumerate(self.peers.values()):
            peer.begin_round()
            self.after(0.0, partial(self._step, peer))
            self.after(number * ANNOUNCED_S / len(self.peers), partial(self._announce, peer))
        end_s = self.world.hours * 3600
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()

    def _announce(self, peer: Peer) -> None:
        """Tell all others what it has, and ask for what it needs."""
        if not peer.alive:
            return
        for other in self.peers.values():
            if other is not peer and other.alive:
                other.requests.holds(peer.name, peer.here)
        self._ask(peer)
        self.after(ANNOUNCED_S, partial(self._announce, peer))

    def _ask(self, peer: Peer) -> None:
        if not peer.alive:
            return
        for request in peer.requests.next_requests():
            source = self.peers[request.source]
            left_s = max(self.now_s, source.up_free_s) + source.up_s
            source.up_free_s = left_s
            came_s = max(left_s, peer.down_free_s + peer.down_s) + LATENCY_S
            peer.down_free_s = came_s

            self.after(came_s - self.now_s, partial(self._came, peer, source, request))

    def _came(self, peer: Peer, source: Peer, request: Request) -> None:
        if not peer.alive:
            return
        if not source.alive:
            peer.requests.failed(request)
        else:
            peer.requests.came(request)
            peer.fetched += 1
            source.given += 1
            if not peer.here[request.item]:
                peer.here[request.item] = True
                self.copies[request.item] += 1
            if peer.missing:
                peer.missing.discard(request.item)
                if not peer.missing:
                    peer.stood_s += self.now_s - peer.stood_since_s
                    peer.requests.wait_for(())
                    self._step(peer)
        self._ask(peer)
        if self.free_of_founder_s is None and self.copies.min() > 0:
            self._switch_off_the_founder()

    def _step(self, peer: Peer) -> None:
        """Take the next step, or stand still."""
        if not peer.alive:
            return
        if not peer.steps:
            peer.begin_round()
            self._ask(peer)
        missing = {piece for piece in peer.steps[0] if not peer.here[piece]}
        if missing:
            peer.missing, peer.stood_since_s = missing, self.now_s
            peer.requests.wait_for(sorted(missing))
            self._ask(peer)
            return
        peer.steps.popleft()
        peer.done_steps += 1
        if peer.first_step_s is None:
            peer.first_step_s = self.now_s
        self.after(self.world.step_s, partial(self._step, peer))

    def _switch_off_the_founder(self) -> None:
        self.free_of_founder_s = self.now_s
        self.peers["founder"].alive = False
        for peer in self.peers.values():
            peer.requests.gone("founder")


def report(simulation: Simulation) -> Report:
    world, end_s = simulation.world, simulation.now_s
    joiners = [peer for peer in simulation.peers.values() if peer.name != "founder"]
    first = [peer.first_step_s for peer in joiners if peer.first_step_s is not None]
    stood = [
        peer.stood_s + (end_s - peer.stood_since_s if peer.missing else 0.0) for peer in joiners
    ]
    fetched = [peer.fetched * PIECE_BYTES / 1e9 for peer in joiners]
    held = [100.0 * int(np.count_nonzero(peer.here)) / world.num_pieces for peer in joiners]
    steps = sum(peer.done_steps for peer in simulation.peers.values())
    trained_gb = steps * BATCH * BLOCK_TOKENS * TOKEN_BYTES / 1e9
    given = simulation.peers["founder"].given * PIECE_BYTES / 1e9
    free = simulation.free_of_founder_s
    return Report(
        "corpus",
        f"A corpus of {world.gigabytes:g} GB comes to {world.peers} peers",
        asdict(world),
        rows=[
            _row("first step, after s", first),
            _row("stood still, s", stood),
            _row("fetched by a peer, GB", fetched),
            _row("held by a peer, % of the corpus", held),
        ],
        notes=[
            f"stood still {100 * statistics.fmean(stood) / end_s:.1f}% of the time",
            f"fetched {sum(fetched):.1f} GB in all, for {trained_gb:.1f} GB that were trained",
            f"the founder gave {given:.1f} GB;"
            + (" needed to the end" if free is None else f" switched off after {free:.0f} s"),
        ],
    )


def _row(what: str, values: list[float]) -> dict[str, str | float]:
    return {"what": what, "median": statistics.median(values), "most": max(values)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--gigabytes", type=float, default=100.0)
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--hours", type=float, help="1 with --full, else 0.1")
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--founder-mbps", type=float, default=1000.0)
    parser.add_argument("--up-mbps", type=float, default=50.0)
    parser.add_argument("--down-mbps", type=float, default=200.0)
    given = vars(parser.parse_args())
    is_full, json_path = given.pop("full"), given.pop("json")
    if given["hours"] is None:
        given["hours"] = 1.0 if is_full else 0.1
    simulation = Simulation(World(**given))
    simulation.run()
    report(simulation).publish(json_path)


if __name__ == "__main__":
    main()
