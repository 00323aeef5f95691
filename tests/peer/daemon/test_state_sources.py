"""A joiner's state: from several peers at once, another where one dies, its own checkpoint."""

import re

import numpy as np
import pytest
import trio
from swarm_worlds import simulated, start, toy_spec

from peer.content.state_file import state_bytes
from peer.daemon.fetched import MAX_HELPERS
from peer.facts import PeerState
from peer.observe.event_names import EventName
from protocol.limits import STATE_CHUNK_BYTES
from protocol.run.run_spec import RunSpec
from protocol.wire.versions import CONTENT
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import (
    LoggedEvent,
    SimulatedPeer,
    SimulatedSwarm,
    SwarmOptions,
    open_swarm,
)
from simulation.trainer import SimulatedSpeed

pytestmark = pytest.mark.slow

PARAMETERS = 1 << 20
STATE_BYTES = state_bytes(PARAMETERS)
THIN = LinkModel(0.02, bandwidth_bytes_per_s=1e6)
SLOW = Machine(SimulatedSpeed(step_s=4.0), checkpoint_every_s=0.0)
"""Training stands nearly still beside a transfer; checkpoints are written at the end alone."""


def spec_of(method: str) -> RunSpec:
    if method == "diloco":
        return toy_spec(40, 10, method=method, diloco={"blocks_per_fragment": 2})
    return toy_spec(40, 10, method=method, alpha=0.3, beta=0.7)


def received(peer: SimulatedPeer) -> LoggedEvent:
    (event,) = peer.events(EventName.STATE_RECEIVED)
    return event


async def open_three(swarm: SimulatedSwarm) -> None:
    await start(swarm, *"abc", machine_of=dict.fromkeys("abc", SLOW))
    await swarm.until(lambda: all(peer.facts.round >= 1 for peer in swarm.peers.values()))


@simulated()
async def test_where_all_hold_one_copy_a_joiner_takes_it_from_several_at_once(tmp_path):
    options = SwarmOptions(padded_parameters=PARAMETERS, link=THIN)
    async with open_swarm(1, spec_of("diloco"), tmp_path, options) as swarm:
        await open_three(swarm)
        joiner = swarm.join("d", SLOW)
        await swarm.until(joiner.ready.is_set)
        state = received(joiner)
        assert set(state["remotes"]) == {swarm[name].peer_id for name in "abc"}
        assert state["seconds"] < 0.6 * STATE_BYTES / 1e6
        assert state["bytes"] <= STATE_BYTES + MAX_HELPERS * STATE_CHUNK_BYTES
        assert np.array_equal(joiner.slow_weights(), swarm["a"].slow_weights())


@simulated()
async def test_it_says_how_long_the_rest_will_take(tmp_path):
    line = LinkModel(0.02, bandwidth_bytes_per_s=2e5)
    options = SwarmOptions(padded_parameters=PARAMETERS, link=line)
    async with open_swarm(1, spec_of("noloco"), tmp_path, options) as swarm:
        await start(swarm, "a", machine_of={"a": SLOW})
        joiner = swarm.join("b", SLOW)
        doing: list[str] = []
        while not joiner.ready.is_set():
            await trio.sleep(1.0)
            if hasattr(joiner, "facts"):
                doing.append(joiner.status().doing or "")
        shown = (
            r"fetching the state: from 1 peer, \d+%, \d+ s left, [\d.]+ MB/s \(\d+ MB of \d+ MB\)"
        )
        assert any(re.fullmatch(shown, said) for said in doing), doing
        told = joiner.events(EventName.STATE_PROGRESSED)
        assert len(told) >= 2
        left = [event["left_s"] + event["monotonic_s"] for event in told]
        ended_s = received(joiner)["monotonic_s"]
        assert all(abs(at_s - ended_s) < 0.2 * STATE_BYTES / 2e5 for at_s in left)


async def come_back(swarm: SimulatedSwarm, after_rounds: int) -> SimulatedPeer:
    """A peer leaves, and is back when the others have trained so many rounds."""
    await open_three(swarm)
    gone = swarm["c"]
    gone.peer.request_stop()
    await gone.ended.wait()
    due = swarm["a"].facts.round + after_rounds
    await swarm.until(lambda: swarm["a"].facts.round >= due)
    back = swarm.resume("c")
    await swarm.until(lambda: back.ready.is_set() and back.facts.state is PeerState.TRAINING)
    return back


@pytest.mark.parametrize(
    ("method", "after_rounds", "least_kept", "most_kept"),
    [
        ("diloco", 0, 0.5, 1.0),
        pytest.param("diloco", 3, 0.0, 0.0, marks=pytest.mark.long),
        ("noloco", 1, 0.0, 0.0),
    ],
)
def test_a_peer_that_is_back_fetches_what_is_not_in_its_checkpoint(
    tmp_path, method, after_rounds, least_kept, most_kept
):
    @simulated()
    async def check() -> None:
        options = SwarmOptions(padded_parameters=PARAMETERS)
        async with open_swarm(1, spec_of(method), tmp_path, options) as swarm:
            back = await come_back(swarm, after_rounds)
            state = received(back)
            came = back.network.statistics().received_bytes[CONTENT]
            assert least_kept <= state["kept_bytes"] / STATE_BYTES <= most_kept
            assert state["kept_bytes"] + state["bytes"] >= STATE_BYTES - STATE_CHUNK_BYTES
            assert came < STATE_BYTES - state["kept_bytes"] + 4 * STATE_CHUNK_BYTES

    check()
