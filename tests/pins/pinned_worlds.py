"""Small swarms of every way, from a seed, and all that happened in them.

Their logs shall change with what peers do, and with nothing else. So:
- Tasks run in a fixed order, not one that the seed shuffles: a task more or less moves no other.
- The run id is given: a run spec that gains or loses a key draws no other partners.
- Lines carry whatever there is at once, where a world does not say otherwise: bytes more or less in
  a message move no time. Latencies and their jitter come from the seed.
"""

import functools
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import mock

import blake3
import trio
from stage_worlds import PretendedTrainer, StagePeer, StageWorld
from streaming_worlds import OPTIONS, fragment_spec, spoil
from swarm_worlds import start, toy_spec
from trio._core import _run as scheduler

from peer.observe.event_names import EventName
from protocol.run.run_spec import RunSpec
from simulation.machine import Machine
from simulation.network import LinkModel, SimulatedInternet
from simulation.swarm import (
    DEFAULT_MACHINE,
    LoggedEvent,
    SimulatedPeer,
    SimulatedSwarm,
    SwarmOptions,
    open_swarm,
)
from simulation.virtual_time import run_in_virtual_time

RUN_ID: Final = "ab" * 16
LIMIT_S: Final = 3600.0
WIDE: Final = LinkModel(latency_s=0.02, jitter_s=0.005, bandwidth_bytes_per_s=1e30)
THIN: Final = LinkModel(latency_s=0.02, jitter_s=0.005, bandwidth_bytes_per_s=1e6)
KEEPS: Final = Machine(checkpoint_every_s=2.0)
STATE_PARAMETERS: Final = 1 << 19
HERE: Final = "HOMES"


@dataclass(frozen=True, slots=True)
class Happened:
    """What one world came to.

    Attributes:
        events: of all peers, by time and then by peer; those of one peer at one time in the order
            in which it logged them.
        numbers: digest of what the trainers have made: all slow weights, or all gradients.
    """

    events: Sequence[LoggedEvent]
    numbers: str


World = Callable[[int, Path], Happened]
T = TypeVar("T")


class _InOrder(random.Random):
    """For trio's scheduler: leaves tasks in the order in which they were begun."""

    def shuffle(self, x: Any) -> None:
        pass


@contextmanager
def _fixed() -> Iterator[None]:
    """The order of tasks, and the run id."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(scheduler, "_r", _InOrder()))
        for module in ("run_spec", "signed_spec"):
            name = f"protocol.run.{module}.run_id_of"
            stack.enter_context(mock.patch(name, return_value=RUN_ID))
        yield


def in_virtual_time(seed: int, body: Callable[[], Awaitable[T]]) -> T:
    """Run a world; see the top of the file."""
    with _fixed():
        return run_in_virtual_time(seed, body, limit_s=LIMIT_S)


# --- whole peers ----------------------------------------------------------------------------------
Script = Callable[[SimulatedSwarm], Awaitable[None]]


def _swarm_world(spec: RunSpec, options: SwarmOptions, script: Script) -> World:
    def run(seed: int, folder: Path) -> Happened:
        async def body() -> Happened:
            async with open_swarm(seed, spec, folder, options) as swarm:
                await script(swarm)
                log = swarm.event_log().replace(str(folder).encode(), HERE.encode())
                events = [json.loads(line) for line in log.splitlines()]
                events += [_end_of(peer) for peer in swarm.peers.values()]
                numbers = blake3.blake3()
                for _, peer in sorted(swarm.peers.items()):
                    numbers.update(peer.slow_weights().tobytes())
                return Happened(_sorted(events), numbers.hexdigest(length=8))

        return in_virtual_time(seed, body)

    return run


def _end_of(peer: SimulatedPeer) -> LoggedEvent:
    """What no event tells, in the place of one."""
    facts = peer.facts
    return {
        "monotonic_s": round(trio.current_time(), 6),
        "peer": peer.peer_id,
        "event": "End",
        "state": str(facts.state),
        "step": facts.step,
        "averaged": facts.averaged,
        "skipped": {str(reason): times for reason, times in facts.skipped.items()},
        "diverged": facts.diverged,
        "healed": facts.healed,
        "failure": None if peer.failure is None else str(peer.failure),
    }


def _sorted(events: Iterable[LoggedEvent]) -> list[LoggedEvent]:
    return sorted(events, key=lambda event: (event["monotonic_s"], event["peer"]))


async def begin(swarm: SimulatedSwarm, names: str, machine: Machine = DEFAULT_MACHINE) -> None:
    await start(swarm, *names, machine_of=dict.fromkeys(names, machine))


def _one_dies(names: str) -> Script:
    """So many train; one is killed in its second round, and the others end the run."""

    async def script(swarm: SimulatedSwarm) -> None:
        await begin(swarm, names)
        await swarm.until(lambda: swarm["b"].facts.round >= 1)
        swarm.kill("b")
        await swarm.finished(*names.replace("b", ""))

    return script


async def _one_is_spoiled(swarm: SimulatedSwarm) -> None:
    """A bit flips in one outer copy of three: it is noticed, and mended."""
    await begin(swarm, "abc")
    await swarm.until(lambda: swarm["c"].facts.round >= 3)
    spoil(swarm["c"])
    await swarm.finished()


PARTS: Final = {"stage/0": 3 * 16384, "stage/1": 2 * 16384}


async def _two_groups(swarm: SimulatedSwarm) -> None:
    """Two hold one part of the model and two the other."""
    names = ("a0", "a1", "b0", "b1")
    machines = {name: Machine(part=f"stage/{name[1]}", begins_group=name == "a1") for name in names}
    await start(swarm, *machines, machine_of=machines)
    await swarm.finished()


def _one_joins(dies: str | None = None) -> Script:
    """Two train; a third takes a state of several chunks over thin lines; its source may die.

    Its own lines are as thin as all others as soon as it knows the run.
    """

    async def script(swarm: SimulatedSwarm) -> None:
        await begin(swarm, "ab")
        await swarm.until(lambda: all(swarm[name].facts.round >= 1 for name in "ab"))
        joiner = swarm.join("c")
        await joiner.known.wait()
        everybody = [peer.peer_id for peer in swarm.peers.values()]
        for one, other in itertools.permutations(everybody, 2):
            swarm.internet.link(one, other).model = THIN
        if dies is not None:
            await trio.sleep(2.5)
            swarm.kill(dies)
        await swarm.until(joiner.ready.is_set)
        averaged = joiner.facts.averaged
        await swarm.until(lambda: joiner.facts.averaged >= averaged + 3)

    return script


async def _all_come_back(swarm: SimulatedSwarm) -> None:
    """All are killed when each has a checkpoint; all come back, and end the run."""
    await begin(swarm, "abc", KEEPS)
    await swarm.until(lambda: all(map(_has_checkpoint, swarm.peers.values())))
    for name, peer in swarm.peers.items():
        swarm.kill(name)
        await peer.ended.wait()
    for name in "abc":
        swarm.resume(name)
    await swarm.finished()


def _has_checkpoint(peer: SimulatedPeer) -> bool:
    return bool(peer.events(EventName.CHECKPOINT_WRITTEN))


# --- a pipeline -----------------------------------------------------------------------------------
class _LoggedTrainer(PretendedTrainer):
    """Logs what a stage does with each microbatch."""

    log: Callable[..., None]

    async def _pass(self, direction: Any, number: Any, slot: Any, loss: Any) -> Any:
        self.log("passes", leg=direction, microbatch=number, loss=loss)
        return await super()._pass(direction, number, slot, loss)

    async def _come_back(self, command: Any, away: Any) -> None:
        direction, number = command.direction, command.number
        self.log("came_back", leg=direction, microbatch=number, counts=number in away)
        await super()._come_back(command, away)


class _LoggedPipeline(StageWorld):
    def __init__(self, seed: int, sizes: tuple[int, ...], iterations: int) -> None:
        super().__init__(
            sizes,
            iterations,
            link_of=lambda one, other: WIDE,
            trainer_of=lambda stage, i: _LoggedTrainer,
        )
        self.internet = SimulatedInternet(seed, link_of=self.link)
        self.lines: list[LoggedEvent] = []

    async def _add(self, stack: Any, stage: int, i: int) -> None:
        await super()._add(stack, stage, i)
        peer: Any = self.peers[-1]
        peer.emit = peer.trainer.log = functools.partial(self._log, peer)

    def _log(self, peer: StagePeer, name: str, /, **fields: Any) -> None:
        stamp = {"monotonic_s": round(trio.current_time(), 6), "peer": peer.peer_id}
        self.lines.append({**stamp, "event": str(name), **fields})

    def happened(self) -> Happened:
        """Logs, counts of microbatches, and what the gradients say that came back."""
        numbers = [
            [
                peer.stage,
                sorted((str(key), value) for key, value in peer.facts.microbatches.items()),
                [sorted(values) for values in peer.trainer.came_back],
                peer.trainer.dropped,
                peer.trainer.steps,
                peer.trainer.most_held,
            ]
            for peer in self.peers
        ]
        digest = blake3.blake3(json.dumps(numbers).encode()).hexdigest(length=8)
        return Happened(_sorted(self.lines), digest)


def _pipeline(*, dies: bool) -> World:
    """Two data peers and two relays for each of two stages; one relay may die with work in hand."""

    def run(seed: int, folder: Path) -> Happened:
        async def body() -> Happened:
            world = _LoggedPipeline(seed, (2, 2, 2), iterations=3)
            async with world.running():
                if dies:
                    relay = world.of_stage(1)[0]
                    while len(relay.trainer.steps) < 1 or not relay.trainer.held:
                        await trio.sleep(0.01)
                    world.kill(relay)
                await world.wait_done()
                return world.happened()

        return in_virtual_time(seed, body)

    return run


# --- all of them ----------------------------------------------------------------------------------
SMALL: Final = SwarmOptions(link=WIDE)
FRAGMENTS: Final = SwarmOptions(link=WIDE, padded_parameters=OPTIONS.padded_parameters)
LAYERS: Final = SwarmOptions(link=WIDE, padded_parameters=7 * 128)
IN_PARTS: Final = SwarmOptions(link=WIDE, parts=PARTS)
LARGE: Final = SwarmOptions(link=WIDE, padded_parameters=STATE_PARAMETERS)

PAIRS: Final = toy_spec(3, 10)
WHOLE: Final = fragment_spec(3, fragments="whole")
STREAMING_DILOCO: Final = fragment_spec(3)
STREAMING_GOSSIP: Final = toy_spec(3, 12, method="streaming")

WORLDS: Final[dict[str, tuple[int, World]]] = {
    "pairs": (10, _swarm_world(PAIRS, SMALL, _one_dies("abcd"))),
    "diloco": (5, _swarm_world(WHOLE, FRAGMENTS, _one_dies("abc"))),
    "streaming-diloco": (5, _swarm_world(STREAMING_DILOCO, FRAGMENTS, _one_dies("abc"))),
    "streaming-diloco-spoiled": (2, _swarm_world(fragment_spec(6), FRAGMENTS, _one_is_spoiled)),
    "streaming-gossip": (10, _swarm_world(STREAMING_GOSSIP, LAYERS, _one_dies("abcd"))),
    "stages-in-pairs": (6, _swarm_world(PAIRS, IN_PARTS, _two_groups)),
    "stages-diloco": (3, _swarm_world(STREAMING_DILOCO, IN_PARTS, _two_groups)),
    "microbatches": (10, _pipeline(dies=False)),
    "microbatches-one-dies": (10, _pipeline(dies=True)),
    "joining-pairs": (3, _swarm_world(toy_spec(40, 10), LARGE, _one_joins(dies="b"))),
    "joining-diloco": (2, _swarm_world(fragment_spec(40), LARGE, _one_joins())),
    "returning-pairs": (6, _swarm_world(toy_spec(6, 10), SMALL, _all_come_back)),
    "returning-diloco": (2, _swarm_world(fragment_spec(4), FRAGMENTS, _all_come_back)),
    "returning-streaming-gossip": (
        6,
        _swarm_world(toy_spec(6, 12, method="streaming"), LAYERS, _all_come_back),
    ),
}
"""Worlds by name, and of how many seeds from 0 each is pinned: of more, where that is cheap."""
