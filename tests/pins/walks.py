"""How far a thing walks through the code: a vector from its snapshot to its merge, and the like.

A quiet swarm is traced, all peers of it, while the thing is on its way; and the same swarm once
more, for the same time, while nothing is. What the first has called more often is the walk. Of a
pipeline the daemons alone are traced: its trainers are the pretended ones of stage_worlds.py.
"""

import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final
from unittest import mock

import trio
from pinned_worlds import SMALL, WIDE, begin, in_virtual_time
from stage_worlds import PretendedTrainer, StageWorld
from swarm_worlds import toy_spec
from traces import Trace

from protocol.run.run_spec import RunSpec
from protocol.wire.stage_messages import Direction
from simulation.swarm import SwarmOptions, open_swarm


class Ends:
    """Traces from a call of one function to the last of so many calls of another, both with it.

    Attributes:
        awaited: whether the next call of the first one begins.
        over: set when the last call has ended.
    """

    def __init__(self, trace: Trace, last_calls: int = 1) -> None:
        self._trace = trace
        self._last_calls = last_calls
        self._begun = False
        self.awaited = False
        self.over = trio.Event()

    def first(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The first function."""

        def called(*arguments: Any, **named: Any) -> Any:
            if self.awaited:
                self.awaited, self._begun = False, True
                self._trace.begin()
            return function(*arguments, **named)

        return called

    def last(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The other function."""

        def called(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            self._last_calls -= self._begun
            if not self._last_calls and not self.over.is_set():
                self._trace.end()
                self.over.set()
            return result

        return called


# --- what walks -----------------------------------------------------------------------------------
World = Callable[[Trace | None], Awaitable[Trace]]
"""Traces itself: on the way of what walks; or, while nothing does, as long as that was traced."""
STEPS: Final = 40
IDLE_STEPS: Final = 400
"""Rounds so long that nothing is sent meanwhile."""
STEADY_S: Final = 8.0
"""Two peers have averaged once by then, and not yet twice."""


def _averaging(
    spec_of: Callable[[int], RunSpec], options: SwarmOptions, send: str, merge: str
) -> World:
    """From a send to the merges of both of two peers; the trainer's functions for them."""

    async def world(busy: Trace | None) -> Trace:
        trace = Trace()
        ends = Ends(trace, last_calls=2)
        with tempfile.TemporaryDirectory() as folder:
            spec = spec_of(IDLE_STEPS if busy else STEPS)
            async with open_swarm(0, spec, Path(folder), options) as swarm:
                with _wrapped({send: ends.first, merge: ends.last}):
                    await begin(swarm, "ab")
                    await trio.sleep_until(STEADY_S)
                    await _trace(trace, busy, ends)
        return trace

    return world


async def _trace(trace: Trace, busy: Trace | None, ends: Ends) -> None:
    if busy:
        await trace.during(busy)
    else:
        ends.awaited = True
        await ends.over.wait()


@contextmanager
def _wrapped(wrappers: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Functions by their full names, each in a wrapper."""
    with ExitStack() as stack:
        for name, wrapper in wrappers.items():
            function = resolve_name(name)
            stack.enter_context(mock.patch(name, wrapper(function)))
        yield


async def _joining(busy: Trace | None) -> Trace:
    """A chunk of the state: from a joiner's request to the digest that it is verified by."""
    trace = Trace()
    ends = Ends(trace)
    wrapped = {
        "peer.content.fetching.ContentClient.request": ends.first,
        "peer.content.fetching.digest_of": ends.last,
    }
    with tempfile.TemporaryDirectory() as folder:
        async with open_swarm(0, toy_spec(10, IDLE_STEPS), Path(folder), SMALL) as swarm:
            await begin(swarm, "a")
            if not busy:
                swarm.join("b")
            with _wrapped(wrapped):
                await _trace(trace, busy, ends)
    return trace


class _OnItsWay(PretendedTrainer):
    """Waits to be told before it begins the second of its iterations."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.waits = trio.Event()
        self.may_begin = trio.Event()
        self.back = trio.Event()
        self.trace = Trace()

    async def _produce(self, direction: Any, number: Any, boundary: Any, loss: Any) -> None:
        if (self.stage, direction, number) == (0, Direction.FORWARD, SECOND):
            self.waits.set()
            await self.may_begin.wait()
            self.trace.begin()
        await super()._produce(direction, number, boundary, loss)

    async def _come_back(self, command: Any, away: Any) -> None:
        is_gradient = (command.direction, command.number) == (Direction.BACKWARD, SECOND)
        await super()._come_back(command, away)
        if is_gradient:
            self.trace.end()
            self.back.set()


SECOND: Final = 100
"""The only microbatch of a data peer's second iteration."""


async def _microbatch(busy: Trace | None) -> Trace:
    """A microbatch over a relay: from the boundary that leaves the data peer to its gradient."""
    world = StageWorld((1, 1), 2, 1, link_of=lambda *_: WIDE, trainer_of=lambda *_: _OnItsWay)
    async with world.running():
        trainer = world.of_stage(0)[0].trainer
        await trainer.waits.wait()
        if busy:
            await trainer.trace.during(busy)
        else:
            trainer.may_begin.set()
            await trainer.back.wait()
    return trainer.trace


TWO_CHUNKS: Final = SwarmOptions(link=WIDE, padded_parameters=16384)
PAIR_SPEC: Final = partial(toy_spec, 10, validate_every=1000)
FRAGMENT_SPEC: Final = partial(
    toy_spec, 10, validate_every=1000, method="diloco", diloco={"fragments": "whole"}
)
SNAPSHOTS: Final = "peer.training.fragments.FragmentDeltas"
DELTAS: Final = "peer.training.fragments.FragmentSnapshots"

WORLDS: Final[dict[str, World]] = {
    "a vector in pairs": _averaging(PAIR_SPEC, SMALL, f"{SNAPSHOTS}.send", f"{SNAPSHOTS}.merge"),
    "a fragment": _averaging(FRAGMENT_SPEC, TWO_CHUNKS, f"{DELTAS}.send", f"{DELTAS}.merge"),
    "a microbatch": _microbatch,
    "a chunk of the state": _joining,
}


def traced(name: str) -> Trace:
    """What walks, traced: on its second walk, so what is called once in a process is left out."""
    world = WORLDS[name]
    try:
        _, busy = (in_virtual_time(0, lambda: world(None)) for _ in range(2))
        return busy.without(in_virtual_time(0, lambda: world(busy)))
    finally:
        sys.setprofile(None)
