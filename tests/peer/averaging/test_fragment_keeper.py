"""A keeper between a trainer and other peers that do not keep to the rules."""

from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from owner_worlds import FRAGMENT, IDS, codes_of, outer_copy

from peer.averaging.fragment_items import Changes, Fetched, Held
from peer.averaging.fragment_keeper import FragmentKeeper
from protocol.chunk_ledger import Outcome, Stamp


@dataclass
class Trainer:
    """Yields whenever it is asked to."""

    can_write: bool = True
    amended: list[Changes] = field(default_factory=list)

    async def may_write(self) -> None:
        await trio.lowlevel.checkpoint()

    async def merge(self, fragment: int, cycle: int, changes: Changes) -> None:
        raise AssertionError("nothing is in flight")

    async def hold(self, fragment: int) -> Held:
        await trio.lowlevel.checkpoint()
        return Held.YIELDED

    async def amend(self, fragment: int, changes: Changes) -> None:
        self.amended.append(changes)


class Nobody:
    """No other peers."""

    def settled(self, fragment: int, cycle: int, digest: bytes) -> None:
        pass

    def is_healing(self, fragment: int) -> bool:
        return False


@pytest.fixture
async def world(nursery):
    outer, trainer = outer_copy(), Trainer()

    async def write(function, *args) -> None:
        await trio.lowlevel.checkpoint()
        function(*args)

    keeper = FragmentKeeper(
        FRAGMENT,
        IDS[0],
        outer=outer,
        trainer=trainer,
        others=Nobody(),
        write=write,
        returned=lambda _: None,
    )
    nursery.start_soon(keeper.run)
    return keeper, outer, trainer


async def test_values_that_are_not_those_of_their_stamp_change_nothing(world, autojump_clock):
    keeper, outer, trainer = world
    before = outer.read(FRAGMENT, 1)
    keeper.put(Fetched(1, 7, Stamp(9, 9, bytes(16)), memoryview(bytes(len(before)))))
    await trio.testing.wait_all_tasks_blocked()
    assert outer.read(FRAGMENT, 1) == before
    assert trainer.amended == [Changes()]


async def test_a_chunk_taken_over_moves_the_trainer(world, autojump_clock):
    keeper, outer, trainer = world
    theirs = outer_copy(seed=2)
    theirs.step(FRAGMENT, 1, 7, memoryview(codes_of(theirs, 1, 0.5)), Outcome(1, b"x"))
    stamp = theirs.ledgers[FRAGMENT].stamp(1)
    keeper.put(Fetched(1, 7, stamp, memoryview(theirs.read(FRAGMENT, 1))))
    await trio.testing.wait_all_tasks_blocked()
    assert outer.read(FRAGMENT, 1) == theirs.read(FRAGMENT, 1)
    assert trainer.amended == [Changes(moved={1})]
