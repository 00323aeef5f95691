"""Streaming gossip in simulated swarms: fragments that find partners of their own."""

import itertools
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import trio
from gossip_tap import Tap, install
from swarm_worlds import (
    STEP_S,
    assert_trains_on,
    distance,
    set_lines,
    simulated,
    start,
    tally,
    toy_spec,
)

from peer.facts import PeerState
from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from protocol.errors import Refused
from protocol.fragment.fragments import Fragment, fragment_layout_digest, fragments_of_run
from protocol.membership.group import Group
from protocol.outcomes import RefusalReason
from protocol.run.run_spec import RunSpec
from protocol.run.sections import NolocoSection
from protocol.wire.messages import Accept, Propose
from protocol.wire.versions import GOSSIP
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import SimulatedPeer, SimulatedSwarm, SwarmOptions, open_swarm
from simulation.trainer import SimulatedSpeed, simulated_layout
from simulation.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.slow

ROUNDS: Final = 8
H: Final = 24
FRAGMENTS: Final = 3
ROUND_S: Final = H * STEP_S
PARAMETERS: Final = 7 * 128
OPTIONS: Final = SwarmOptions(padded_parameters=PARAMETERS)
LARGE: Final = 7 * 8192
"""About as many bytes in int8."""
LARGE_MODEL: Final = SwarmOptions(padded_parameters=LARGE)


def spec_of(rounds: int = ROUNDS, **sync: Any) -> RunSpec:
    return toy_spec(rounds, H, method="streaming", **sync)


def fragments_of(parameters: int) -> tuple[Fragment, ...]:
    return fragments_of_run(NolocoSection(fragments="strided"), simulated_layout(parameters))


def ends(peer: SimulatedPeer, fragment: int) -> list[dict[str, Any]]:
    """How its snapshots of a fragment ended, in order."""
    every = peer.events(EventName.ROUND_AVERAGED, EventName.ROUND_SKIPPED)
    return [event for event in every if event["fragment"] == fragment]


def averaged(peer: SimulatedPeer, fragment: int) -> list[dict[str, Any]]:
    return [e for e in ends(peer, fragment) if e["event"] == EventName.ROUND_AVERAGED]


def assert_never_held_up(peer: SimulatedPeer) -> None:
    """Rounds have the steps of their quotas, one after another."""
    assert_trains_on(peer)
    quotas = [event["quota"] for event in peer.events(EventName.ROUND_OPENED)]
    steps = [event["steps"] for event in peer.events(EventName.ROUND_CLOSED)]
    assert steps == quotas[: len(steps)]


def assert_equal_at_the_end(*peers: SimulatedPeer) -> None:
    """But for what the codes of the last meetings round off."""
    assert all(peer.facts.state is PeerState.FINISHED for peer in peers)
    assert max(distance(peers[0], other) for other in peers[1:]) < 2e-2


# --- what it is for -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("blocks", "fragments"), [(3, FRAGMENTS), pytest.param(1, 7, marks=pytest.mark.long)]
)
def test_replicas_stay_close_and_end_equal(tmp_path: Path, blocks: int, fragments: int) -> None:
    @simulated()
    async def run() -> None:
        spec = spec_of(streaming={"blocks_per_fragment": blocks})
        async with open_swarm(1, spec, tmp_path, OPTIONS) as swarm:
            await start(swarm, *"abcd")
            await swarm.until(lambda: swarm["a"].facts.step >= (ROUNDS - 1) * H)
            peers = [swarm[name] for name in "abcd"]
            apart = max(distance(*pair) for pair in itertools.combinations(peers, 2))
            await swarm.finished()
            assert apart < 0.3, apart  # alone they would be 0.3 from the optimum, each elsewhere
            assert_equal_at_the_end(*peers)
            assert all((peer.facts.validation_loss or math.inf) < 1.2 for peer in peers)
            for peer in peers:
                assert_never_held_up(peer)
                (planned,) = peer.events(EventName.FINAL_AVERAGING)
                assert (planned["peers"], planned["meetings"]) == (4, 2)
                (finished,) = peer.events(EventName.RUN_FINISHED)
                assert finished["validation_loss"] <= finished["replica_loss"]
                assert len(ends(peer, fragments - 1)) >= ROUNDS
                assert ends(peer, fragments) == []

    run()


@pytest.mark.long
@simulated()
async def test_each_fragment_averages_once_in_h_steps_with_partners_of_its_own(
    tmp_path: Path,
) -> None:
    rounds = 16
    async with open_swarm(1, spec_of(rounds), tmp_path, OPTIONS) as swarm:
        await start(swarm, *[f"p{place}" for place in range(6)])
        await swarm.finished()
        met: Counter[str] = Counter()
        for peer in swarm.peers.values():
            by_fragment = [averaged(peer, fragment) for fragment in range(FRAGMENTS)]
            partners = []
            for fragment, done in enumerate(by_fragment):
                trained = [e for e in done if e["step"] < rounds * H]
                assert len(trained) >= rounds - 4, (peer.name, fragment, len(trained))
                # A newcomer begins in the middle of the others' steps, and falls in with them.
                late = {(e["step"] - fragment * H // FRAGMENTS) % H for e in trained}
                assert max(late) <= H // 6, late
                numbers = [e["round"] for e in ends(peer, fragment)]
                assert numbers == list(range(len(numbers)))
                partners.append([e["partner"] for e in trained][:10])
                met.update(partners[-1])
                assert len(set(partners[-1])) >= 3
            assert partners[0] != partners[1] != partners[2]
        assert len(met) == 6


@pytest.mark.parametrize(("method", "share"), [("streaming", 0.65), ("noloco", 1.0)])
def test_nothing_on_the_line_comes_in_bursts(tmp_path: Path, method: str, share: float) -> None:
    """The most that a peer sends within an eighth of a round, in what a whole model weighs."""

    @simulated()
    async def run() -> None:
        async with open_swarm(1, toy_spec(6, H, method=method), tmp_path, LARGE_MODEL) as swarm:
            await start(swarm, *"abcd")
            await swarm.until(lambda: swarm["a"].facts.step >= H)
            sent = []
            while swarm["a"].facts.step < 5 * H:
                sent.append(swarm["a"].network.statistics().sent_bytes.get(GOSSIP, 0))
                await trio.sleep(ROUND_S / 8)
            peak = max(after - before for before, after in itertools.pairwise(sent))
            assert sent[-1] - sent[0] >= 3 * LARGE
            assert peak < share * LARGE if method == "streaming" else peak >= share * LARGE

    run()


@simulated()
async def test_a_thin_line_slows_the_averages_and_never_the_training(tmp_path: Path) -> None:
    rounds = 16
    async with open_swarm(1, spec_of(rounds), tmp_path, LARGE_MODEL) as swarm:
        await start(swarm, "a", "b")
        set_lines(swarm, LinkModel(0.02, bandwidth_bytes_per_s=LARGE / (2 * ROUND_S)))
        await swarm.finished()
        for peer in swarm.peers.values():
            assert_never_held_up(peer)
            for fragment in range(FRAGMENTS):
                done = [e for e in averaged(peer, fragment) if e["step"] < rounds * H]
                assert rounds / 4 <= len(done) <= 0.75 * rounds, (fragment, len(done))
                # Each is sent again as soon as it has been merged, at whatever step that is.
                assert len({e["step"] % H for e in done}) > 2
        assert_equal_at_the_end(*swarm.peers.values())


# --- peers that come, go and fail -----------------------------------------------------------------
async def killed_at(at: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Three peers, one of them killed at its gossip operation `at`. Whether it came so far."""
    tap = Tap(lambda: swarm["b"], at=at)
    with monkeypatch.context() as patch:
        install(tap, patch)
        async with open_swarm(1, spec_of(3), folder, OPTIONS) as swarm:
            tap.strike = lambda: swarm.kill("b")
            await start(swarm, *"abc")
            await swarm.until(lambda: len(averaged(swarm["b"], 0)) == 1)
            tap.armed = True
            await swarm.finished()
            a, c = swarm["a"], swarm["c"]
            for peer in (a, c):
                assert_never_held_up(peer)
                broken = set(tally(peer)) - {"averaged", "no_partner"}
                assert broken <= {"partner_lost", "unsettled", "deadline"}, (at, broken)
            assert_equal_at_the_end(a, c)
            alive = {a.peer_id, c.peer_id}
            for name, sides in tap.ended.items():
                if sides.keys() <= alive:
                    assert len(set(sides.values())) == 1, (at, name, sides)
    return tap.struck


@pytest.mark.long
def test_a_partner_killed_at_any_operation_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in (1, 2, 3, 5, 8, 13, 21, 34):
        folder = tmp_path / str(at)
        assert run_in_virtual_time(1, partial(killed_at, at, folder, monkeypatch))


@simulated()
async def test_a_trainer_that_dies_with_fragments_in_flight_starts_again(tmp_path: Path) -> None:
    dies = Machine(SimulatedSpeed(die_at_steps=frozenset({3 * H + 2, 3 * H + 10})))
    async with open_swarm(1, spec_of(), tmp_path, LARGE_MODEL) as swarm:
        await start(swarm, *"abc", machine_of={"b": dies})
        set_lines(swarm, LinkModel(0.02, bandwidth_bytes_per_s=LARGE / ROUND_S))
        await swarm.finished()
        b = swarm["b"]
        assert b.facts.restarts["died"] == 2
        died_s = b.events(EventName.TRAINER_DIED)[0]["monotonic_s"]
        again_s = b.events(EventName.TRAINER_STARTED)[1]["monotonic_s"]
        meanwhile = [
            event
            for event in b.events(EventName.ROUND_AVERAGED, EventName.ROUND_SKIPPED)
            if died_s - ROUND_S < event["monotonic_s"] < again_s
        ]
        assert meanwhile
        # What was under way with it has been ended by both.
        assert set(tally(swarm["a"], swarm["c"])) <= {"averaged", "no_partner"}
        for fragment in range(FRAGMENTS):
            numbers = [e["round"] for e in ends(b, fragment)]
            assert numbers == list(range(len(numbers)))
        assert_equal_at_the_end(*swarm.peers.values())


@simulated()
async def test_a_late_joiner_takes_all_fragments_and_averages_them(tmp_path: Path) -> None:
    async with open_swarm(1, spec_of(12), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        await swarm.until(lambda: swarm["a"].facts.step >= 5 * H)
        late = swarm.join("c", through=["b"])
        await late.ready.wait()
        assert distance(swarm["a"], late) < 1.0
        await swarm.finished()
        (received,) = late.events(EventName.STATE_RECEIVED)
        for fragment in range(FRAGMENTS):
            assert len(averaged(late, fragment)) >= 4
            assert ends(late, fragment)[0]["round"] == received["round"] + 1
        assert_equal_at_the_end(*swarm.peers.values())


@simulated()
async def test_who_leaves_goes_within_its_grace_and_the_others_go_on(tmp_path: Path) -> None:
    async with open_swarm(1, spec_of(), tmp_path, OPTIONS) as swarm:
        await start(swarm, *"abc")
        await swarm.until(lambda: swarm["a"].facts.step >= 3 * H)
        swarm["b"].peer.request_stop()
        asked_s = trio.current_time()
        await swarm["b"].ended.wait()
        assert trio.current_time() - asked_s < 8.0
        await swarm.finished("a", "c")
        for name in "ac":
            assert_never_held_up(swarm[name])
        assert_equal_at_the_end(swarm["a"], swarm["c"])


# --- the end --------------------------------------------------------------------------------------
@simulated()
async def test_alone_a_peer_trains_to_the_end(tmp_path: Path) -> None:
    async with open_swarm(1, spec_of(4), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a")
        await swarm.finished()
        a = swarm["a"]
        assert_never_held_up(a)
        assert set(tally(a)) == {"no_partner"}
        assert (a.facts.validation_loss or math.inf) < 1.5


@simulated()
async def test_without_a_final_averaging_all_that_was_trained_goes_out(tmp_path: Path) -> None:
    async with open_swarm(1, spec_of(4, final_averaging=False), tmp_path, OPTIONS) as swarm:
        await start(swarm, *"abc")
        await swarm.finished()
        for peer in swarm.peers.values():
            last = [ends(peer, fragment)[-1] for fragment in range(FRAGMENTS)]
            assert [event["step"] for event in last] == [4 * H] * FRAGMENTS
            assert peer.events(EventName.FINAL_AVERAGING) == []
        apart = [distance(*pair) for pair in itertools.combinations(swarm.peers.values(), 2)]
        assert max(apart) > 1e-2  # nobody has made them equal


# --- peers that keep to no rules ------------------------------------------------------------------
async def propose(swarm: SimulatedSwarm, group: str, layout: str) -> Accept | RefusalReason:
    """What `b` answers when `a` proposes this."""
    a, b = swarm["a"], swarm["b"]
    proposal = Propose(group, 10**6, b.facts.step, False, layout, "int8", 1, 20, 20)
    async with Conversation(await a.network.open_stream(b.peer_id, GOSSIP)) as talk:
        await talk.send(proposal)
        try:
            answer, _ = await talk.receive(Accept)
        except Refused as refused:
            return refused.reason
    return answer


@simulated()
async def test_a_proposal_for_another_fragment_than_its_groups_is_refused(tmp_path: Path) -> None:
    async with open_swarm(1, spec_of(60), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        b = swarm["b"]
        await swarm.until(lambda: bool(averaged(b, 0)))
        run_id, model = b.facts.run_id, b.facts.layout_digest
        assert run_id is not None
        assert model is not None
        groups = [Group(run_id, f"fragment/{each}").digest for each in range(FRAGMENTS + 1)]
        layouts = [fragment_layout_digest(model, each) for each in fragments_of(PARAMETERS)]
        before = b.facts.refused.copy()
        # Its own layout is fine; whether `b` is free just now is another question.
        fit = await propose(swarm, groups[1], layouts[1])
        assert isinstance(fit, Accept) or fit in {RefusalReason.BUSY, RefusalReason.MET}, fit
        assert await propose(swarm, groups[1], layouts[0]) is RefusalReason.OTHER_LAYOUT
        assert await propose(swarm, groups[1], model) is RefusalReason.OTHER_LAYOUT
        assert await propose(swarm, groups[-1], layouts[0]) is RefusalReason.OTHER_GROUP
        whole = Group(run_id).digest
        assert await propose(swarm, whole, model) is RefusalReason.OTHER_GROUP
        counted = b.facts.refused - before
        assert counted[RefusalReason.OTHER_LAYOUT] == 2
        assert counted[RefusalReason.OTHER_GROUP] == 2
        came = len(averaged(b, 1))
        await swarm.until(lambda: len(averaged(b, 1)) > came + 1)  # and it goes on
        assert np.isfinite(b.slow_weights()).all()
