"""Where first states come from, and that one more source of them is one more class."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from fragment_tap import watch
from msgspec import structs
from streaming_worlds import OPTIONS, fragment_spec
from swarm_worlds import outcomes, simulated, start, toy_spec

from peer.content.fetching import ExpectedState
from peer.content.state_file import StateManifest, StateMemory
from peer.daemon import fetched
from peer.daemon.beginning import NOTHING_TRAINED, FirstState, Fresh, StartContext, cannot_tell
from peer.daemon.expert_beginning import FromFounder
from peer.daemon.fetched import FromPeers
from peer.daemon.kept_experts import digest_of_weights
from peer.daemon.provision import Supplies
from peer.daemon.sources import NobodyHelped
from peer.facts import Facts, HeldPart, PartShape
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from protocol.content.manifest import digest_of
from protocol.errors import RemoteProtocolError
from protocol.membership.group import Group
from protocol.membership.view import Roster, View
from protocol.run.amendments import AmendedSpec
from protocol.run.run_spec import FrozenSection, RunSpec
from protocol.schedule.data_plan import DataPlan
from protocol.wire.content_messages import StateScalars
from simulation.machine import SimulatedProvision
from simulation.swarm import open_swarm
from simulation.work import SimulatedWork

P = 256
LAYOUT = "cd" * 16
SPEC = toy_spec(rounds=40)  # 800 steps
GROUP = Group("ab" * 16)


class OneState:
    """Sources that all hold one state."""

    def __init__(self, state: StateScalars, value: float = 1.0, momentum: float = 0.0) -> None:
        self._state = state
        self._values = np.full(P, value, np.float32), np.full(P, momentum, np.float32)

    async def fetch(
        self, ask: Callable[..., Awaitable[StateScalars]], among: View, *, patience_s: float
    ) -> StateScalars:
        return await ask(self)

    remote_peer_id = "source"

    async def description(self, expected: ExpectedState, size: int) -> StateManifest:
        await trio.lowlevel.checkpoint()
        assert (expected.group, expected.minimum_step) == (GROUP.digest, 0)
        assert (expected.layout_digest or LAYOUT, size) == (LAYOUT, P)
        digests = [digest_of(chunk) for chunk in self._chunks()]
        return StateManifest(tuple(digests), self._state)

    async def request(self, content: str, parts: Any) -> None:
        await trio.lowlevel.checkpoint()

    async def part(self, index: int, max_bytes: int, moved: Any) -> bytes:
        return self._chunks()[index]

    def _chunks(self) -> list[bytes]:
        return list(StateMemory(*self._values, self._state).chunks())

    talk = SimpleNamespace(bytes_received=0, remote_peer_id="source")


def context(lines: list[bytes], sources: Any = None, spec: RunSpec = SPEC) -> StartContext:
    roster = Roster(5.0)
    log = EventLog(lines.append, peer="me", wall_time_s=trio.current_time, stream=None)
    services: Any = SimpleNamespace(facts=Facts("me", 1), events=log, roster=roster, sign=bytes)
    services.network = None
    view = View(roster, GROUP.digest)
    return StartContext(
        AmendedSpec(spec),
        HeldPart(GROUP, PartShape(LAYOUT, P), "int8", view),
        DataPlan(1, 100),
        np.zeros(P, np.float32),
        np.zeros(P, np.float32),
        services=services,
        sources=sources,
        look_around=trio.sleep_forever,
        meet=trio.sleep_forever,
        measure=cannot_tell,
    )


def scalars(**changes: Any) -> StateScalars:
    return structs.replace(StateScalars(GROUP.digest, 7, 150, LAYOUT, 1, 40, 9, 0.5), **changes)


async def test_fresh_weights_have_no_past(autojump_clock):
    async def initialise(slow_P):
        slow_P[:] = 3.0

    lines: list[bytes] = []
    place = context(lines)
    assert await Fresh(initialise).take(place) == NOTHING_TRAINED
    assert (place.slow_P == 3.0).all()
    assert not place.momentum_P.any()
    assert lines == []


async def test_a_fetched_state_stands_where_its_source_stood(autojump_clock, monkeypatch):
    monkeypatch.setattr(fetched, "_heard_steps", lambda *_: [150])
    lines: list[bytes] = []
    place = context(lines, OneState(scalars(), momentum=2.0))
    assert await FromPeers().take(place) == FirstState(round=7, step=150, epoch=1, position=40)
    assert (place.slow_P[0], place.momentum_P[0]) == (1.0, 2.0)
    progress = place.services.facts.progress
    assert place.services.facts.doing == "fetching the state"
    assert progress is not None
    assert (progress.part, progress.share) == ("from 1 peer", 1.0)
    (line,) = lines
    assert EventName.STATE_RECEIVED.encode() in line


@pytest.mark.parametrize(
    ("said", "heard", "believed"),
    [
        (150, [], 0),
        (790, [100, 120, 140], 120),
        (110, [100, 120, 140], 110),
    ],
)
async def test_no_source_alone_moves_us_ahead_of_the_others(
    autojump_clock, monkeypatch, said, heard, believed
):
    monkeypatch.setattr(fetched, "_heard_steps", lambda *_: heard)
    taken = await FromPeers().take(context([], OneState(scalars(step=said))))
    assert taken.step == believed


class States:
    """Sources one after the other, as those that are asked; each has another state."""

    def __init__(self, *states: OneState) -> None:
        self._states = states
        self.in_vain = 0

    async def fetch(
        self, ask: Callable[..., Awaitable[StateScalars]], among: View, *, patience_s: float
    ) -> StateScalars:
        for state in self._states:
            try:
                return await ask(state)
            except RemoteProtocolError:
                self.in_vain += 1
        raise NobodyHelped


@pytest.mark.parametrize(
    ("liar", "in_vain"),
    [(OneState(scalars(step=0), value=9.0), 1), (OneState(scalars(step=0), momentum=2.0), 1)],
    ids=["other weights", "a momentum"],
)
async def test_first_weights_are_those_that_the_founder_signed(autojump_clock, liar, in_vain):
    weights = digest_of_weights(np.ones(P, np.float32))
    frozen = FrozenSection(
        config="{}", layout_digest=LAYOUT, parameters=P, padded_parameters=P, weights=weights
    )
    sources = States(liar, OneState(scalars(step=0)))
    place = context([], sources, SPEC.model_copy(update={"frozen": frozen}))
    place.services.work = SimulatedWork()
    assert await FromFounder().take(place) == NOTHING_TRAINED
    assert sources.in_vain == in_vain
    assert (place.slow_P == 1.0).all()
    assert not place.momentum_P.any()


@pytest.mark.slow
@simulated()
async def test_whoever_begins_in_the_first_round_of_fragments_says_nothing_of_any_before(
    tmp_path, monkeypatch
):
    async with open_swarm(1, fragment_spec(3), tmp_path, OPTIONS) as swarm:
        tap = watch(swarm, monkeypatch)
        await start(swarm, "a", "b")
        assert {swarm[name].facts.round for name in "ab"} == {0}
        await swarm.until(lambda: swarm["b"].facts.round == 2)
        for name in "ab":
            outbox = tap.exchanges[name]._outbox
            assert outbox.posted
            assert not outbox.lost


class Restored:
    """A state from a checkpoint, as another beginning would be written."""

    goes_stale = False

    def __init__(self, value: float, first: FirstState) -> None:
        self._value, self._first = value, first

    async def take(self, place: StartContext) -> FirstState:
        await trio.lowlevel.checkpoint()
        place.services.facts.now_doing("restoring the state")
        place.slow_P[:], place.momentum_P[:] = self._value, 0.0
        return self._first


@pytest.mark.slow
@pytest.mark.parametrize("spec", [toy_spec(8), fragment_spec(8)], ids=["noloco", "diloco"])
def test_another_beginning_is_another_class(tmp_path, monkeypatch, spec):
    H = spec.sync.inner_steps
    restored = Restored(0.25, FirstState(round=4, step=5 * H, epoch=0, position=70))
    found = SimulatedProvision.found

    async def found_again(
        self: SimulatedProvision, spec: RunSpec, expert: int | None
    ) -> tuple[RunSpec, Supplies]:
        frozen, supplies = await found(self, spec, expert)
        return frozen, replace(supplies, beginning=restored)

    monkeypatch.setattr(SimulatedProvision, "found", found_again)

    @simulated()
    async def run() -> None:
        async with open_swarm(1, spec, tmp_path) as swarm:
            await start(swarm, "a", "b")
            (received,) = swarm["b"].events(EventName.STATE_RECEIVED)
            assert received["round"] >= 4
            await swarm.finished()
            opened = swarm["a"].events(EventName.ROUND_OPENED)
            assert (opened[0]["round"], opened[0]["step"]) == (5, 5 * H)
            for name in ("a", "b"):
                assert not swarm[name].failure
                assert swarm[name].facts.averaged
            assert spec.sync.diloco or "averaged" in outcomes(swarm["a"])

    run()
