"""A stage that all its peers have left begins with what its neighbours know."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import trio

from peer.content.fetching import ExpectedState
from peer.content.state_file import StateManifest, StateMemory
from peer.daemon.beginning import FirstState, Fresh, StartContext, cannot_tell
from peer.daemon.provision import Rebuilt
from peer.facts import Facts, HeldPart, PartShape
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from protocol.content.manifest import digest_of
from protocol.membership.group import Group
from protocol.membership.view import Progress, Roster, View
from protocol.run.amendments import AmendedSpec
from protocol.run.layout import Layout, part_of_stage, stage_layouts
from protocol.run.run_spec import RunSpec
from protocol.schedule.data_plan import DataPlan
from protocol.wire.content_messages import StateScalars

STAGES = 3
LOST = 1
RUN_ID = "ab" * 16
SPEC = RunSpec()
WHOLE = Layout.from_shapes(
    {"model.norm.weight": (4,)} | {f"model.layers.{n}.w": (4,) for n in range(STAGES)}
)
LAYOUTS = stage_layouts(WHOLE, STAGES)
FIRST = 9.0


class Neighbours:
    """Sources that give each stage's number, with a gradient as long as that."""

    remote_peer_id = "neighbour"

    async def fetch(self, ask: Any, among: View) -> Any:
        return await ask(self)

    async def description(self, expected: ExpectedState, size: int) -> StateManifest:
        await trio.lowlevel.checkpoint()
        (stage,) = (s for s in range(STAGES) if digest(s) == expected.group)
        layout, of_stage = LAYOUTS[stage].digest, np.full(size, stage, np.float32)
        state = StateScalars(expected.group, 7, 150, layout, 0, 0, 0, float(stage))
        self._chunks = list(StateMemory(of_stage, np.zeros(size, np.float32), state).chunks())
        digests = [digest_of(chunk) for chunk in self._chunks]
        return StateManifest(tuple(digests), state)

    async def request(self, content: str, parts: Any) -> None:
        await trio.lowlevel.checkpoint()

    async def part(self, index: int, max_bytes: int, moved: Any) -> bytes:
        return self._chunks[index]

    talk = SimpleNamespace(bytes_received=0, remote_peer_id=remote_peer_id)


def digest(stage: int) -> str:
    return Group(RUN_ID, part_of_stage(stage)).digest


async def begun(roster: Roster) -> tuple[Any, FirstState, dict[str, Any]]:
    """The weights that a lost stage begins with, where it stands, and what is told of it."""
    lines: list[bytes] = []
    group, shape = Group(RUN_ID, part_of_stage(LOST)), LAYOUTS[LOST]
    slow_P, momentum_P = np.zeros((2, shape.padded_parameters), np.float32)
    sources: Any = Neighbours()
    log = EventLog(lines.append, peer="me", wall_time_s=trio.current_time, stream=None)
    services: Any = SimpleNamespace(facts=Facts("me", 1), events=log, roster=roster)

    async def initialise(slow_P: Any) -> None:
        slow_P[:] = FIRST

    context = StartContext(
        AmendedSpec(SPEC),
        HeldPart(
            group,
            PartShape(shape.digest, shape.padded_parameters),
            "int8",
            View(roster, group.digest),
        ),
        DataPlan(1, 100),
        slow_P,
        momentum_P,
        services=services,
        sources=sources,
        look_around=trio.sleep_forever,
        meet=trio.sleep_forever,
        measure=cannot_tell,
    )
    first = await Rebuilt(LOST, Fresh(initialise), LAYOUTS).take(context)
    assert not momentum_P.any()
    (line,) = lines
    told = json.loads(line)
    assert told["event"] == EventName.STAGE_REBUILT
    return slow_P[:4], first, told


def roster_of(*stages: int, step: int = 150) -> Roster:
    roster = Roster(5.0)
    for stage in stages:
        progress = Progress("training", step=step, group=digest(stage), epoch=1, position=40)
        roster.heard(trio.current_time(), f"holder{stage}", 1, progress=progress)
    return roster


async def test_it_begins_between_its_neighbours_where_they_stand(autojump_clock):
    slow, first, told = await begun(roster_of(0, 2))
    assert set(slow) == {2.0}  # stage 0 has learnt nothing, by the length of its gradient
    assert first == FirstState(150 // SPEC.sync.round_steps - 1, 150, 1, 40)
    assert told["remotes"] == ["neighbour", "neighbour"]
    assert told["untrained"] == []


async def test_one_neighbour_is_copied(autojump_clock):
    slow, _, told = await begun(roster_of(2))
    assert set(slow) == {2.0}
    assert told["remotes"] == ["neighbour"]


async def test_without_neighbours_it_begins_as_the_model_did_and_says_so(autojump_clock):
    slow, first, told = await begun(roster_of())
    assert set(slow) == {FIRST}
    assert first == FirstState(-1, 0, 0, 0)
    assert (told["remotes"], told["untrained"]) == ([], ["model.layers.1.w"])
