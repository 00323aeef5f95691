"""A keeper between a trainer and other peers that do not keep to the rules."""

from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from owner_worlds import CYCLE, FRAGMENT, GROUP, IDS, codes_of, outer_copy

from peer.averaging.diloco.fragment_items import Arrived, Changes, Fetched, Held, Passed, Sent
from peer.averaging.diloco.fragment_keeper import (
    MAX_EARLY_FOR_A_CHUNK,
    MAX_INBOX,
    MAX_RETURN_S,
    FragmentKeeper,
    digest_of,
)
from peer.averaging.diloco.fragment_owner import short_digest
from peer.averaging.diloco.outer_fragments import OuterFragments
from protocol.fragment.chunk_ledger import Outcome, Stamp
from protocol.wire.fragment_messages import ChunkResult
from protocol.wire.messages import Result

NUM_CHUNKS = 2
"""Of the one fragment of `outer_copy`."""


@dataclass
class Trainer:
    """Holds still whenever it is asked to, or says why not."""

    can_write: bool = True
    held: Held = Held.YIELDED
    amended: list[Changes] = field(default_factory=list)
    merged: list[Changes] = field(default_factory=list)

    async def may_write(self) -> None:
        await trio.lowlevel.checkpoint()

    async def merge(self, fragment: int, cycle: int, changes: Changes) -> None:
        self.merged.append(changes)

    async def hold(self, fragment: int) -> Held:
        await trio.lowlevel.checkpoint()
        return self.held

    async def amend(self, fragment: int, changes: Changes) -> None:
        self.amended.append(changes)


@dataclass
class Others:
    """One peer that owns every chunk, and brings nothing by itself."""

    told: list[tuple[int, bytes]] = field(default_factory=list)

    async def turn_to_contribute(self, fragment: int) -> None:
        await trio.lowlevel.checkpoint()

    def contribute(self, fragment: int, sent: Sent, *, healing: bool) -> list[str]:
        return [IDS[1]] * NUM_CHUNKS

    def unheard(self, owners: set[str]) -> None:
        pass

    def settled(self, fragment: int, cycle: int, digest: bytes) -> None:
        self.told.append((cycle, digest))

    def heal(self, fragment: int, chunk: int, sender: str) -> None:
        pass

    def is_healing(self, fragment: int) -> bool:
        return False


@dataclass
class World:
    """A keeper, and all that it deals with."""

    keeper: FragmentKeeper
    outer: OuterFragments
    trainer: Trainer
    others: Others

    async def take(self, *items: Sent | Arrived | Fetched | Passed) -> None:
        for item in items:
            self.keeper.put(item)
        await trio.testing.wait_all_tasks_blocked()

    def digest(self) -> bytes:
        """Of all chunks' states now."""
        return digest_of(self.outer.ledgers[FRAGMENT].stamps)


@pytest.fixture
async def world(nursery):
    outer, trainer, others = outer_copy(), Trainer(), Others()

    async def write(function, *args) -> None:
        await trio.lowlevel.checkpoint()
        function(*args)

    keeper = FragmentKeeper(
        FRAGMENT,
        IDS[0],
        outer=outer,
        trainer=trainer,
        others=others,
        write=write,
        returned=lambda _: None,
    )
    nursery.start_soon(keeper.run)
    return World(keeper, outer, trainer, others)


def send(cycle: int = CYCLE) -> Sent:
    codes = b"".join(codes_of(outer_copy(), chunk, 0.5) for chunk in range(NUM_CHUNKS))
    return Sent(cycle, memoryview(codes), 1, 1)


def result(chunk: int, cycle: int = CYCLE) -> Arrived:
    """One without us, for a chunk as `outer_copy` makes it."""
    outer = outer_copy()
    base, codes = outer.ledgers[FRAGMENT].stamp(chunk), codes_of(outer, chunk, 0.5)
    of_chunk = ChunkResult(chunk, base.steps, base.weight, base.digest, 1, short_digest(codes))
    made = Result(
        GROUP, FRAGMENT, cycle, IDS[1], (IDS[1],), (1,), (of_chunk,), (chunk,), signature=bytes(64)
    )
    return Arrived(made, of_chunk, memoryview(codes), IDS[1])


def fetched(seed: int) -> Fetched:
    """Chunk 1 of another peer, a step ahead of ours."""
    theirs = outer_copy(seed=seed)
    theirs.step(FRAGMENT, 1, CYCLE, memoryview(codes_of(theirs, 1, 0.5)), Outcome(1, b"x"))
    stamp, values = theirs.ledgers[FRAGMENT].stamp(1), theirs.read(FRAGMENT, 1)
    return Fetched(1, CYCLE, stamp, memoryview(values))


async def test_values_that_are_not_those_of_their_stamp_change_nothing(world, autojump_clock):
    before = world.outer.read(FRAGMENT, 1)
    await world.take(Fetched(1, CYCLE, Stamp(9, 9, bytes(16)), memoryview(bytes(len(before)))))
    assert world.outer.read(FRAGMENT, 1) == before
    assert world.trainer.amended == [Changes()]


async def test_a_chunk_taken_over_moves_the_trainer(world, autojump_clock):
    theirs = fetched(seed=2)
    await world.take(theirs)
    assert world.outer.read(FRAGMENT, 1) == bytes(theirs.values)
    assert world.trainer.amended == [Changes(moved={1})]


# --- where we are, as the others are told ---------------------------------------------------------
async def test_who_heals_before_its_first_send_stays_where_it_began(world, autojump_clock):
    world.keeper.begin(CYCLE)
    await world.take(fetched(seed=2))
    assert world.others.told == [world.keeper.settled] == [(CYCLE, world.digest())]


async def test_a_spoilt_chunk_that_is_healed_is_told_to_the_others_and_not_to_the_trainer(
    world, autojump_clock
):
    world.keeper.begin(CYCLE)
    world.outer._phi[-1] += 1.0
    world.outer.verify(FRAGMENT)
    await world.take(fetched(seed=1))
    assert world.trainer.amended == [Changes()]
    assert world.others.told == [(CYCLE, world.digest())]


# --- what is kept is bounded ----------------------------------------------------------------------
@pytest.mark.parametrize(("present", "waits"), [(IDS, False), (IDS[:1], True)])
async def test_what_a_peer_was_through_with_is_forgotten_with_it(
    world, autojump_clock, present, waits
):
    """An owner that says it is through with all cycles to come is not waited for."""
    await world.take(Passed(IDS[1], 1 << 60))
    world.keeper.keep_only(set(present))
    await world.take(send())
    assert (world.trainer.merged == []) is waits
    await trio.sleep(MAX_RETURN_S + 1)
    assert world.trainer.merged == [Changes()]


async def test_results_for_the_next_send_are_kept_a_few_of_a_chunk(world, autojump_clock):
    most = NUM_CHUNKS * MAX_EARLY_FOR_A_CHUNK
    await world.take(*[result(0)] * 3 * most)
    assert world.keeper.lost_items == 2 * most
    await world.take(Passed(IDS[1], CYCLE), send())
    assert world.trainer.merged == [Changes(moved={0})]


async def test_what_waits_for_a_send_that_does_not_come_is_bounded(world, autojump_clock):
    world.trainer.held = Held.VOID
    await world.take(*[fetched(seed=2)] * MAX_INBOX)
    assert world.keeper.lost_items == 0
    await world.take(*[fetched(seed=2)] * 3)
    assert world.keeper.lost_items == 3
