"""One core over a real outer copy, and a trainer that does what it is told."""

from dataclasses import dataclass, field

from owner_worlds import CYCLE, FRAGMENT, GROUP, IDS, codes_of, outer_copy

from peer.averaging.diloco.fragment_exchange import carry_out
from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.codec.leaves import code_digest
from protocol.diloco import fragment_events as e
from protocol.diloco.keeper import Departures, Keeper, digest_of_stamps
from protocol.diloco.peers import Peers, SendPlan
from protocol.fragment.chunk_ledger import Stamp
from protocol.wire.fragment_messages import ChunkResult, Result, mask_of

NUM_CHUNKS = 2
"""Of the one fragment of `outer_copy`."""


@dataclass
class World:
    """A keeper, and all that it deals with. What is ordered is done at once, unless it is held up.

    Attributes:
        held_up: orders that are not carried out yet; None carries out all at once.
    """

    outer: OuterFragments = field(default_factory=outer_copy)
    held: e.HoldOutcome = e.HoldOutcome.YIELDED
    now_s: float = 0.0
    held_up: list[e.InOrder] | None = None
    writes: int = 0
    told: list[tuple[int, bytes]] = field(default_factory=list)
    amended: list[e.Changes] = field(default_factory=list)
    merged: list[e.Changes] = field(default_factory=list)
    returned: list[e.SendEnded] = field(default_factory=list)
    fetching: list[e.FetchChunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peers = Peers(IDS[0], 1)
        self.see(IDS[:2])
        stamps = self.outer.first_stamps()[FRAGMENT]
        self.keeper = Keeper(FRAGMENT, stamps, SendPlan(GROUP, 1), self.peers, Departures())

    def see(self, present: list[str], round_: int = CYCLE) -> None:
        """These are there, and all of us are in this round."""
        rounds = dict.fromkeys((peer_id for peer_id in present if peer_id != IDS[0]), round_)
        self.peers.note_seen(e.GroupSeen(round_, frozenset([IDS[0], *present]), rounds))

    def take(self, *items: e.Item) -> None:
        """These come together."""
        self.do(self.keeper.put(self.now_s, *items))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.do(self.keeper.look(self.now_s))

    def do(self, commands) -> None:
        for command in tuple(commands):
            match command:
                case e.CycleSettled(_, cycle, digest):
                    self.told.append((cycle, digest))
                case e.SendEnded():
                    self.returned.append(command)
                case e.FetchChunk():
                    self.fetching.append(command)
                case e.Contribute():
                    pass
                case _ if self.held_up is not None:
                    self.held_up.append(command)
                case _:
                    self.carry_out(command)

    def carry_out(self, order: e.InOrder) -> None:
        keeper, now_s = self.keeper, self.now_s
        match order:
            case e.MergeIntoTrainer(_, _, changes):
                self.merged.append(changes)
            case e.AmendTrainer(_, changes):
                self.amended.append(changes)
            case e.HoldTrainer():
                self.do(keeper.trainer_held(now_s, self.held))
            case e.Verify():
                done = carry_out(self.outer, order)
                assert isinstance(done, e.Verified)
                self.do(keeper.verified(now_s, done.spoilt))
            case e.WriteResults() | e.WriteChunk() | e.UndoSteps():
                self.writes += 1
                done = carry_out(self.outer, order)
                assert isinstance(done, e.Written)
                self.do(keeper.written(now_s, done.stamps))

    def let_go(self) -> None:
        """Carry out what was held up, one after another, and all from now on."""
        held_up, self.held_up = self.held_up or [], None
        for order in held_up:
            self.carry_out(order)

    def digest(self) -> bytes:
        """One digest of all chunks' states now."""
        return digest_of_stamps(self.keeper.ledger.stamps)


def send(cycle: int = CYCLE) -> e.Sent:
    codes = b"".join(codes_of(outer_copy(), chunk, 0.5) for chunk in range(NUM_CHUNKS))
    return e.Sent(FRAGMENT, cycle, memoryview(codes), 1, 1)


def result(
    chunk: int,
    cycle: int = CYCLE,
    base: Stamp | None = None,
    contributors: tuple[str, ...] = (IDS[1],),
) -> e.ResultArrived:
    """One for a chunk as `outer_copy` makes it, or on another state; without us, or with."""
    outer = outer_copy()
    base = base or outer.first_stamps()[FRAGMENT][chunk]
    codes, mask = codes_of(outer, chunk, 0.5), mask_of(range(len(contributors)))
    of_chunk = ChunkResult(
        chunk,
        base.steps,
        base.weight,
        base.digest,
        mask,
        code_digest(outer.codec, memoryview(codes)),
    )
    made = Result(
        GROUP,
        FRAGMENT,
        cycle,
        IDS[1],
        1,
        tuple(sorted(contributors)),
        (1,) * len(contributors),
        (bytes(16),) * len(contributors),
        (of_chunk,),
        (chunk,),
        signature=bytes(64),
    )
    return e.ResultArrived(made, of_chunk, memoryview(codes), IDS[1])


def fetched(seed: int) -> e.ChunkFetched:
    """Chunk 1 of another peer, a step ahead of ours."""
    theirs = outer_copy(seed=seed)
    item = result(1, base=theirs.first_stamps()[FRAGMENT][1])
    outcome = item.result.outcome(item.chunk)
    stamp = theirs.write(
        FRAGMENT,
        e.ResultToWrite(1, CYCLE, item.chunk.base_stamp, outcome, item.codes, again=False),
    )
    return e.ChunkFetched(FRAGMENT, 1, CYCLE, stamp, memoryview(theirs.read(FRAGMENT, 1)))
