"""A keeper in flight writes all results that are there at one go, and loses nothing behind them."""

import pytest
import trio
import trio.testing
from owner_worlds import FRAGMENT, GROUP, IDS, codes_of, outer_copy

from peer.averaging.diloco.fragment_items import Arrived, Held, Passed, Returned, Sent
from peer.averaging.diloco.fragment_keeper import FragmentKeeper
from peer.averaging.diloco.fragment_owner import short_digest
from peer.averaging.diloco.inbox import Inbox
from protocol.wire.fragment_messages import ChunkResult
from protocol.wire.messages import Result

CHUNKS = 2


class Trainer:
    can_write = True

    async def may_write(self) -> None:
        await trio.lowlevel.checkpoint()

    async def merge(self, fragment, cycle, changes) -> None:
        await trio.lowlevel.checkpoint()

    async def hold(self, fragment) -> Held:
        await trio.lowlevel.checkpoint()
        return Held.FREE

    async def amend(self, fragment, changes) -> None:
        raise AssertionError("nothing was yielded")


class Owner:
    """Owns all chunks."""

    async def turn_to_contribute(self, fragment) -> None:
        await trio.lowlevel.checkpoint()

    def contribute(self, fragment, sent, *, healing) -> list[str]:
        return [IDS[1]] * CHUNKS

    def unheard(self, owners) -> None:
        pass

    def settled(self, fragment, cycle, digest) -> None:
        pass

    def heal(self, fragment, chunk, sender) -> None:
        raise AssertionError("nobody is ahead")

    def is_healing(self, fragment) -> bool:
        return False


class World:
    def __init__(self) -> None:
        self.outer = outer_copy()
        self.returned: list[Returned] = []
        self.writes = 0
        self.keeper = FragmentKeeper(
            FRAGMENT,
            IDS[0],
            outer=self.outer,
            trainer=Trainer(),
            others=Owner(),
            write=self._write,
            returned=self.returned.append,
        )

    async def _write(self, function, *args) -> None:
        await trio.lowlevel.checkpoint()
        self.writes += 1
        function(*args)

    def send(self, cycle: int) -> None:
        self.keeper.put(Sent(cycle, memoryview(b""), 1, 1))

    def arrive(self, cycle: int, *chunks: int) -> None:
        """Results that the owner made of its own values and ours."""
        for chunk in chunks:
            codes = codes_of(self.outer, chunk, 0.5)
            base = self.outer.ledgers[FRAGMENT].stamp(chunk)
            of_chunk = ChunkResult(
                chunk, base.steps, base.weight, base.digest, 3, short_digest(codes)
            )
            contributors = tuple(sorted(IDS[:2]))
            result = Result(
                GROUP,
                FRAGMENT,
                cycle,
                IDS[1],
                contributors,
                (1, 1),
                (of_chunk,),
                (chunk,),
                bytes(64),
            )
            self.keeper.put(Arrived(result, of_chunk, memoryview(codes), IDS[1]))


@pytest.fixture
async def world(nursery):
    world = World()
    nursery.start_soon(world.keeper.run)
    await trio.testing.wait_all_tasks_blocked()
    return world


async def test_results_that_are_there_are_written_at_one_go(world, autojump_clock):
    world.send(7)
    world.arrive(7, 0, 1)
    await trio.testing.wait_all_tasks_blocked()
    assert world.writes == 2  # the check of the values before the send, and the results
    assert [(each.cycle, each.missing, each.contributors) for each in world.returned] == [(7, 0, 2)]


async def test_a_send_behind_a_result_is_taken_next(world, autojump_clock):
    world.send(7)
    world.arrive(7, 0)
    world.send(8)
    await trio.testing.wait_all_tasks_blocked()
    assert [(each.cycle, each.missing) for each in world.returned] == [(7, 1)]
    world.arrive(8, 0, 1)
    await trio.testing.wait_all_tasks_blocked()
    assert [(each.cycle, each.missing) for each in world.returned] == [(7, 1), (8, 0)]


async def test_a_word_behind_a_result_is_heard(world, autojump_clock):
    world.send(7)
    world.arrive(7, 0)
    world.keeper.put(Passed(IDS[1], 7))
    await trio.testing.wait_all_tasks_blocked()
    assert [(each.cycle, each.missing) for each in world.returned] == [(7, 1)]


async def test_a_result_that_comes_twice_is_written_once(world, autojump_clock):
    world.send(7)
    world.arrive(7, 0, 0, 1)
    await trio.testing.wait_all_tasks_blocked()
    assert world.outer.statistics().steps == CHUNKS
    assert world.outer.ledgers[FRAGMENT].stamp(0).steps == 1


async def test_what_is_looked_at_stays_until_it_is_taken():
    inbox = Inbox[int](2)
    assert inbox.look() is None
    for item in (1, 2):
        inbox.put(item)
    assert (inbox.look(), inbox.look()) == (1, 1)
    assert await inbox.receive() == 1
    assert inbox.look() == 2
    inbox.drop()
    for item in (3, 4, 5):
        inbox.put(item)
    assert inbox.lost_items == 1
    assert [await inbox.receive(), await inbox.receive()] == [3, 4]
