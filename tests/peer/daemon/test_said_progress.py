"""What the console says of a run under way: in simulated swarms, in virtual time."""

import io

import pytest
import trio
from swarm_worlds import simulated, start, toy_spec

from peer.daemon.report import LOOK_S, REPEAT_S, SAY_EVERY_S, Console
from peer.facts import PeerState
from peer.observe.events import EventLog
from peer.observe.history import MOST_POINTS
from simulation.machine import Machine
from simulation.swarm import open_swarm
from simulation.trainer import SimulatedSpeed

pytestmark = pytest.mark.slow
EXPORT = "loco-peer export --hf DIR"


def console_of(swarm, name, nursery, show=lambda _: False):
    """What a person at this peer reads, as it comes; `show` is the line of a terminal."""
    stream, peer = io.StringIO(), swarm[name]
    log = EventLog(lambda _: None, peer=name, wall_time_s=trio.current_time, stream=stream)
    nursery.start_soon(Console(peer.report, peer.facts, log, EXPORT, show).run)
    return stream


def lines_of(stream, word):
    return [line for line in stream.getvalue().splitlines() if word in line]


@simulated()
async def test_a_line_every_few_seconds_says_how_far_the_run_is(tmp_path):
    spec = toy_spec(40)
    async with open_swarm(1, spec, tmp_path) as swarm, trio.open_nursery() as nursery:
        await start(swarm, "a")
        stream = console_of(swarm, "a", nursery)
        await trio.sleep(20)
        swarm.join("b", Machine(SimulatedSpeed(step_s=0.2)))
        await swarm.until(lambda: swarm["a"].facts.step > 600)
        progress = swarm["a"].status()
        await swarm.finished()
        await trio.sleep(2 * REPEAT_S)
        nursery.cancel_scope.cancel()
    assert len(lines_of(stream, "training alone")) == 1
    said = lines_of(stream, "tokens/s")
    assert len(said) == pytest.approx(800 * 0.1 / SAY_EVERY_S, abs=2)
    assert " of 800 (" in said[-1]
    assert said[-1].endswith("2 peers")
    own = spec.tokens_per_step / 0.1
    assert progress.tokens_per_s == pytest.approx(own, rel=0.2)
    assert progress.swarm_tokens_per_s == pytest.approx(1.5 * own, rel=0.2)
    assert progress.total_steps == 800
    assert progress.left_s is not None
    assert progress.step is not None
    pace = progress.left_s / (800 - progress.step)
    assert pace == pytest.approx(0.1, rel=0.3)
    (export,) = lines_of(stream, EXPORT)
    assert "serves its state" in export


@simulated()
async def test_a_peer_that_ends_with_its_run_says_how_to_take_the_model(tmp_path):
    async with open_swarm(1, toy_spec(3), tmp_path) as swarm:
        peer = swarm.found("a", Machine(exit_when_done=True))
        await peer.known.wait()
        async with trio.open_nursery() as nursery:
            stream = console_of(swarm, "a", nursery)
            await peer.ended.wait()
            nursery.cancel_scope.cancel()
    assert peer.failure is None
    assert len(lines_of(stream, EXPORT)) == 1


@simulated()
async def test_a_peer_that_leaves_before_the_end_speaks_of_no_model(tmp_path):
    async with open_swarm(1, toy_spec(400), tmp_path) as swarm, trio.open_nursery() as nursery:
        await start(swarm, "a")
        stream = console_of(swarm, "a", nursery)
        await trio.sleep(20)
        nursery.cancel_scope.cancel()
    assert lines_of(stream, " left, 1 peer")
    assert not lines_of(stream, EXPORT)


@simulated()
async def test_what_is_waited_for_is_said_again(tmp_path):
    async with open_swarm(1, toy_spec(400), tmp_path) as swarm, trio.open_nursery() as nursery:
        await start(swarm, "a")
        await swarm.until(lambda: swarm["a"].facts.step > 30)
        swarm.internet.kill(swarm["a"].peer_id)
        joiner = swarm.join("b")
        await swarm.until(lambda: hasattr(joiner, "report"))
        stream = console_of(swarm, "b", nursery)
        await trio.sleep(4 * REPEAT_S)
        assert joiner.facts.state is PeerState.CONNECTING
        assert len(lines_of(stream, "cannot reach")) >= 3
        nursery.cancel_scope.cancel()


@simulated()
async def test_each_peer_knows_who_averages_with_whom(tmp_path):
    async with open_swarm(1, toy_spec(60), tmp_path) as swarm:
        await start(swarm, "a", "b", "c")
        await swarm.until(lambda: swarm["a"].facts.step > 600)
        ids = [swarm[name].peer_id for name in "abc"]
        told = swarm["a"].report.snapshot(history=False)["pairs"]
        really = [[swarm[x].facts.partners.get(y) for y in ids] for x in "abc"]
    places = [told["peers"].index(peer_id) for peer_id in ids]
    for i, x in enumerate(places):
        for j, y in enumerate(places):
            met = really[i][j]
            averages = met.averages if met else 0
            untold = averages - told["averages"][x][y]
            assert 0 <= untold <= (0 if i == 0 else 3)  # of before the link, and the last beat
    assert told["averages"][places[1]][places[2]] > 3


@simulated()
async def test_those_that_look_each_second_share_one_status(tmp_path):
    async with open_swarm(1, toy_spec(40), tmp_path) as swarm:
        await start(swarm, "a")
        report = swarm["a"].report
        before = report.recent()
        await trio.sleep(0.5 * LOOK_S)
        assert report.recent() is before
        assert report.status() is not before
        await trio.sleep(LOOK_S)
        assert report.recent() is not before


@simulated()
async def test_a_terminal_shows_what_is_waited_for_and_it_is_not_said_again(tmp_path):
    shown = list[str]()

    def show(line):
        shown.append(line)
        return bool(line)

    async with open_swarm(1, toy_spec(400), tmp_path) as swarm, trio.open_nursery() as nursery:
        await start(swarm, "a")
        training = console_of(swarm, "a", nursery, show)
        await trio.sleep(SAY_EVERY_S)
        assert lines_of(training, "tokens/s")
        assert not any(shown), "training needs no such line"
        swarm.internet.kill(swarm["a"].peer_id)
        joiner = swarm.join("b")
        await swarm.until(lambda: hasattr(joiner, "report"))
        stream = console_of(swarm, "b", nursery, show)
        await trio.sleep(4 * REPEAT_S)
        assert joiner.facts.state is PeerState.CONNECTING
        said = [line.partition(" ")[2] for line in lines_of(stream, "cannot reach")]
        assert len(said) == len(set(said)), "no sentence twice"
        lasts = [line for line in shown if "cannot reach" in line]
        assert any(line.endswith("; 60 s so far") for line in lasts), lasts
        nursery.cancel_scope.cancel()


@simulated()
async def test_a_run_leaves_its_curve(tmp_path):
    async with open_swarm(1, toy_spec(40), tmp_path) as swarm, trio.open_nursery() as nursery:
        await start(swarm, "a", "b")
        nursery.start_soon(swarm["a"].report.keep_history)
        await swarm.finished()
        told = swarm["a"].report.snapshot(history=True)
        met = swarm["a"].facts.partners[swarm["b"].peer_id]
        nursery.cancel_scope.cancel()
    steps = [step for step in told["history"]["step"] if step]
    assert len(told["history"]["step"]) < MOST_POINTS
    assert steps == sorted(steps)
    assert steps[-1] > 700
    assert max(filter(None, told["history"]["received_bytes_per_s"])) > 0
    assert told["history"]["best_loss"][-1] <= told["history"]["peers_loss"][-1]
    (peer,) = told["peers"]
    assert peer["averages"] == met.averages > 10
    assert peer["average_s"] == pytest.approx(met.seconds / met.averages)
    assert "linked with" in " ".join(told["log"])
    assert "history" not in swarm["a"].report.snapshot(history=False)
