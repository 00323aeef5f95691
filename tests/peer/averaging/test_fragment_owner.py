"""An owner's average is exact for what arrived, signed, and never waits for ever."""

import numpy as np
import pytest
from owner_worlds import CYCLE, FRAGMENT, GROUP, IDENTITIES, IDS, contribution, outer_copy
from pipe_streams import pipe

from peer.averaging.diloco.averages import ChunkAverages
from peer.averaging.diloco.fragment_messages import FragmentInbound
from peer.codec import LARGEST_MAGNITUDE
from peer.network.conversation import Conversation
from protocol.diloco import collecting
from protocol.diloco.collecting import MAX_COLLECT_S, MAX_COLLECTIONS, MIN_COLLECT_S, Owner
from protocol.diloco.commands import Average, Averages, FragmentCommand, GroupSeen
from protocol.diloco.peers import Context, Peers, SendPlan
from protocol.outcomes import RefusalReason
from simulation.work import SimulatedWork


class World:
    """An owner of three expected peers, and what it published."""

    def __init__(self) -> None:
        self.outer = outer_copy()
        self.now_s = 0.0
        self.averages_at_once = True
        self.averaging: list[Average] = []
        self.published: list[Averages] = []
        self.peers = Peers(IDS[0], 1)
        self.see(IDS)
        self.context = Context(SendPlan(GROUP, 1, lambda _: False), self.peers, self._average)
        self.owner = Owner(self.context)
        self.arithmetic = ChunkAverages(
            GROUP, IDS[0], 1, self.outer, IDENTITIES[0].sign, trims=False
        )

    def see(self, present: list[str], round_: int = CYCLE) -> None:
        """These are there, and we are all in this round."""
        rounds = dict.fromkeys((peer_id for peer_id in present if peer_id != IDS[0]), round_)
        self.peers.seen = GroupSeen(round_, frozenset([IDS[0], *present]), rounds)

    def comes(
        self, peer: int, values: dict[int, float], weight: int = 1, cycle: int = CYCLE
    ) -> RefusalReason | None:
        message, codes = contribution(self.outer, values, weight, cycle, peer)
        parts = self.outer.split_codes(FRAGMENT, list(values), memoryview(codes))
        self.context.now_s = self.now_s
        refused = self.owner.contributed(IDS[peer], message, parts)
        self._average_what_is_due()
        return refused

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.context.now_s = self.now_s
        self.owner.advance()
        self._average_what_is_due()

    def _average(self, order: FragmentCommand) -> None:
        assert isinstance(order, Average)
        self.averaging.append(order)

    def _average_what_is_due(self) -> None:
        if self.averages_at_once:
            self.average_all()

    def average_all(self) -> None:
        while self.averaging:
            order = self.averaging.pop(0)
            averages = self.arithmetic.averaged(order)
            if averages is not None:
                self.published.append(averages)
            self.owner.averaged(order.fragment, order.cycle)

    def averages(self) -> list[float]:
        """The values of the one result's chunks."""
        (made,) = self.published
        values = np.frombuffer(made.codes, np.float32).reshape(len(made.result.chunks), -1)
        assert (values == values[:, :1]).all()
        return [float(value) for value in values[:, 0]]


@pytest.fixture
def world():
    return World()


def test_when_all_have_come_their_mean_is_published_at_once(world):
    for peer, value in enumerate((1.0, 1.25, 1.5)):
        assert world.comes(peer, {0: value, 1: -value}) is None
    assert world.averages() == [1.25, -1.25]
    result = world.published[0].result
    assert result.is_genuine()
    assert [chunk.rank.weight for chunk in result.chunks] == [3, 3]
    assert result.contributors_of(result.chunks[0]) == tuple(sorted(IDS))


def test_who_excuses_itself_counts_nothing(world):
    world.comes(0, {0: 2.0})
    world.comes(1, {0: 3.0})
    world.comes(2, {}, weight=0)
    assert world.averages() == [2.5]


def test_after_the_deadline_the_average_is_exact_for_what_arrived(world):
    world.comes(0, {0: 2.0})
    world.comes(1, {0: 3.0})
    world.wait(MAX_COLLECT_S + 1)
    assert world.averages() == [2.5]
    assert world.comes(2, {0: 100.0}) is RefusalReason.AHEAD
    world.wait(MAX_COLLECT_S + 1)
    assert world.averages() == [2.5]


def test_who_is_lost_is_not_waited_for(world):
    world.comes(0, {0: 2.0})
    world.comes(1, {0: 3.0})
    world.see(IDS[:2])
    world.wait(1)
    assert world.averages() == [2.5]


def test_who_heals_contributes_nothing(world):
    world.comes(0, {0: 2.0})
    world.comes(1, {}, weight=0)
    world.comes(2, {0: 3.0})
    assert world.averages() == [2.5]


def test_patience_follows_what_was_seen(world):
    world.see(IDS, 1)
    for cycle in range(3):
        for peer in range(3):
            world.comes(peer, {0: 1.0}, cycle=cycle)
    world.comes(0, {0: 1.0}, cycle=3)
    world.wait(3)
    assert len(world.published) == 4


def test_who_lets_down_each_collection_holds_a_new_owner_up_once(world):
    """It contributes too late each time, and so is waited for again."""
    for cycle, waited_s in ((CYCLE, MAX_COLLECT_S), (CYCLE + 1, MIN_COLLECT_S)):
        world.comes(0, {0: 1.0}, cycle=cycle)
        world.comes(1, {0: 2.0}, cycle=cycle)
        world.wait(waited_s)
        assert world.averages() == [1.5]
        world.published.clear()
        assert world.comes(2, {0: 3.0}, cycle=cycle) is RefusalReason.AHEAD


async def test_a_result_passes_the_checks_of_its_receiver(world):
    for peer in range(3):
        world.comes(peer, {0: 1.0, 1: 2.0})
    (made,) = world.published
    ours, theirs = map(Conversation, pipe(*IDS[:2]))
    await ours.send(made.result, made.codes)
    inbound = FragmentInbound(GROUP, outer_copy(), SimulatedWork())
    message, parts = await inbound.next(theirs)
    assert message == made.result
    assert not isinstance(parts, bytes)
    assert b"".join(parts.values()) == made.codes


def test_a_cycle_of_another_time_is_ignored_and_closes_none(world):
    assert world.comes(1, {0: 1.0}, cycle=1 << 60) is RefusalReason.BEHIND
    world.see(IDS, CYCLE + 100)
    assert world.comes(1, {0: 1.0}) is RefusalReason.AHEAD
    world.wait(MAX_COLLECT_S + 1)
    assert world.published == []
    world.see(IDS)
    for peer in range(3):
        assert world.comes(peer, {0: 2.0}) is None
    assert world.averages() == [2.0]


@pytest.mark.parametrize(
    ("cycle", "reason"),
    [
        (CYCLE - 1, RefusalReason.AHEAD),
        (CYCLE + 1, None),
        (CYCLE + 2, RefusalReason.BEHIND),
    ],
)
def test_a_contribution_that_jumps_is_refused_with_a_reason(world, cycle, reason):
    for peer in range(3):
        world.comes(peer, {0: 2.0})
    assert world.comes(1, {0: 100.0}, cycle=cycle) is reason
    for peer in range(3):
        world.comes(peer, {0: 4.0}, cycle=CYCLE + 1)
    steps = [(made.result.cycle, made.result.weights) for made in world.published]
    assert steps == [(CYCLE, (1, 1, 1)), (CYCLE + 1, (1, 1, 1))]


def test_a_cycle_that_others_have_come_to_is_no_jump(world):
    assert world.comes(1, {0: 2.0}, cycle=CYCLE + 3) is RefusalReason.BEHIND
    world.peers.note_settled(FRAGMENT, IDS[1], CYCLE + 2, bytes(16))
    assert world.comes(1, {0: 2.0}, cycle=CYCLE + 3) is RefusalReason.BEHIND
    world.peers.note_settled(FRAGMENT, IDS[2], CYCLE + 2, bytes(16))
    assert world.comes(1, {0: 2.0}, cycle=CYCLE + 3) is None


def test_a_second_contribution_is_refused_and_not_merged(world):
    assert world.comes(1, {0: 1.0}) is None
    assert world.comes(1, {0: 100.0}) is RefusalReason.TWICE
    world.comes(0, {0: 1.0})
    world.comes(2, {0: 1.0})
    assert world.averages() == [1.0]


def test_who_let_a_deadline_pass_is_waited_for_when_it_contributes_again(world):
    for cycle in range(CYCLE, CYCLE + 2):
        world.comes(0, {0: 1.0}, cycle=cycle)
        world.comes(1, {0: 3.0}, cycle=cycle)
        world.wait(MAX_COLLECT_S + 1 if cycle == CYCLE else 0)
    assert [made.result.weights for made in world.published] == [(1, 1), (1, 1)]
    assert world.comes(2, {0: 5.0}, cycle=CYCLE + 1) is RefusalReason.AHEAD
    for peer in range(3):
        assert len(world.published) == 2
        world.comes(peer, {0: 1.0}, cycle=CYCLE + 2)
    assert world.published[-1].result.weights == (1, 1, 1)


def test_values_at_the_bound_of_the_codes_end_no_peer(world):
    for peer in range(3):
        world.comes(peer, {0: LARGEST_MAGNITUDE}, weight=1 + peer)
        world.comes(peer, {1: 1.0}, cycle=CYCLE + 1)
    assert world.published[-1].result.cycle == CYCLE + 1
    assert list(world.owner.over) == [(FRAGMENT, CYCLE), (FRAGMENT, CYCLE + 1)]


def test_a_cycle_for_which_nothing_came_is_over_all_the_same(world):
    world.comes(0, {}, weight=0)
    world.wait(MAX_COLLECT_S + 1)
    assert world.published == []
    assert list(world.owner.over) == [(FRAGMENT, CYCLE)]
    assert world.comes(1, {0: 1.0}) is RefusalReason.AHEAD


@pytest.mark.parametrize(("present", "published"), [(IDS, 2), (IDS[:2], 1)])
def test_who_let_a_deadline_pass_and_went_is_a_newcomer_when_it_comes_again(
    world, present, published
):
    for cycle in (CYCLE, CYCLE + 1):
        world.comes(0, {0: 1.0}, cycle=cycle)
        world.comes(1, {0: 1.0}, cycle=cycle)
        world.wait(MAX_COLLECT_S + 1 if cycle == CYCLE else 0)
        world.see(present)
        world.peers.forget_absent()
        world.see(IDS)
    assert len(world.published) == published


def test_collections_are_bounded_and_the_oldest_is_closed_as_it_is(world):
    world.averages_at_once = False
    world.see(IDS, 1)
    for cycle in range(MAX_COLLECTIONS + 1):
        world.peers.note_settled(FRAGMENT, IDS[2], cycle, bytes(16))
        world.see(IDS, cycle)
        assert world.comes(1, {0: 1.0}, cycle=cycle) is None
        world.now_s += 0.1
        assert len(world.averaging) == (cycle == MAX_COLLECTIONS) * 2
    oldest, newest = world.averaging  # for the newest the late one is not waited for
    assert (oldest.cycle, newest.cycle) == (0, MAX_COLLECTIONS)


def test_what_averaging_cannot_keep_up_with_is_over(world):
    world.averages_at_once = False
    for cycle in range(MAX_COLLECTIONS + 2):
        world.see(IDS, cycle)
        for peer in range(3):
            world.comes(peer, {0: 1.0}, cycle=cycle)
    last = MAX_COLLECTIONS + 1
    assert list(world.owner.over) == [(FRAGMENT, last - 1), (FRAGMENT, last)]
    world.average_all()
    assert len(world.published) == MAX_COLLECTIONS
    assert len(world.owner.over) == MAX_COLLECTIONS + 2


def test_one_more_than_a_result_can_name_is_refused_with_a_reason(world, monkeypatch):
    monkeypatch.setattr(collecting, "MAX_CONTRIBUTORS", 2)
    assert world.comes(0, {0: 2.0}) is None
    assert world.comes(1, {0: 3.0}) is None
    assert world.comes(2, {0: 100.0}) is RefusalReason.TOO_MANY
    world.wait(MAX_COLLECT_S + 1)
    assert world.averages() == [2.5]
