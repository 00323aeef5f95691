"""What one peer says of itself: its event log, its status and its metrics, read from outside."""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import trio
from prometheus_client.parser import text_string_to_metric_families

from peer.observe.control import ControlFailed, NoDaemon, ask
from peer.observe.event_names import EventName
from peer.observe.status import Status
from peer.state.home import Home
from protocol.wire.versions import FRAGMENT, GOSSIP

SPEED_ROUNDS: Final = 5
"""Rounds over which tokens per second are averaged."""
ASK_TIMEOUT_S: Final = 10.0
MAX_PAGE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Point:
    """A loss (nats per token) at a nominal step, the end of a round."""

    step: float
    loss: float


class EventFollower:
    """Reads an event log while it grows.

    Attributes:
        parameters: of the model; None until the trainer has started.
        partner: whom the peer averaged with last.
        training, validation: losses in the order in which they were told.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._ends: dict[int, float] = {}
        self._speeds: deque[tuple[int, float]] = deque(maxlen=SPEED_ROUNDS)
        self.parameters: int | None = None
        self.partner: str | None = None
        self.training: list[Point] = []
        self.validation: list[Point] = []

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second over the last rounds; None before the first."""
        seconds = sum(s for _, s in self._speeds)
        return sum(n for n, _ in self._speeds) / seconds if seconds > 0 else None

    def read(self) -> None:
        """Take in what was written since the last call; a line in the making waits."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                lines = file.read()
        except FileNotFoundError:
            return
        whole = lines[: lines.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case EventName.TRAINER_STARTED:
                self.parameters = event["parameters"]
            case EventName.ROUND_AVERAGED:
                self.partner = event["partner"]
            case EventName.ROUND_CLOSED:
                self._ends[event["round"]] = float(event["step"])
                if event["steps"]:
                    self._speeds.append((event["tokens"], event["seconds"]))
                    self.training.append(Point(event["step"], float(event["loss"])))
            case EventName.VALIDATED:
                step = self._ends.get(event["round"], max(self._ends.values(), default=0.0))
                self.validation.append(Point(step, float(event["loss"])))


@dataclass(frozen=True, slots=True)
class Carried:
    """Bytes that a peer has written to its streams: to average, and for everything."""

    averaging_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """One peer, now.

    Attributes:
        status: None while its daemon cannot be asked.
    """

    name: str
    status: Status | None = None
    tokens_per_s: float | None = None
    partner: str | None = None
    carried: Carried = Carried()


async def read_peer(name: str, home: Home, events: EventFollower) -> Reading:
    """Read everything that a peer says of itself."""
    events.read()
    try:
        status = Status.from_json(await ask(home.control_socket, "status", timeout_s=ASK_TIMEOUT_S))
        carried = await read_carried(status.metrics) if status.metrics else Carried()
    except (NoDaemon, ControlFailed, OSError):
        return Reading(name, None, events.tokens_per_s, events.partner)
    return Reading(name, status, events.tokens_per_s, events.partner, carried)


async def read_carried(url: str) -> Carried:
    """Scrape a metrics endpoint for what the peer has sent.

    Raises:
        OSError: nobody answers there.
    """
    return parse_carried(await _get(url))


def parse_carried(page: str) -> Carried:
    """The sent bytes on a page of metrics."""
    sent = {
        sample.labels["protocol"]: int(sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "loco_wire_bytes_total" and sample.labels["direction"] == "sent"
    }
    return Carried(sent.get(GOSSIP, 0) + sent.get(FRAGMENT, 0), sum(sent.values()))


async def _get(url: str) -> str:
    parts = urlsplit(url)
    request = f"GET {parts.path} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n"
    answer = b""
    with trio.move_on_after(ASK_TIMEOUT_S):
        async with await trio.open_tcp_stream(str(parts.hostname), parts.port or 80) as stream:
            try:
                await stream.send_all(request.encode())
                while (chunk := await stream.receive_some()) and len(answer) < MAX_PAGE_BYTES:
                    answer += chunk
            except trio.BrokenResourceError as error:
                raise ConnectionResetError(f"{url} went away") from error
    return answer.partition(b"\r\n\r\n")[2].decode()
