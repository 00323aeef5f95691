"""The live view: a table and a progress bar in a terminal, plain lines elsewhere."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TextIO

import trio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from peer.facts import PeerState
from protocol.names import short_id

from .reading import Reading

PLAIN_EVERY_S: Final = 5.0
COLUMNS: Final = (
    "peer",
    "state",
    "round",
    "step",
    "tokens/s",
    "train loss",
    "validation loss",
    "partner",
    "bytes",
)
_KILO: Final = 1000


@dataclass(frozen=True, slots=True)
class Scene:
    """The scene that a view shows.

    Attributes:
        title: of this part of the demo.
        readings: our peers.
        total_steps: of the run.
        names: of our peers, by peer id.
        complete: all our peers are among them, so that whoever else is seen is a guest.
        hint: a line for people.
    """

    title: str
    readings: Sequence[Reading]
    total_steps: int
    names: dict[str, str]
    complete: bool = True
    hint: str = ""

    @property
    def step(self) -> int:
        """The step of the slowest of our peers that has begun."""
        told = [r.status.step for r in self.readings if r.status]
        steps = [step for step in told if step is not None]
        return min(min(steps, default=0), self.total_steps)


class View(Protocol):
    """Shows scenes and says sentences."""

    def show(self, scene: Scene) -> None: ...
    def say(self, sentence: str) -> None: ...


class LiveView:
    """The view for a terminal."""

    def __init__(self, live: Live, progress: Progress) -> None:
        self._live = live
        self._progress = progress
        self._title = ""

    def show(self, scene: Scene) -> None:
        """Replace what is shown."""
        if scene.title != self._title:
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            self._progress.add_task(scene.title, total=scene.total_steps)
            self._title = scene.title
        self._progress.update(self._progress.task_ids[0], completed=scene.step)
        parts: list[RenderableType] = [table(scene), self._progress]
        self._live.update(Group(*parts, scene.hint), refresh=True)

    def say(self, sentence: str) -> None:
        """Print above the table."""
        self._live.console.print(sentence, markup=False, highlight=False, soft_wrap=True)


class PlainView:
    """The view for a file or a pipe: one line now and then."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._title = ""
        self._next_s = 0.0

    def show(self, scene: Scene) -> None:
        """Print a line if the last one is old enough."""
        if scene.title != self._title:
            self._title, self._next_s = scene.title, 0.0
            if scene.hint:
                self.say(scene.hint)
        if trio.current_time() >= self._next_s:
            self._next_s = trio.current_time() + PLAIN_EVERY_S
            self.say(plain_line(scene))

    def say(self, sentence: str) -> None:
        """Print a line."""
        print(sentence, file=self._file, flush=True)


@contextmanager
def open_view(file: TextIO) -> Iterator[View]:
    """The view that suits `file`."""
    if not file.isatty():
        yield PlainView(file)
        return
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    )
    with Live(console=Console(file=file), auto_refresh=False) as live:
        yield LiveView(live, progress)


def table(scene: Scene) -> Table:
    """One row for each of our peers, and for each guest that joined them."""
    made = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for position, column in enumerate(COLUMNS):
        left = position < 2 or column == "partner"
        made.add_column(column, justify="left" if left else "right", no_wrap=True)
    for reading in scene.readings:
        made.add_row(*row(reading, scene.names))
    for guest in guest_rows(scene):
        made.add_row(*guest, style="italic")
    return made


def row(reading: Reading, names: dict[str, str]) -> list[str]:
    """The cells of one of our peers."""
    status = reading.status
    if status is None:
        return [reading.name, "starting", *["-"] * (len(COLUMNS) - 2)]
    return [
        reading.name,
        str(status.state),
        _number(status.round),
        _number(status.step),
        _number(reading.tokens_per_s),
        _loss(status.train_loss),
        _loss(status.validation_loss),
        "-" if reading.partner is None else named(reading.partner, names),
        human_bytes(reading.carried.total_bytes),
    ]


def guest_rows(scene: Scene) -> list[list[str]]:
    """The cells of peers that are not ours, as ours see them."""
    seen = {
        peer.peer_id: peer
        for reading in scene.readings
        if reading.status
        for peer in reading.status.peers
        if scene.complete and peer.peer_id not in scene.names
    }
    blank = [""] * (len(COLUMNS) - 3)
    return [
        [f"guest {short_id(peer_id)}", str(peer.state), _number(peer.round), *blank]
        for peer_id, peer in sorted(seen.items())
    ]


def plain_line(scene: Scene) -> str:
    """The scene in one line."""
    known = [r.status for r in scene.readings if r.status]
    training = sum(s.state is PeerState.TRAINING for s in known)
    train = _mean([s.train_loss for s in known if s.train_loss is not None])
    validation = _mean([s.validation_loss for s in known if s.validation_loss is not None])
    speed = sum(r.tokens_per_s or 0.0 for r in scene.readings)
    sent = human_bytes(sum(r.carried.total_bytes for r in scene.readings))
    guests = len(guest_rows(scene))
    return (
        f"{scene.title}: step {scene.step}/{scene.total_steps}  training {training}  "
        f"{_number(speed)} tokens/s  train loss {_loss(train)}  "
        f"validation loss {_loss(validation)}  sent {sent}" + (f"  guests {guests}" * bool(guests))
    )


def named(peer_id: str, names: dict[str, str]) -> str:
    """The name of one of our peers; a guest's short id."""
    return names.get(peer_id, short_id(peer_id))


def human_bytes(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < _KILO:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _KILO
    return f"{count:.2f} GB"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
