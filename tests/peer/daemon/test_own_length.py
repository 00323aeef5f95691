"""What follows from rounds of a length of our own: what an average took, pace, and searches."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from swarm_worlds import simulated

from peer.averaging.gossip.exchange_session import Averaged, AverageEnded, OwnVector, Skipped
from peer.averaging.gossip.own_length import OwnLength
from peer.facts import Facts
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.rounds.pace import Pace
from peer.runtime import NetworkStatistics, ProcessorTime, Work
from peer.training.messages import RoundClosed
from protocol.gossip.round_length import FEWEST, FIRST_INNER_STEPS, LINE_SHARE, PAUSE_SHARE
from protocol.membership.view import Member, Progress, Roster, View
from protocol.outcomes import SkipReason
from protocol.schedule.rounds import keep_together
from simulation.work import SimulatedWork

NOMINAL = 64
GROUP = "ours"


def facts(speed: float = 10.0) -> Facts:
    return Facts("me", 1, inner_steps_per_round=NOMINAL, steps_per_s=speed)


def log_to(lines: list[bytes]) -> EventLog:
    return EventLog(lines.append, peer="me", wall_time_s=lambda: 0.0, stream=None)


def own_length(own: Facts, view: View, lines: list[bytes], work: Work | None = None) -> OwnLength:
    network = SimpleNamespace(statistics=lambda: NetworkStatistics({}, {}, p2pd_pid=7))
    work = work or SimulatedWork()
    services: Any = SimpleNamespace(facts=own, events=log_to(lines), work=work, network=network)
    return OwnLength(services, view)


class BusyWork(SimulatedWork):
    """On a machine without an idle processor."""

    taken_s = 0.0

    def processor_time(self, pid: int | None) -> ProcessorTime:
        assert pid == 7
        return ProcessorTime(self.taken_s, 0.0)


def closed(seconds: float = 1.0, processor_s: float = 1.0) -> RoundClosed:
    return RoundClosed(0, 1, 1, 0.0, 0, 0, seconds, 0.0, processor_s=processor_s)


def averaged(round_: int, seconds: float) -> AverageEnded:
    own = OwnVector(round_, 0, False, 1, 1, "", memoryview(b""))
    return AverageEnded(own, Averaged("p", 1, memoryview(b"")), 0.0, seconds)


def nobody() -> View:
    return View(Roster(silence_s=1e9), GROUP)


def tell(
    roster: Roster, peer_id: str, state: str, *, group: str = GROUP, incarnation: int = 1
) -> None:
    progress = Progress(state, group=group)
    roster.heard(trio.current_time(), peer_id, incarnation, progress=progress)


def other(name: str, *, speed: float, step: int = 0) -> Member:
    now_s = trio.current_time()
    progress = Progress("training", 0, 0.0, speed, 0, 0, step=step)
    return Member(name, 1, alive=True, progress=progress, told_s=now_s, changed_s=now_s)


@simulated()
async def test_an_average_counts_when_both_its_parts_are_known():
    own, lines = facts(), list[bytes]()
    length = own_length(own, nobody(), lines)
    assert own.chosen_inner_steps == FIRST_INNER_STEPS
    assert length.next(0.1, alone=True) == NOMINAL
    for round_ in range(2 * FEWEST):
        assert length.next(0.1, alone=False) == FIRST_INNER_STEPS
        if round_ % 2:
            length.exchanged(averaged(round_, 4.0), 0.0, closed())
        length.merged(pause_s=0.0)  # one without an exchange says nothing
    assert own.chosen_inner_steps == pytest.approx(4.0 / (0.1 * LINE_SHARE))
    assert length.next(0.1, alone=False) == own.chosen_inner_steps
    assert len(lines) == 1
    assert EventName.ROUND_LENGTH_CHANGED.encode() in lines[0]


@simulated()
async def test_the_trainers_pause_counts_as_the_line_does():
    own = facts()
    length = own_length(own, nobody(), [])
    length.next(0.1, alone=False)
    for round_ in range(FEWEST):
        length.exchanged(averaged(round_, 0.0), 0.01, closed())
        length.merged(pause_s=0.2)
    assert own.chosen_inner_steps == pytest.approx(0.2 / (0.1 * PAUSE_SHARE), abs=1)


@pytest.mark.parametrize(("seconds", "processor_s"), [(1.0, 1.0), (2.0, 1.0), (1.0, 4.0)])
@simulated()
async def test_processors_that_averages_take_from_the_trainer_count_as_its_pause(
    seconds: float, processor_s: float
) -> None:
    """A trainer with half a processor loses twice the time, one with four a quarter of it."""
    own, work = facts(), BusyWork()
    length = own_length(own, nobody(), [], work)
    length.next(0.1, alone=False)
    for round_ in range(FEWEST):
        length.paired()
        await trio.sleep(0.01)
        work.taken_s += 0.1
        length.exchanged(averaged(round_, 0.0), 0.01, closed(seconds, processor_s))
        length.merged(pause_s=0.1)
        await trio.sleep(1.0)
    lost_s = 0.1 + 0.1 * seconds / processor_s
    assert own.chosen_inner_steps == pytest.approx(lost_s / (0.1 * PAUSE_SHARE), abs=1)


@simulated()
async def test_what_an_exchange_takes_that_comes_to_nothing_is_not_taken_always():
    own, work = facts(), BusyWork()
    length = own_length(own, nobody(), [], work)
    length.next(0.1, alone=False)
    for round_ in range(2 * FEWEST):
        length.paired()
        await trio.sleep(1.0)
        work.taken_s += 0.1
        settled = averaged(round_, 0.0)
        if round_ % 2:
            settled = replace(settled, outcome=Skipped(SkipReason.PARTNER_LOST, "q"))
        length.exchanged(settled, 0.01, closed())
        length.merged(pause_s=0.1)
        await trio.sleep(0.1)
    assert own.chosen_inner_steps == pytest.approx((0.1 + 0.1) / (0.1 * PAUSE_SHARE), abs=1)


@simulated()
async def test_a_round_begun_alone_ends_when_somebody_comes_and_again_when_that_trains():
    roster = Roster(silence_s=1e9)
    length = own_length(facts(), View(roster, GROUP), [])
    tell(roster, "elsewhere", "downloading", group="theirs")
    tell(roster, "resting", "paused")

    is_outgrown_after = length.is_outgrown
    length.next(0.1, alone=True)
    assert not is_outgrown_after(NOMINAL - 1)
    tell(roster, "p", "downloading")
    assert is_outgrown_after(NOMINAL - 1)
    assert not is_outgrown_after(FIRST_INNER_STEPS - 1)  # one that comes and goes costs little

    length.next(0.1, alone=True)
    assert not is_outgrown_after(FIRST_INNER_STEPS)  # it knows of that peer
    tell(roster, "p", "training")
    assert is_outgrown_after(FIRST_INNER_STEPS)

    length.next(0.1, alone=True)
    tell(roster, "p", "downloading")
    length.next(0.1, alone=True)
    tell(roster, "p", "training")  # it says so again and again
    assert not is_outgrown_after(FIRST_INNER_STEPS)
    tell(roster, "p", "downloading", incarnation=2)
    assert is_outgrown_after(FIRST_INNER_STEPS)

    length.next(0.1, alone=False)
    tell(roster, "q", "training")
    assert not is_outgrown_after(FIRST_INNER_STEPS)


@simulated()
async def test_a_nominal_step_takes_all_peers_as_long():
    others = [other("a", speed=10.0), other("b", speed=10.0)]
    assert Pace(NOMINAL, facts(10.0)).nominal_step_s(others) == pytest.approx(0.1)
    assert Pace(NOMINAL, facts(2.5)).nominal_step_s(others) == pytest.approx(0.1)
    assert Pace(NOMINAL, facts(2.5)).nominal_step_s([]) == pytest.approx(0.4)
    assert Pace(NOMINAL, facts(0.0)).nominal_step_s(others) == 0.0


@simulated()
async def test_a_lag_is_made_up_over_a_round_of_our_own_where_that_is_longer():
    others = [other("a", speed=10.0, step=128), other("b", speed=10.0, step=128)]
    pace = Pace(NOMINAL, facts(10.0))
    assert pace.owed(0.0, others, keep_together) == pytest.approx(NOMINAL / 1.5)
    assert pace.owed(0.0, others, keep_together, 2) == pytest.approx(NOMINAL / 1.5)
    longer = pace.owed(0.0, others, keep_together, 512)
    assert longer == pytest.approx(NOMINAL / (1 + 128 / 512 / 3))


def test_a_partner_is_looked_for_during_a_round_of_our_own() -> None:
    own = facts(10.0)
    assert own.own_round_s == own.round_s == 6.4
    own.chosen_inner_steps = 512
    assert (own.own_round_s, own.round_s) == (51.2, 6.4)
    own.chosen_inner_steps = 2
    assert own.own_round_s == own.round_s
