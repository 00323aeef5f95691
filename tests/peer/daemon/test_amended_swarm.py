"""Runs that are amended while they are under way: longer, shorter, slower, closed."""

from types import SimpleNamespace

import pytest
from swarm_worlds import distance, simulated, start, toy_spec

from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.daemon.control_requests import LEAD_ROUNDS
from peer.daemon.control_requests import amend as amend_run
from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.process.rejoin import JoinAgain
from peer.rounds import loop
from peer.state.kept_files import AdmissionFile
from peer.training import messages
from peer.training.messages import TrainRound
from protocol.admission.statements import Verdict
from protocol.errors import InvalidRunSpec, LocoError, Refused
from protocol.run.amendments import LEARNING_RATE, MODE, TOTAL_STEPS, is_amendment
from protocol.run.sections import AdmissionSection
from simulation.machine import Machine
from simulation.swarm import identity_of, open_swarm
from simulation.trainer import SimulatedSpeed

pytestmark = pytest.mark.slow
H = 20
METHODS = ("noloco", "diloco", pytest.param("streaming", marks=pytest.mark.long))


async def amend(swarm, name="a", at_round=None, dry_run=False, **changes):
    keys = {"steps": TOTAL_STEPS, "rate": LEARNING_RATE, "mode": MODE, "peers": "admission.peers"}
    values = {keys.get(key, key): value for key, value in changes.items()}
    peer = swarm[name]
    wanted = {"values": values, "at_round": at_round, "dry_run": dry_run}
    return await amend_run(peer.parts, wanted)


def amended(peer):
    """What it has heard: versions and rounds."""
    return [(e["version"], e["round"]) for e in peer.events(EventName.RUN_AMENDED)]


def ends(peer):
    """The nominal step at which its training was over."""
    closed = peer.events(EventName.ROUND_CLOSED)
    return max(event["step"] for event in closed if event["steps"])


@pytest.fixture
def orders(monkeypatch):
    """Each `TrainRound` that anybody opened: where it begins, and with which peak and end."""
    seen = []

    def noted(*given, **named):
        order = TrainRound(*given, **named)
        seen.append((order.start_step, order.total_steps, order.learning_rate))
        return order

    said = SimpleNamespace(**{**vars(messages), "TrainRound": noted})
    monkeypatch.setattr(loop, "messages", said)
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_all_train_by_the_new_numbers_from_the_same_step_on(tmp_path, orders, method):
    @simulated()
    async def run():
        spec = toy_spec(10, method=method)
        rate = spec.optimizer.learning_rate
        async with open_swarm(1, spec, tmp_path) as swarm:
            await start(swarm, "a", "b", "c")
            told = await amend(swarm, steps=14 * H, rate=rate / 2)
            assert told["round"] == told["present"] + LEAD_ROUNDS
            await swarm.finished()
            for name in "abc":
                assert amended(swarm[name]) == [(1, told["round"])]
                assert swarm[name].facts.step == 14 * H
                assert 13 * H < ends(swarm[name]) < 15 * H
            assert {event["round"] for event in swarm["a"].events(EventName.RUN_FINISHED)}
            assert orders
            for step, total_steps, peak in orders:
                new = step >= told["step"] - 1e-6
                assert (total_steps, peak) == ((14 * H, rate / 2) if new else (10 * H, rate))

    run()


@pytest.mark.parametrize("method", METHODS)
def test_a_shortened_run_ends_at_the_new_end_with_its_mean(tmp_path, method):
    @simulated()
    async def run():
        async with open_swarm(1, toy_spec(30, method=method, codec="fp32"), tmp_path) as swarm:
            await start(swarm, "a", "b", "c", "d")
            await amend(swarm, steps=9 * H, at_round=6)
            await swarm.finished()
            assert {swarm[name].facts.step for name in "abcd"} == {9 * H}
            assert max(distance(swarm["a"], swarm[name]) for name in "bcd") < 1e-4

    run()


def test_fragments_are_averaged_plainly_at_the_new_end_and_nowhere_else(tmp_path, monkeypatch):
    plain, write = set(), OuterFragments.write

    def note(self, fragment, result, **how):
        if self.is_last(result.cycle):
            plain.add(result.cycle)
        return write(self, fragment, result, **how)

    monkeypatch.setattr(OuterFragments, "write", note)

    @simulated()
    async def run():
        async with open_swarm(1, toy_spec(6, method="diloco"), tmp_path) as swarm:
            await start(swarm, "a", "b")
            await amend(swarm, steps=8 * H, at_round=6)
            await swarm.finished()

    run()
    assert plain == {8}


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_newcomers_and_trainers_that_start_again_take_the_new_numbers(tmp_path, orders, method):
    @simulated()
    async def run():
        spec = toy_spec(30, method=method)
        rate = spec.optimizer.learning_rate
        machine_of = {"b": Machine(speed=SimulatedSpeed(die_at_steps=frozenset([7 * H])))}
        async with open_swarm(1, spec, tmp_path) as swarm:
            await start(swarm, "a", "b", machine_of=machine_of)
            await amend(swarm, steps=15 * H, rate=2 * rate, at_round=4)
            await swarm.until(lambda: swarm["a"].facts.step >= 5 * H)
            orders.clear()
            swarm.join("c", through=["b"])
            await swarm.until(swarm["c"].ready.is_set)
            swarm.kill("a")
            await swarm["a"].ended.wait()
            swarm.join("a", through=["b"])
            await swarm.finished()
            assert swarm["b"].events(EventName.TRAINER_DIED)
            assert amended(swarm["c"]) == [(1, 4)]
            assert len(amended(swarm["a"])) == 1  # of its home, before anybody could tell it
            assert {numbers[1:] for numbers in orders} == {(15 * H, 2 * rate)}
            assert {peer.facts.step for peer in swarm.peers.values()} == {15 * H}

    run()


@simulated()
async def test_a_peer_that_was_cut_off_joins_again_when_the_run_goes_on_without_it(tmp_path):
    async with open_swarm(1, toy_spec(8), tmp_path) as swarm:
        await start(swarm, "a", "b", "c")
        swarm.isolate("c")
        await amend(swarm, steps=40 * H)
        await swarm.until(lambda: swarm["c"].facts.state is PeerState.FINISHED)
        swarm.internet.heal()
        await swarm.until(swarm["c"].ended.is_set)
        assert isinstance(swarm["c"].failure, JoinAgain)
        assert "longer" in str(swarm["c"].failure)


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_a_peer_that_was_cut_off_goes_back_to_where_a_shortened_run_ended(tmp_path, method):
    @simulated()
    async def run():
        async with open_swarm(1, toy_spec(60, method=method), tmp_path) as swarm:
            await start(swarm, "a", "b", "c")
            swarm.isolate("c")
            await amend(swarm, steps=7 * H, at_round=6)
            await swarm.finished("a", "b")
            await swarm.until(lambda: swarm["c"].facts.step > 10 * H)
            swarm.internet.heal()
            await swarm.until(swarm["c"].ended.is_set)
            assert isinstance(swarm["c"].failure, JoinAgain)

    run()


async def refused(swarm, *names, **wanted):
    with pytest.raises((LocoError, InvalidRunSpec)) as told:
        await amend(swarm, *names, **wanted)
    return str(told.value)


@simulated()
async def test_what_makes_no_sense_is_refused_with_what_would(tmp_path):
    async with open_swarm(1, toy_spec(12), tmp_path) as swarm:
        swarm.found("a")
        await swarm.until(swarm["a"].ready.is_set)
        swarm.join("b")
        await swarm.until(lambda: swarm["b"].ready.is_set() and swarm["a"].facts.step > 2 * H)
        assert "founder's key" in await refused(swarm, "b", steps=40 * H)
        made = swarm["a"].parts.admission.rule(Verdict.DELEGATE, swarm["b"].peer_id)
        swarm["a"].links.tell_statements(made)
        await swarm.until(lambda: bool(swarm["b"].events(EventName.PEER_RULED_ON)))
        assert "founder's key" in await refused(swarm, "b", steps=40 * H)
        assert "founder's key" in await refused(swarm, "b", steps=40 * H, dry_run=True)
        assert "nothing to amend" in await refused(swarm, steps=12 * H)
        assert "sync.inner_steps" in await refused(swarm, **{"sync.inner_steps": 7})
        assert "greater than 0" in await refused(swarm, rate=0.0)
        assert "name a later one" in await refused(swarm, steps=40 * H, at_round=2)
        assert "ends with round 12" in await refused(swarm, steps=40 * H, at_round=13)
        assert "step 160 at the earliest" in await refused(swarm, steps=7 * H, at_round=8)
        assert "at once" in await refused(swarm, mode="invite", at_round=8)
        dry = await amend(swarm, steps=40 * H, dry_run=True)
        assert dry["changes"] == [[TOTAL_STEPS, 12 * H, 40 * H]]
        await swarm.finished()
        assert amended(swarm["a"]) == []
        assert "has ended" in await refused(swarm, steps=40 * H)


@simulated()
async def test_the_last_rounds_can_still_be_followed_by_more(tmp_path):
    async with open_swarm(1, toy_spec(5), tmp_path) as swarm:
        await start(swarm, "a", "b")
        await swarm.until(lambda: swarm["a"].facts.step >= 3.2 * H)
        assert (await amend(swarm, steps=9 * H))["round"] == 5
        await swarm.finished()
        assert {swarm[name].facts.step for name in "ab"} == {9 * H}


# --- admission ------------------------------------------------------------------------------------


@simulated()
async def test_an_open_run_is_closed_and_those_in_it_stay(tmp_path):
    async with open_swarm(1, toy_spec(40), tmp_path) as swarm:
        await start(swarm, "a", "b", "c")
        await amend(swarm, mode="invite")
        await swarm.until(lambda: amended(swarm["b"]) and amended(swarm["c"]))
        swarm.join("x", through=["b"])
        await swarm.until(swarm["x"].ended.is_set)
        assert isinstance(swarm["x"].failure, Refused)
        swarm.kill("c")
        await swarm["c"].ended.wait()
        swarm.join("c", through=["b"])
        token = swarm["a"].parts.admission.invite(b"s" * 32, 3600.0, 1)
        swarm.join("d", Machine(token=token), through=["b"])
        await swarm.until(lambda: swarm["c"].ready.is_set() and swarm["d"].ready.is_set())
        assert not swarm["a"].events(EventName.PEER_LOST)[1:]  # c alone, which was killed


@simulated()
async def test_a_closed_run_is_opened_and_a_list_grows(tmp_path):
    admission = AdmissionSection(mode="list", peers=())
    spec = toy_spec(40).model_copy(update={"admission": admission})
    async with open_swarm(1, spec, tmp_path) as swarm:
        swarm.found("a")
        await swarm.until(swarm["a"].ready.is_set)
        await amend(swarm, peers=[identity_of(1, "b").peer_id])
        swarm.join("b")
        await swarm.until(swarm["b"].ready.is_set)
        await amend(swarm, mode="open")
        await swarm.until(lambda: bool(amended(swarm["b"])))
        swarm.join("x", through=["b"])
        await swarm.until(lambda: swarm["x"].ready.is_set() or swarm["x"].ended.is_set())
        assert swarm["x"].failure is None
        assert "nothing to amend" in await refused(swarm, mode="open")


@simulated()
async def test_status_shows_the_amendments_and_the_home_keeps_them(tmp_path):
    async with open_swarm(1, toy_spec(20), tmp_path) as swarm:
        await start(swarm, "a", "b")
        await amend(swarm, steps=30 * H, at_round=8)
        await swarm.until(lambda: bool(amended(swarm["b"])))
        (shown,) = swarm["b"].status().amendments
        assert (shown["version"], shown["round"], shown["step"]) == (1, 8, 8 * H)
        assert shown["changes"] == {TOTAL_STEPS: 30 * H}
        for name in "ab":
            kept = AdmissionFile(tmp_path / name / "admission").read().statements
            assert sum(map(is_amendment, kept)) == 1
