"""Curves of this peer in other programs (`--track`).

Their libraries block, ask the network and end processes as they like, so each has a process of its
own (sink.py), which is given a point when it has taken the one before. One that fails or hangs is
ended, and begun again ever more seldom; points wait meanwhile, and the oldest give way. Nobody
waits for any of it, and whatever goes wrong ends here.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from peer.runtime.child_process import STOP_GRACE_S, ChildProcess
from protocol.names import short_id

from .events import MAX_ERROR_CHARS
from .history import MOST_POINTS
from .metrics import Now
from .notify import MAX_PAUSE_S
from .sink import FROM_SINK, HANG_S, Curve, Point, SinkMessage

POINT_EVERY_S: Final = 10.0
PROGRAM: Final = "peer.observe.sink"


# --- what is told ---------------------------------------------------------------------------------


def curve_of(now: Now, sink: str, folder: Path) -> Curve:
    """The curve of a peer that knows its run; its config is what all peers of the run know."""
    facts = now.facts
    assert facts.spec is not None
    assert facts.run_id is not None
    spec, run = facts.spec.founding, facts.run_id[:8]
    project = f"{spec.name}-{run}"
    told = spec.model_dump(mode="json", exclude={"admission"})  # who may join is for peers alone
    return Curve(
        sink=sink,
        project=project,
        run=spec.name,
        name=short_id(facts.peer_id),
        key=f"{run}-{facts.peer_id}",
        config={**told, "run_id": facts.run_id, "peer_id": facts.peer_id},
        folder=str(folder / project),
    )


def point_of(now: Now, time_s: float) -> Point | None:
    """Where a peer is at that Unix time; None before it has trained.

    What is not known, or no number, is left out.
    """
    if not now.facts.inner_steps:
        return None
    values = {name: float(each) for name, each in _values(now) if each is not None}
    finite = {name: each for name, each in values.items() if math.isfinite(each)}
    return Point(now.facts.step, time_s, finite)


def _values(now: Now) -> Iterator[tuple[str, float | None]]:
    facts, status, carried = now.facts, now.status, now.carried
    yield "loss/train", status.train_loss
    yield "loss/validation", status.validation_loss
    yield "run/round", status.round
    yield "run/learning_rate", status.learning_rate
    yield "run/tokens", status.tokens
    yield "run/tokens_per_second", status.tokens_per_s
    yield "run/swarm_tokens_per_second", status.swarm_tokens_per_s
    yield "run/peers", len(status.peers)
    yield "rounds/inner_steps", facts.inner_steps_per_average
    yield "rounds/seconds", facts.own_round_s or None
    yield "rounds/averaged", status.outcomes.averaged
    yield "rounds/skipped", sum(status.outcomes.skipped.values())
    yield "rounds/averaged_share", status.outcomes.recent_share
    yield "line/sent_bytes", sum(carried.sent_bytes.values())
    yield "line/received_bytes", sum(carried.received_bytes.values())
    if status.price_per_hour is not None and status.up_s is not None:
        yield "cost/so_far", status.price_per_hour * status.up_s / 3600


# --- how it is told -------------------------------------------------------------------------------


class SinkFailed(Exception):
    """The library has raised something; the message says what."""


class _SinkProcess(ChildProcess):
    title = "its process"
    decoder = FROM_SINK

    async def tell(self, message: SinkMessage) -> None:
        """Raises SinkFailed, ChildDied: it was not taken, and nothing will be."""
        with trio.move_on_after(HANG_S) as scope:
            await self.send(message)
            done = await self.receive()
        if scope.cancelled_caught:
            self.kill(f"did not answer for {HANG_S:g} s")
            raise await self.death()
        if done.failure:
            raise SinkFailed(done.failure)

    async def finish(self) -> None:
        """Let the library end its work while the daemon ends its own, and a moment longer."""
        try:
            with suppress(OSError):
                self._stream.socket.shutdown(trio.socket.SHUT_WR)
            try:
                await self.process.wait()
            except trio.Cancelled:
                with trio.move_on_after(STOP_GRACE_S, shield=True):
                    await self.process.wait()
                raise
        finally:
            await self.aclose()


class Tracking:
    """Gives one sink the points of this peer.

    Args:
        curve: what they belong to; asked when there is one.
        look: the point at which this peer is now, or None.
        failed: is told once why the sink takes none.
        stop: this peer ends, and tells its last point.
    """

    def __init__(
        self,
        curve: Callable[[], Curve],
        look: Callable[[], Point | None],
        failed: Callable[[str], None],
        stop: trio.Event,
    ) -> None:
        self._curve = curve
        self._look = look
        self._failed = failed
        self._stop = stop
        self._waiting = deque[Point](maxlen=MOST_POINTS)
        self._last_step = -1

    async def run(self) -> None:
        """Send points until `stop`, or until cancelled."""
        pause_s, has_failed = POINT_EVERY_S, False
        while not self._stop.is_set():
            try:
                await self._gather(pause_s)
                if not self._stop.is_set():
                    await self._tell()
            except Exception as error:  # noqa: BLE001 - a library that fails must not end the peer
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                if not has_failed:
                    self._failed(" ".join(str(error).split())[:MAX_ERROR_CHARS])
                has_failed = True

    async def _tell(self) -> None:
        """Send all points from now until `stop`, through one child."""
        child = await _SinkProcess.run(PROGRAM, environment=_environment())
        try:
            await child.tell(self._curve())
            while True:
                while self._waiting:
                    await child.tell(self._waiting[0])
                    self._waiting.popleft()
                if self._stop.is_set():
                    return
                await self._gather(POINT_EVERY_S)
        except Exception:
            child.kill()  # it may hang now
            raise
        finally:
            await child.finish()

    async def _gather(self, seconds: float) -> None:
        """Note points for this long, and until there is one."""
        end_s = trio.current_time() + seconds
        while not self._stop.is_set() and (trio.current_time() < end_s or not self._waiting):
            with trio.move_on_after(POINT_EVERY_S):
                await self._stop.wait()
            point = self._look()
            if point is not None and point.step > self._last_step:
                self._last_step = point.step
                self._waiting.append(point)


def _environment() -> dict[str, str]:
    """Our environment without what is meant for the daemon, secrets among it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LOCO_")}
