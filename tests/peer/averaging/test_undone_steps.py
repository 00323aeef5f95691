"""What an owner made that is believed no more is taken back, while the state before is there."""

import pytest
from cycle_worlds import NUM_CHUNKS, World, amended, merged, result, send
from owner_worlds import CYCLE, FRAGMENT, IDS

from protocol.diloco.commands import CyclePassed, HoldOutcome, Withdrawn

LIAR = IDS[1]
"""It owns all chunks, and makes what `result` is."""
WITH_US, WITHOUT_US = (IDS[0], IDS[1]), (IDS[1],)


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(world.peers, "possible_owners", lambda cycle: [LIAR])
    return world


def values(world: World) -> list[bytes]:
    return [world.outer.read(FRAGMENT, chunk) for chunk in range(NUM_CHUNKS)]


def withdraw(world: World) -> None:
    world.peers.note_untrue(LIAR, b"")
    world.take(Withdrawn(LIAR))


def test_in_flight_the_trainer_is_told_nothing_of_it(world):
    before = values(world)
    world.take(send())
    world.take(result(0, contributors=WITH_US))
    assert values(world) != before
    withdraw(world)
    assert values(world) == before
    world.take(result(1, contributors=WITH_US))
    world.take(CyclePassed(LIAR, CYCLE))
    assert values(world) == before
    assert world.merged == [merged()]
    assert [each.missing for each in world.returned] == [NUM_CHUNKS]
    assert world.told == [(CYCLE, world.digest())]


@pytest.mark.parametrize(
    ("contributors", "changes"),
    [(WITH_US, amended(redone=(0, 1))), (WITHOUT_US, amended(moved=(0, 1)))],
    ids=["with us", "without us"],
)
def test_later_the_trainer_follows_it_back(world, contributors, changes):
    before = values(world)
    world.take(send())
    world.take(*(result(chunk, contributors=contributors) for chunk in range(NUM_CHUNKS)))
    assert len(world.merged) == 1
    withdraw(world)
    assert values(world) == before
    assert world.amended == [changes]
    assert world.told[-1] == (CYCLE, world.digest())
    assert world.told[0] != world.told[-1]


def test_only_what_the_owner_made_that_is_not_believed_is_taken_back(world):
    world.take(send())
    world.take(*(result(chunk) for chunk in range(NUM_CHUNKS)))
    after = values(world)
    world.take(Withdrawn(LIAR))
    world.peers.note_untrue(IDS[2], b"")
    world.take(Withdrawn(IDS[2]))
    world.peers.note_unopened(FRAGMENT, CYCLE + 1, LIAR)
    world.take(Withdrawn(LIAR))
    assert values(world) == after
    world.peers.note_unopened(FRAGMENT, CYCLE, LIAR)
    world.take(Withdrawn(LIAR))
    assert values(world) != after


def test_nothing_is_taken_back_once_the_fragment_was_sent_again(world):
    world.take(send())
    world.take(*(result(chunk) for chunk in range(NUM_CHUNKS)))
    after = values(world)
    world.take(send(CYCLE + 1))
    withdraw(world)
    assert values(world) == after
    world.take(CyclePassed(LIAR, CYCLE + 1))
    assert world.merged[1:] == [merged(CYCLE + 1)]


def test_a_trainer_that_has_just_sent_is_not_held_up(world):
    world.take(send())
    world.take(*(result(chunk) for chunk in range(NUM_CHUNKS)))
    after, world.held = values(world), HoldOutcome.VOID
    withdraw(world)
    assert values(world) == after
    world.take(send(CYCLE + 1))
    world.take(CyclePassed(LIAR, CYCLE + 1))
    assert len(world.merged) == 2


def test_what_was_taken_back_is_not_fetched_again_before_the_next_send(world):
    """Those who have not taken it back yet are a step ahead."""
    world.take(send())
    world.take(*(result(chunk) for chunk in range(NUM_CHUNKS)))
    withdraw(world)
    world.tell(lambda machine: machine.healing.request(0, IDS[2]))
    assert not world.machine.healing._requests
    world.take(send(CYCLE + 1))
    world.tell(lambda machine: machine.healing.request(0, IDS[2]))
    assert world.machine.healing._requests
