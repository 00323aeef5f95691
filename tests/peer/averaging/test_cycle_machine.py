"""A cycle machine between a trainer and other peers that do not keep to the rules."""

import pytest
from cycle_worlds import NUM_CHUNKS, World, amended, fetched, merged, result, send
from owner_worlds import CYCLE, FRAGMENT, IDS

from protocol.diloco.collecting import MAX_COLLECT_S
from protocol.diloco.commands import (
    ChunkFetched,
    CyclePassed,
    HoldOutcome,
    Verify,
    WriteResults,
)
from protocol.diloco.cycle_machine import MAX_EARLY_FOR_A_CHUNK, MAX_WAITING
from protocol.schedule.deadline import SPREADS
from protocol.wire.fragment_messages import Stamp

MAX_RETURN_S = 2 * MAX_COLLECT_S
"""The longest that a machine waits for its results."""


@pytest.fixture
def world():
    return World()


def all_owned_by_the_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """We own nothing: both chunks are waited for."""
    monkeypatch.setattr(world.peers, "possible_owners", lambda cycle: [IDS[1]])


def test_values_that_are_not_those_of_their_stamp_change_nothing(world):
    before = world.outer.read(FRAGMENT, 1)
    no_values = memoryview(bytes(len(before)))
    world.take(ChunkFetched(FRAGMENT, CYCLE, Stamp(1, 9, 9, bytes(16)), no_values))
    assert world.outer.read(FRAGMENT, 1) == before
    assert world.amended == [amended()]


def test_a_chunk_taken_over_moves_the_trainer(world):
    theirs = fetched(seed=2)
    world.take(theirs)
    assert world.outer.read(FRAGMENT, 1) == bytes(theirs.values)
    assert world.amended == [amended(moved=(1,))]


# --- where we are, as the others are told ---------------------------------------------------------
def test_who_heals_before_its_first_send_stays_where_it_began(world):
    world.machine.note_settled(CYCLE)
    world.take(fetched(seed=2))
    assert world.told == [world.machine.settled] == [(CYCLE, world.digest())]


def test_a_spoilt_chunk_that_is_healed_is_told_to_the_others_and_not_to_the_trainer(
    world, monkeypatch
):
    all_owned_by_the_other(world, monkeypatch)
    world.take(CyclePassed(IDS[1], CYCLE))
    world.outer._phi[-1] += 1.0
    world.take(send())
    assert world.merged == [merged()]
    world.take(fetched(seed=1))
    assert world.amended == [amended()]
    assert world.told[1:] == [(CYCLE, world.digest())]


def test_a_chunk_that_was_healed_moves_the_trainer_again(world, monkeypatch):
    all_owned_by_the_other(world, monkeypatch)
    world.take(CyclePassed(IDS[1], CYCLE))
    world.outer._phi[-1] += 1.0
    world.take(send())
    world.take(fetched(seed=1))
    world.take(fetched(seed=2))
    assert world.amended == [amended(), amended(moved=(1,))]


# --- in flight ------------------------------------------------------------------------------------
def test_a_flight_waits_for_its_owners_until_its_patience_ends(world, monkeypatch):
    all_owned_by_the_other(world, monkeypatch)
    world.take(send())
    assert world.machine.next_deadline_s == MAX_RETURN_S
    world.wait(MAX_RETURN_S - 1)
    assert world.returned == []
    world.wait(1)
    assert [(each.missing, each.contributors) for each in world.returned] == [(2, 0)]
    assert world.peers.possible_owners(CYCLE) == [IDS[1]]


@pytest.mark.parametrize("came_s", [0.0, 2.0])
def test_an_owner_that_brings_nothing_holds_a_newcomer_up_once(world, monkeypatch, came_s):
    """Before, for as long as can be each time: no flight was complete, so nothing was learnt."""
    monkeypatch.setattr(world.peers, "possible_owners", lambda cycle: IDS[1:3])
    world.see(IDS)
    world.take(send())
    world.wait(came_s)
    world.take(result(0))
    world.wait(MAX_RETURN_S)
    assert [each.missing for each in world.returned] == [1]
    world.take(send(CYCLE + 1))
    waits_s = world.machine.next_deadline_s - world.now_s
    assert waits_s == pytest.approx(max(MAX_RETURN_S / 30, SPREADS * came_s))


def test_what_could_not_be_begun_in_time_is_not_written_and_ends_the_flight(world, monkeypatch):
    """The trainer reads the whole outer copy meanwhile, and perhaps until it may merge."""
    all_owned_by_the_other(world, monkeypatch)
    world.take(send())
    world.held_up = []
    world.take(result(0))
    (order,) = world.held_up
    assert isinstance(order, WriteResults)
    assert order.until_s == MAX_RETURN_S
    world.now_s = MAX_RETURN_S
    world.held_up = None
    world.tell(lambda machine: machine.written({}))
    assert [each.missing for each in world.returned] == [2]
    assert world.merged == [merged()]


def test_a_new_trainer_ends_the_old_ones_flight(world, monkeypatch):
    all_owned_by_the_other(world, monkeypatch)
    world.take(send())
    world.take(send(CYCLE + 1))
    assert [(each.cycle, each.missing) for each in world.returned] == [(CYCLE, 2)]


def test_of_a_yield_that_crossed_a_send_the_send_goes_first(world, monkeypatch):
    world.held_up = []
    world.take(fetched(seed=2))
    world.take(send(CYCLE + 1))
    assert not any(isinstance(order, Verify) for order in world.held_up)
    world.held = HoldOutcome.VOID
    all_owned_by_the_other(world, monkeypatch)
    world.let_go()
    assert world.amended == []
    assert world.machine.ledger.cycle(1) == CYCLE
    world.take(CyclePassed(IDS[1], CYCLE + 1))
    assert world.merged == [merged(CYCLE + 1, moved=(1,))]


# --- what is kept is bounded ----------------------------------------------------------------------
@pytest.mark.parametrize(("present", "waits"), [(IDS[:2], False), (IDS[:1], True)])
def test_what_a_peer_was_through_with_is_forgotten_with_it(world, present, waits, monkeypatch):
    """An owner that says it is through with all cycles to come is not waited for."""
    all_owned_by_the_other(world, monkeypatch)
    world.take(CyclePassed(IDS[1], 1 << 60))
    world.see(present)
    world.machine.forget_absent()
    world.see(IDS[:2])
    world.take(send())
    assert (world.merged == []) is waits
    world.wait(MAX_RETURN_S + 1)
    assert world.merged == [merged()]


def test_results_for_the_next_send_are_kept_a_few_of_a_chunk(world, monkeypatch):
    all_owned_by_the_other(world, monkeypatch)
    most = NUM_CHUNKS * MAX_EARLY_FOR_A_CHUNK
    world.take(*[result(0)] * 3 * most)
    assert len(world.machine._early[CYCLE]) == most
    world.take(CyclePassed(IDS[1], CYCLE), send())
    assert world.merged == [merged(moved=(0,))]


def test_what_waits_for_a_send_that_does_not_come_is_bounded(world):
    world.held = HoldOutcome.VOID
    item = fetched(seed=2)
    for _ in range(MAX_WAITING):
        world.take(item)
    assert len(world.machine._for_send) == MAX_WAITING
    for _ in range(3):
        world.take(item)
    assert len(world.machine._for_send) == MAX_WAITING
