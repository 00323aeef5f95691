"""An owner's average is exact for what arrived, signed, and never waits for ever."""

import numpy as np
import pytest
import trio
import trio.lowlevel
from owner_worlds import CYCLE, FRAGMENT, GROUP, IDENTITIES, IDS, contribution, outer_copy
from pipe_streams import pipe

from peer.averaging.diloco.fragment_inbound import FragmentInbound
from peer.averaging.diloco.fragment_owner import MAX_COLLECT_S, Averages, FragmentOwner
from peer.codec.base import LARGEST_MAGNITUDE
from peer.network.conversation import Conversation
from peer.ports.simulated import SimulatedWork
from protocol.outcomes import RefusalReason


class World:
    """An owner of three expected peers, and what it published."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.outer = outer_copy()
        self.expected = set(IDS)
        self.reached = CYCLE
        self.published: list[Averages] = []
        self.over: list[tuple[int, int]] = []
        self.owner = FragmentOwner(
            GROUP,
            IDS[0],
            outer=self.outer,
            work=SimulatedWork(),
            sign=IDENTITIES[0].sign,
            expected=lambda fragment, cycle: self.expected,
            reached=lambda fragment, without: self.reached,
            publish=self.published.append,
            over=lambda fragment, cycle: self.over.append((fragment, cycle)),
        )
        nursery.start_soon(self.owner.run)

    def comes(self, peer: int, values: dict[int, float], weight: int = 1, cycle: int = CYCLE):
        message, codes = contribution(self.outer, values, weight, cycle)
        parts = self.outer.split_codes(FRAGMENT, list(values), memoryview(codes))
        return self.owner.contributed(IDS[peer], message, parts)

    def averages(self) -> list[float]:
        """The values of the one result's chunks."""
        (made,) = self.published
        values = np.frombuffer(made.codes, np.float32).reshape(len(made.result.chunks), -1)
        assert (values == values[:, :1]).all()
        return [float(value) for value in values[:, 0]]


@pytest.fixture
async def world(nursery):
    return World(nursery)


async def test_when_all_have_come_their_mean_is_published_at_once(world, autojump_clock):
    began_s = trio.current_time()
    for peer, value in enumerate((1.0, 2.0, 6.0)):
        assert world.comes(peer, {0: value, 1: -value}) is None
    await trio.testing.wait_all_tasks_blocked()
    assert trio.current_time() == began_s
    assert world.averages() == [3.0, -3.0]
    result = world.published[0].result
    assert result.is_genuine()
    assert [result.outcome(chunk).weight for chunk in result.chunks] == [3, 3]
    assert result.contributors_of(result.chunks[0]) == tuple(sorted(IDS))


async def test_weights_count(world, autojump_clock):
    world.comes(0, {0: 1.0}, weight=3)
    world.comes(1, {0: 5.0}, weight=1)
    world.comes(2, {}, weight=0)
    await trio.testing.wait_all_tasks_blocked()
    assert world.averages() == [2.0]


async def test_after_the_deadline_the_average_is_exact_for_what_arrived(world, autojump_clock):
    world.comes(0, {0: 1.0})
    world.comes(1, {0: 2.0})
    await trio.sleep(MAX_COLLECT_S + 1)
    assert world.averages() == [1.5]
    assert world.comes(2, {0: 100.0}) is RefusalReason.AHEAD
    await trio.sleep(MAX_COLLECT_S + 1)
    assert world.averages() == [1.5]
    assert world.owner.statistics().cut_short == 1


async def test_who_is_lost_is_not_waited_for(world, autojump_clock):
    world.comes(0, {0: 1.0})
    world.comes(1, {0: 2.0})
    world.expected.discard(IDS[2])
    await trio.sleep(1)
    assert world.averages() == [1.5]


async def test_who_heals_contributes_nothing(world, autojump_clock):
    world.comes(0, {0: 1.0})
    world.comes(1, {}, weight=0)
    world.comes(2, {0: 3.0})
    await trio.testing.wait_all_tasks_blocked()
    assert world.averages() == [2.0]


async def test_patience_follows_what_was_seen(world, autojump_clock):
    for cycle in range(3):
        for peer in range(3):
            world.comes(peer, {0: 1.0}, cycle=cycle)
    world.comes(0, {0: 1.0}, cycle=3)
    await trio.sleep(3)
    assert len(world.published) == 4


async def test_a_result_passes_the_checks_of_its_receiver(world, autojump_clock):
    for peer in range(3):
        world.comes(peer, {0: 1.0, 1: 2.0})
    await trio.testing.wait_all_tasks_blocked()
    (made,) = world.published
    ours, theirs = map(Conversation, pipe(*IDS[:2]))
    await ours.send(made.result, made.codes)
    inbound = FragmentInbound(GROUP, outer_copy(), SimulatedWork())
    message, parts = await inbound.next(theirs)
    assert message == made.result
    assert b"".join(parts.values()) == made.codes


async def test_a_cycle_of_another_time_is_ignored_and_closes_none(world, autojump_clock):
    everybody, world.expected = world.expected, set()
    assert world.comes(1, {0: 1.0}, cycle=1 << 60) is RefusalReason.BEHIND
    await trio.sleep(MAX_COLLECT_S + 1)
    assert world.published == []
    world.expected = everybody
    for peer in range(3):
        assert world.comes(peer, {0: 2.0}) is None
    await trio.testing.wait_all_tasks_blocked()
    assert world.averages() == [2.0]


@pytest.mark.parametrize(
    ("cycle", "reason"),
    [
        (CYCLE - 1, RefusalReason.AHEAD),
        (CYCLE + 1, None),
        (CYCLE + 2, RefusalReason.BEHIND),
    ],
)
async def test_a_contribution_that_jumps_is_refused_with_a_reason(
    world, autojump_clock, cycle, reason
):
    for peer in range(3):
        world.comes(peer, {0: 2.0})
    assert world.comes(1, {0: 100.0}, cycle=cycle) is reason
    for peer in range(3):
        world.comes(peer, {0: 4.0}, cycle=CYCLE + 1)
    await trio.testing.wait_all_tasks_blocked()
    steps = [(made.result.cycle, made.result.weights) for made in world.published]
    assert steps == [(CYCLE, (1, 1, 1)), (CYCLE + 1, (1, 1, 1))]


async def test_a_cycle_that_others_have_come_to_is_no_jump(world, autojump_clock):
    world.reached = CYCLE + 5
    assert world.comes(1, {0: 2.0}, cycle=CYCLE + 6) is None


async def test_a_second_contribution_is_refused_and_not_merged(world, autojump_clock):
    assert world.comes(1, {0: 1.0}) is None
    assert world.comes(1, {0: 100.0}) is RefusalReason.TWICE
    world.comes(0, {0: 1.0})
    world.comes(2, {0: 1.0})
    await trio.testing.wait_all_tasks_blocked()
    assert world.averages() == [1.0]


async def test_who_let_a_deadline_pass_is_waited_for_when_it_contributes_again(
    world, autojump_clock
):
    for cycle in range(CYCLE, CYCLE + 2):
        world.comes(0, {0: 1.0}, cycle=cycle)
        world.comes(1, {0: 3.0}, cycle=cycle)
        await trio.sleep(MAX_COLLECT_S + 1 if cycle == CYCLE else 0)
        await trio.testing.wait_all_tasks_blocked()
    assert [made.result.weights for made in world.published] == [(1, 1), (1, 1)]
    assert world.comes(2, {0: 5.0}, cycle=CYCLE + 1) is RefusalReason.AHEAD
    for peer in range(3):
        await trio.testing.wait_all_tasks_blocked()
        assert len(world.published) == 2
        world.comes(peer, {0: 1.0}, cycle=CYCLE + 2)
    await trio.testing.wait_all_tasks_blocked()
    assert world.published[-1].result.weights == (1, 1, 1)


async def test_values_at_the_bound_of_the_codes_end_no_peer(world, autojump_clock):
    for peer in range(3):
        world.comes(peer, {0: LARGEST_MAGNITUDE}, weight=1 + peer)
        world.comes(peer, {1: 1.0}, cycle=CYCLE + 1)
    await trio.testing.wait_all_tasks_blocked()
    assert world.published[-1].result.cycle == CYCLE + 1
    assert world.over == [(FRAGMENT, CYCLE), (FRAGMENT, CYCLE + 1)]


async def test_a_cycle_for_which_nothing_came_is_over_all_the_same(world, autojump_clock):
    world.comes(0, {}, weight=0)
    await trio.sleep(MAX_COLLECT_S + 1)
    assert world.published == []
    assert world.over == [(FRAGMENT, CYCLE)]
    assert world.comes(1, {0: 1.0}) is RefusalReason.AHEAD


@pytest.mark.parametrize(("present", "published"), [(IDS, 2), (IDS[:2], 1)])
async def test_who_let_a_deadline_pass_and_went_is_a_newcomer_when_it_comes_again(
    world, autojump_clock, present, published
):
    for cycle in (CYCLE, CYCLE + 1):
        world.comes(0, {0: 1.0}, cycle=cycle)
        world.comes(1, {0: 1.0}, cycle=cycle)
        await trio.sleep(MAX_COLLECT_S + 1 if cycle == CYCLE else 0)
        await trio.testing.wait_all_tasks_blocked()
        world.owner.keep_only(set(present))
    assert len(world.published) == published
