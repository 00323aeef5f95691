"""In pairs: a joiner takes chunks of several replicas at once, and finds out who lies."""

import numpy as np
import pytest
from swarm_worlds import simulated, start, toy_spec, weights_bytes

from peer.content.fetching import RATE_WINDOW_S, ContentClient
from peer.content.state_file import state_bytes
from peer.daemon.fetched import MAX_HELPERS, Witnesses
from peer.observe.event_names import EventName
from protocol.limits import STATE_CHUNK_BYTES
from protocol.wire.versions import CONTENT
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import (
    LoggedEvent,
    SimulatedPeer,
    SimulatedSwarm,
    SwarmOptions,
    identity_of,
    open_swarm,
)
from simulation.trainer import SimulatedSpeed, ToyProblem

pytestmark = pytest.mark.slow

PARAMETERS = 1 << 21
STATE_BYTES = state_bytes(PARAMETERS)
LINE_BYTES_PER_S = 1e6
ONE_LINE_S = STATE_BYTES / LINE_BYTES_PER_S
OPTIONS = SwarmOptions(
    padded_parameters=PARAMETERS,
    link=LinkModel(0.02, bandwidth_bytes_per_s=LINE_BYTES_PER_S),
    problem=ToyProblem(rate=0.5, sigma=0.2),
)
"""After a few rounds replicas are near each other."""
SLOW = Machine(SimulatedSpeed(step_s=10.0), checkpoint_every_s=0.0)
"""Training stands nearly still beside a transfer; checkpoints are written at the end alone."""
SPEC = toy_spec(40, 5, alpha=0.3, beta=0.7)
"""With outer momentum, so that both halves of a state come."""


class Described:
    """The sources of `d` in the order in which they name their roots; the first one leads.

    Args:
        liar: the place in that order of one that lies about all its weights; None for nobody.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, swarm: SimulatedSwarm, liar: int | None = None
    ) -> None:
        self.names: list[str] = []
        self._liar = liar
        self._honest = ContentClient.description
        self.swarm = swarm

        async def description(fetcher, expected, size):
            return await self._described_by(fetcher, expected, size)

        monkeypatch.setattr(ContentClient, "description", description)

    async def _described_by(self, fetcher, expected, size):
        name = self.name_of(fetcher.remote_peer_id)
        if "d" in self.swarm.peers and name not in self.names:
            self.names.append(name)
            if len(self.names) - 1 == self._liar:
                spoil(self.swarm[name])
        return await self._honest(fetcher, expected, size)

    def name_of(self, peer_id: str) -> str:
        return next(n for n, peer in self.swarm.peers.items() if peer.peer_id == peer_id)

    def givers(self, joiner: SimulatedPeer) -> set[str]:
        return {self.name_of(peer_id) for peer_id in received(joiner)["remotes"]}


def spoil(peer: SimulatedPeer) -> None:
    assert peer.provision.slow_P is not None
    peer.provision.slow_P *= -3.0


def received(peer: SimulatedPeer) -> LoggedEvent:
    (event,) = peer.events(EventName.STATE_RECEIVED)
    return event


async def started(swarm: SimulatedSwarm, names: str) -> None:
    await start(swarm, *names, machine_of=dict.fromkeys(names, SLOW))
    await swarm.until(
        lambda: all(len(p.events(EventName.VALIDATED)) >= 4 for p in swarm.peers.values())
    )


def is_one_of_them(joiner: SimulatedPeer, swarm: SimulatedSwarm, names: set[str]) -> bool:
    """Whether what it began with is near these replicas."""
    others = [swarm[name].slow_weights() for name in names]
    length = np.linalg.norm(others[0])
    away = [np.linalg.norm(joiner.slow_weights() - other) for other in others]
    return bool(max(away) < 0.5 * length)


@pytest.mark.long
def test_several_thin_lines_bring_it_faster_than_one(tmp_path, monkeypatch):
    @simulated()
    async def run():
        async with open_swarm(1, SPEC, tmp_path, OPTIONS) as swarm:
            described = Described(monkeypatch, swarm)
            await started(swarm, "abc")
            joiner = swarm.join("d", SLOW)
            await swarm.until(joiner.ready.is_set)
            state = received(joiner)
            assert described.givers(joiner) == set("abc")
            assert state["seconds"] < 0.5 * ONE_LINE_S
            assert state["bytes"] <= STATE_BYTES + MAX_HELPERS * STATE_CHUNK_BYTES
            told = joiner.events(EventName.STATE_PROGRESSED)
            ends_s = [event["left_s"] + event["monotonic_s"] for event in told]
            assert all(abs(at_s - state["monotonic_s"]) < 0.2 * ONE_LINE_S for at_s in ends_s)
            assert is_one_of_them(joiner, swarm, set("abc"))

    run()


@pytest.mark.long
def test_sources_may_be_as_slow_as_one_line_makes_them_that_all_share(tmp_path, monkeypatch):
    """Each sends half of what one source alone has to."""
    line = LinkModel(0.02, bandwidth_bytes_per_s=LINE_BYTES_PER_S / 20)
    least = 2 * line.bandwidth_bytes_per_s
    monkeypatch.setattr("peer.content.fetching.slowest_rate", lambda total_bytes: least)

    @simulated()
    async def run():
        async with open_swarm(1, SPEC, tmp_path, OPTIONS) as swarm:
            await started(swarm, "abc")
            for name in "abc":
                swarm.internet.link(swarm[name].peer_id, identity_of(1, "d").peer_id).model = line
            joiner = swarm.join("d", SLOW)
            await swarm.until(joiner.ready.is_set)
            assert received(joiner)["seconds"] > RATE_WINDOW_S
            assert len(received(joiner)["remotes"]) == 3
            assert received(joiner)["bytes"] <= 1.5 * STATE_BYTES

    run()


@pytest.mark.long
def test_nobody_helps_whose_state_no_witness_has_seen(tmp_path, monkeypatch):
    @simulated()
    async def run():
        async with open_swarm(1, SPEC, tmp_path, OPTIONS) as swarm:
            described = Described(monkeypatch, swarm)
            ask = Witnesses._ask

            async def ask_of_the_leader(self, peer_id, turn):
                if described.name_of(self._source) == described.names[0]:
                    await ask(self, peer_id, turn)

            monkeypatch.setattr(Witnesses, "_ask", ask_of_the_leader)
            await started(swarm, "abc")
            joiner = swarm.join("d", SLOW)
            await swarm.until(joiner.ready.is_set)
            assert len(described.names) == 3
            assert received(joiner)["bytes"] == STATE_BYTES
            assert described.givers(joiner) == set(described.names[:1])

    run()


@pytest.mark.long
@simulated()
async def test_of_two_where_nobody_could_be_found_out_one_gives_all(tmp_path):
    async with open_swarm(1, SPEC, tmp_path, OPTIONS) as swarm:
        await started(swarm, "ab")
        joiner = swarm.join("d", SLOW)
        await swarm.until(joiner.ready.is_set)
        assert len(received(joiner)["remotes"]) == 1
        assert received(joiner)["bytes"] == STATE_BYTES


@pytest.mark.parametrize("names", ["ab", pytest.param("abc", marks=pytest.mark.long)])
def test_without_outer_momentum_half_of_a_state_comes(tmp_path, names):
    @simulated()
    async def run():
        async with open_swarm(1, toy_spec(40, 5), tmp_path, OPTIONS) as swarm:
            await started(swarm, names)
            joiner = swarm.join("d", SLOW)
            await swarm.until(joiner.ready.is_set)
            least = weights_bytes(PARAMETERS)
            assert least < 0.6 * STATE_BYTES
            assert least <= received(joiner)["bytes"] <= least + MAX_HELPERS * STATE_CHUNK_BYTES
            assert is_one_of_them(joiner, swarm, set(names))

    run()


@pytest.mark.parametrize(
    "place", [0, pytest.param(1, marks=pytest.mark.long)], ids=["leader", "helper"]
)
def test_where_a_source_dies_the_others_give_what_it_has_not(tmp_path, monkeypatch, place):
    @simulated()
    async def run():
        async with open_swarm(1, SPEC, tmp_path, OPTIONS) as swarm:
            described = Described(monkeypatch, swarm)
            await started(swarm, "abc")

            def sent(name: str) -> int:
                return swarm[name].network.statistics().sent_bytes[CONTENT] - before[name]

            before = dict.fromkeys("abc", 0)
            before = {name: sent(name) for name in "abc"}
            joiner = swarm.join("d", SLOW, through=["b"])
            await swarm.until(lambda: len(described.names) > place)
            dies = described.names[place]
            await swarm.until(lambda: sent(dies) > STATE_BYTES / 5)
            swarm.kill(dies)
            await swarm.until(joiner.ready.is_set)
            assert described.givers(joiner) == set("abc"), "what it gave is kept"
            assert received(joiner)["bytes"] <= STATE_BYTES + 5 * STATE_CHUNK_BYTES
            assert joiner.failure is None

    run()


@pytest.mark.parametrize(
    "place",
    [0, *(pytest.param(p, marks=pytest.mark.long) for p in (1, 2))],
    ids=["leader", "helper", "another"],
)
def test_one_that_lies_is_left_out_and_the_others_give_its_part(tmp_path, monkeypatch, place):
    @simulated()
    async def run():
        async with open_swarm(1, SPEC, tmp_path, OPTIONS) as swarm:
            described = Described(monkeypatch, swarm, liar=place)
            await started(swarm, "abc")
            joiner = swarm.join("d", SLOW)
            await swarm.until(joiner.ready.is_set)
            honest = set("abc") - {described.names[place]}
            assert described.givers(joiner) <= honest
            assert STATE_BYTES * 1.1 < received(joiner)["bytes"] < STATE_BYTES * 1.7
            assert is_one_of_them(joiner, swarm, honest)

    run()


@pytest.mark.long
def test_a_lie_that_only_the_loss_shows_is_not_taken_and_then_one_gives_all(tmp_path, monkeypatch):
    monkeypatch.setattr("peer.daemon.fetched.is_unlike", lambda sample, witnesses: False)

    @simulated()
    async def run():
        async with open_swarm(1, SPEC, tmp_path, OPTIONS) as swarm:
            described = Described(monkeypatch, swarm, liar=1)
            await started(swarm, "abc")
            joiner = swarm.join("d", SLOW)
            await swarm.until(joiner.ready.is_set)
            (giver,) = described.givers(joiner)
            assert giver != described.names[1]

    run()
