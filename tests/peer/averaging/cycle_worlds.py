"""One core over a real outer copy, and a trainer that does what it is told."""

from collections.abc import Callable
from dataclasses import dataclass, field

from owner_worlds import CYCLE, FRAGMENT, GROUP, IDS, codes_of, outer_copy

from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.codec import code_digest
from protocol.diloco import commands as e
from protocol.diloco.cycle_machine import CycleMachine, digest_of_stamps
from protocol.diloco.peers import Context, Peers, SendPlan
from protocol.trainer_messages import Merge, Yield
from protocol.wire.fragment_messages import (
    ChunkResult,
    FragmentSettled,
    GetChunkState,
    Result,
    Stamp,
    mask_of,
)

NUM_CHUNKS = 2
"""Of the one fragment of `outer_copy`."""


@dataclass
class World:
    """A cycle machine, and all that it deals with.

    What is ordered is done at once, unless it is held up.

    Attributes:
        held_up: orders that are not carried out yet; None carries out all at once.
    """

    outer: OuterFragments = field(default_factory=outer_copy)
    held: e.HoldOutcome = e.HoldOutcome.YIELDED
    now_s: float = 0.0
    held_up: list[e.FragmentCommand] | None = None
    writes: int = 0
    told: list[tuple[int, bytes]] = field(default_factory=list)
    amended: list[Merge] = field(default_factory=list)
    merged: list[Merge] = field(default_factory=list)
    returned: list[e.SendEnded] = field(default_factory=list)
    fetching: list[e.Ask] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peers = Peers(IDS[0], 1)
        self.see(IDS[:2])
        self.todo: list[e.FragmentCommand] = []
        self.context = Context(SendPlan(GROUP, 1, lambda _: False), self.peers, self.todo.append)
        stamps = self.outer.first_stamps()[FRAGMENT]
        self.machine = CycleMachine(FRAGMENT, stamps, self.context)

    def see(self, present: list[str], round_: int = CYCLE) -> None:
        """These are there, and all of us are in this round."""
        rounds = dict.fromkeys((peer_id for peer_id in present if peer_id != IDS[0]), round_)
        self.peers.seen = e.GroupSeen(round_, frozenset([IDS[0], *present]), rounds)

    def take(self, *items: e.Item) -> None:
        """These come together."""
        self.tell(lambda machine: machine.put(*items))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.tell(CycleMachine.advance)

    def tell(self, what: Callable[[CycleMachine], None]) -> None:
        """Tell the machine this, and do what it wants."""
        self.context.now_s = self.now_s
        what(self.machine)
        commands, self.todo[:] = list(self.todo), []
        for command in commands:
            match command:
                case e.SendMessage(_, FragmentSettled(cycle=cycle, digest=digest)):
                    self.told.append((cycle, digest))
                case e.SendEnded():
                    self.returned.append(command)
                case e.Ask(_, GetChunkState()):
                    self.fetching.append(command)
                case e.Contribute() | e.Ask() | e.ForgetOthers():
                    pass
                case _ if self.held_up is not None:
                    self.held_up.append(command)
                case _:
                    self.carry_out(command)

    def carry_out(self, order: e.FragmentCommand) -> None:
        match order:
            case Merge(_, cycle):
                (self.amended if cycle is None else self.merged).append(order)
            case Yield():
                self.tell(lambda machine: machine.trainer_held(self.held))
            case e.Verify():
                spoilt = self.outer.carry_out(order)
                self.tell(lambda machine: machine.verified(spoilt))
            case e.WriteResults() | e.WriteChunk() | e.UndoSteps():
                self.writes += 1
                stamps = self.outer.carry_out(order)
                self.tell(lambda machine: machine.written(stamps))

    def let_go(self) -> None:
        """Carry out what was held up, one after another, and all from now on."""
        held_up, self.held_up = self.held_up or [], None
        for order in held_up:
            self.carry_out(order)

    def digest(self) -> bytes:
        """One digest of all chunks' states now."""
        return digest_of_stamps(self.machine.ledger.stamps)


def merged(cycle: int = CYCLE, **changes: tuple[int, ...]) -> Merge:
    """That a send is over, and what has changed."""
    return Merge(FRAGMENT, cycle, changes.get("stepped", ()), changes.get("moved", ()))


def amended(
    *, stepped: tuple[int, ...] = (), moved: tuple[int, ...] = (), redone: tuple[int, ...] = ()
) -> Merge:
    """That a fragment which was yielded has changed."""
    return Merge(FRAGMENT, None, stepped, moved, redone)


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
    stamp = theirs.write(FRAGMENT, item)
    return e.ChunkFetched(FRAGMENT, CYCLE, stamp, memoryview(theirs.read(FRAGMENT, 1)))
