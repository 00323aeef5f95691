"""In flight all results that are there are written at one go, and nothing behind them is lost."""

import pytest
from cycle_worlds import NUM_CHUNKS, World, result, send
from owner_worlds import IDS

from protocol.diloco.commands import CyclePassed, ResultArrived

WITH_US = tuple(sorted(IDS[:2]))


@pytest.fixture
def world(monkeypatch):
    world = World()
    world.see(IDS[:2], 7)
    monkeypatch.setattr(world.peers, "possible_owners", lambda cycle: [IDS[1]])
    return world


def both(world: World, cycle: int, *chunks: int) -> list[ResultArrived]:
    """Results that the owner made of its own values and ours, on the states that are here."""
    ledger = world.machine.ledger
    return [result(chunk, cycle, ledger.stamp(chunk), WITH_US) for chunk in chunks]


def test_results_that_are_there_are_written_at_one_go(world):
    world.take(send(7), *both(world, 7, 0, 1))
    assert world.writes == 1
    assert [(each.cycle, each.missing, each.contributors) for each in world.returned] == [(7, 0, 2)]


def test_a_send_behind_a_result_is_taken_next(world):
    world.take(send(7), *both(world, 7, 0), send(8))
    assert [(each.cycle, each.missing) for each in world.returned] == [(7, 1)]
    world.take(*both(world, 8, 0, 1))
    assert [(each.cycle, each.missing) for each in world.returned] == [(7, 1), (8, 0)]


def test_a_word_behind_a_result_is_heard(world):
    world.take(send(7), *both(world, 7, 0), CyclePassed(IDS[1], 7))
    assert [(each.cycle, each.missing) for each in world.returned] == [(7, 1)]


def test_a_result_that_comes_twice_is_written_once(world, monkeypatch):
    write, written = world.outer.write, []

    def counted(fragment, result, *, again):
        written.append(result.chunk)
        return write(fragment, result, again=again)

    monkeypatch.setattr(world.outer, "write", counted)
    world.take(send(7), *both(world, 7, 0, 0, 1))
    assert len(written) == NUM_CHUNKS
    assert world.machine.ledger.stamp(0).steps == 1


def test_what_comes_during_a_write_is_written_at_one_go_after_it(world):
    world.take(send(7))
    world.held_up = []
    first, second = both(world, 7, 0, 1)
    world.take(first)
    world.take(second)
    assert len(world.held_up) == 1
    world.let_go()
    assert world.writes == 2
    assert [each.missing for each in world.returned] == [0]
