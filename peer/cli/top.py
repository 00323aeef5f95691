"""`loco-peer top`: the peer of a home in the terminal, in a process of its own.

It asks the daemon over the control socket every few seconds, and shows what it says in six
sections that fit into 80 columns and 24 lines. Nothing can be changed from here, so a key that was
hit by chance does no harm. Curves are made of characters; what a colour says, words say too.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Self

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static, TabbedContent, TabPane

from peer.observe.experts import matrix_lines
from peer.observe.history import SAMPLE_EVERY_S
from peer.observe.status import (
    Status,
    columns_table,
    cost_line,
    loss_text,
    number_text,
    pairs_table,
    pipeline_lines,
    progress_line,
    reach_line,
    rounds_line,
)
from protocol.errors import LocoError
from protocol.names import duration, printable, short_id

COLUMNS: Final = 78
CURVE_LINES: Final = 5
BLOCKS: Final = " " + "".join(map(chr, range(0x2581, 0x2589)))
"""Bars of nothing, one eighth, and so on to the whole character."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The daemon's answer to `snapshot`."""

    status: Status
    history: Mapping[str, Any]
    log: Sequence[str]

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        return cls(Status.from_json(told), told["history"], told["log"])


# --- parts ----------------------------------------------------------------------------------------


def curve(values: Sequence[float | None], width: int, lines: int) -> list[str]:
    """Bars of the last values, from the least one up; highest line first."""
    shown = narrowed(values, width)
    known = [value for value in shown if value is not None]
    least, most = min(known, default=0.0), max(known, default=0.0)
    span = (most - least) or 1.0
    heights = [
        0 if value is None else 1 + round((8 * lines - 1) * (value - least) / span)
        for value in shown
    ]
    return [
        "".join(BLOCKS[min(8, max(0, height - 8 * below))] for height in heights)
        for below in reversed(range(lines))
    ]


def narrowed(values: Sequence[float | None], width: int) -> list[float | None]:
    """Means of neighbours, one for each column, where there are more values than columns."""
    if len(values) <= width:
        return list(values)
    edges = [len(values) * column // width for column in range(width + 1)]
    return [_mean(values[a:b]) for a, b in itertools.pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _curve_of(title: str, values: Sequence[float | None], digits: int) -> RenderableType:
    known = [value for value in values if value is not None]
    if not known:
        return Text(f"{title}: nothing yet")
    said = f"{title}: now {known[-1]:,.{digits}f}"
    said += f", from {min(known):,.{digits}f} to {max(known):,.{digits}f} so far"
    bars = "\n".join(curve(values, COLUMNS, CURVE_LINES))
    return Group(Text(said, style="bold"), Text(bars, style="cyan", no_wrap=True))


def _rows(rows: Sequence[tuple[str, str]]) -> RenderableType:
    return pairs_table((name, printable(value)) for name, value in rows)


def _bar(share: float, width: int) -> str:
    full = round(share * width)
    return f"[{BLOCKS[8] * full}{'.' * (width - full)}]"


def _text(value: Any) -> Text:
    return Text(printable(str(value)))


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.1f} s"


# --- sections -------------------------------------------------------------------------------------


def swarm(seen: Shown) -> RenderableType:
    status, history = seen.status, seen.history
    table = columns_table("peer", "state", "step", "held-out loss")
    own = (f"{short_id(status.peer_id)} (this one)", str(status.state), status.step)
    others = [(short_id(p.peer_id), str(p.state), p.step, p.validation_loss) for p in status.peers]
    for name, state, step, loss in [(*own, status.validation_loss), *others]:
        table.add_row(name, _text(state), number_text(step), loss_text(loss))
    curve_of_all = _curve_of("held-out loss, mean of all", history["peers_loss"], 4)
    if status.matrix is None:
        return Group(curve_of_all, table)
    return Group(curve_of_all, Text("\n".join(map(printable, matrix_lines(status.matrix)))), table)


def this_peer(seen: Shown) -> RenderableType:
    status, history = seen.status, seen.history
    trained, held_out = map(loss_text, (status.train_loss, status.validation_loss))
    facts = [
        ("loss", f"train {trained}  held out {held_out}"),
        ("tokens", number_text(status.tokens)),
        ("up for", duration(status.up_s or 0)),
        ("cost", cost_line(status) or "- (start it with --price-per-hour)"),
        ("codec", status.codec or "-"),
        ("reachable", "-" if status.reach is None else reach_line(status.reach)),
        ("address", status.address or "-"),
        ("page", status.page or "-"),
    ]
    return Group(_curve_of("tokens/s of this peer", history["tokens_per_s"], 0), _rows(facts))


def links(seen: Shown) -> RenderableType:
    status, history = seen.status, seen.history
    table = columns_table("peer", "round trip", "exchange took", "averaged with us")
    most = max((peer.averages for peer in status.peers), default=0) or 1
    for peer in status.peers:
        bar = f"{peer.averages:>6,}  {BLOCKS[8] * round(24 * peer.averages / most)}"
        name, rtt, took = short_id(peer.peer_id), _seconds(peer.rtt_s), _seconds(peer.average_s)
        table.add_row(name, rtt, took, bar)
    rates = [
        [value and 8e-6 * value for value in history[f"{way}_bytes_per_s"]]
        for way in ("sent", "received")
    ]
    return Group(
        _curve_of("sent, Mbit/s", rates[0], 2), _curve_of("received, Mbit/s", rates[1], 2), table
    )


SPENT: Final = {
    "train": "training",
    "encode": "encoding weights",
    "merge": "taking over averages",
    "measure": "measuring losses",
    "keep": "keeping checkpoints",
    "stalled": "standing still for averages",
    "data": "standing still for data",
    "pack": "packing vectors *",
    "match": "finding a partner *",
    "exchange": "exchanging vectors *",
    "apply": "the outer step *",
}


def rounds(seen: Shown) -> RenderableType:
    status = seen.status
    outcomes, up_s = status.outcomes, status.up_s or 1.0
    table = columns_table("outcome", "rounds")
    table.add_row("averaged", number_text(outcomes.averaged))
    for reason, count in outcomes.skipped.items():
        table.add_row(f"skipped: {reason}", number_text(count))
    spent = columns_table("time went into", "", "share of the time since the start")
    for what, seconds in status.seconds.items():
        part = min(1.0, seconds / up_s)
        if seconds:
            bar = f"{part:>4.0%}  {BLOCKS[8] * round(24 * part)}"
            spent.add_row(SPENT.get(what, what), duration(seconds), bar)
    return Group(
        Text(f"round {number_text(status.round)}: {rounds_line(outcomes)}\n"),
        table,
        Text(""),
        spent,
        Text("\n* beside the trainer, which trains on meanwhile; the others add up."),
    )


def stages(seen: Shown) -> RenderableType:
    status = seen.status
    if status.pipeline is None:
        return Text("This peer holds the whole model; a run has stages with --stages.")
    counted = ", ".join(f"{what} {n:,}" for what, n in status.microbatches.items() if n)
    rows = [("holds", status.part or "-"), ("microbatches", counted or "none")]
    return _rows([*rows, *pipeline_lines(status.pipeline)])


def log(seen: Shown) -> RenderableType:
    """The newest line first, as it must be seen without scrolling."""
    return Text("\n".join(map(printable, reversed(seen.log))), overflow="fold")


SECTIONS: Final[Mapping[str, Callable[[Shown], RenderableType]]] = {
    "Swarm": swarm,
    "This peer": this_peer,
    "Links": links,
    "Rounds": rounds,
    "Stages": stages,
    "Log": log,
}


def heading(seen: Shown) -> RenderableType:
    """Stands over every section: who and where in the run, and what is wrong."""
    status = seen.status
    doing = status.doing or ""
    since = "" if status.since_s is None else f" ({duration(status.since_s)})"
    state = f"{status.state}: {doing}{since}" if doing not in ("", status.state) else status.state
    run = (status.run_id or "-")[:8]
    share = min(1.0, (status.step or 0) / (status.total_steps or 1))
    return Group(
        Text(printable(f"{short_id(status.peer_id)} in run {run}  {state}"), style="bold"),
        Text(progress_line(status, losses=False)),
        Text(_bar(share, COLUMNS - 2), style="green"),
        *(Text(printable(f"! {each.line}"), style="bold yellow") for each in status.problems),
    )


# --- the program ----------------------------------------------------------------------------------


class Top(App[None]):
    """Args: read: asks the daemon; raises LocoError."""

    TITLE = "loco-peer top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #heading, #trouble { height: auto; padding: 0 1; }
    #trouble { display: none; text-style: bold reverse; }
    TabbedContent { height: 1fr; }
    TabPane { padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"section('{number}')", name)
            for number, name in enumerate(SECTIONS, 1)
        ),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(
        self, read: Callable[[], Mapping[str, Any]], every_s: float = SAMPLE_EVERY_S
    ) -> None:
        super().__init__()
        self._read = read
        self._every_s = every_s
        self._asks = False

    def compose(self) -> ComposeResult:
        yield Static(id="heading")
        yield Static(id="trouble")
        with TabbedContent(initial="section-1"):
            for number, name in enumerate(SECTIONS, 1):
                with TabPane(name, id=f"section-{number}"), VerticalScroll():
                    yield Static("asking the daemon ...", id=f"body-{number}")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self._look()
        self.set_interval(self._every_s, self._look)

    def action_section(self, number: str) -> None:
        self.query_one(TabbedContent).active = f"section-{number}"

    def _look(self) -> None:
        if not self._asks:
            self._asks = True
            self.run_worker(self._ask, thread=True)

    def _ask(self) -> None:
        """Runs beside the screen, in a thread."""
        try:
            seen = Shown.of(self._read())
            self.call_from_thread(self._if_there, partial(self._show, seen))
        except LocoError as error:
            self.call_from_thread(self._if_there, partial(self._complain, str(error)))
        finally:
            self._asks = False

    def _if_there(self, say: Callable[[], None]) -> None:
        """An answer may come when the screen has gone already."""
        if self.is_running:
            say()

    def _show(self, seen: Shown) -> None:
        self.query_one("#trouble").display = False
        self.query_one("#heading", Static).update(heading(seen))
        for number, section in enumerate(SECTIONS.values(), 1):
            self.query_one(f"#body-{number}", Static).update(section(seen))

    def _complain(self, why: str) -> None:
        trouble = self.query_one("#trouble", Static)
        trouble.update(Text(printable(f"no answer: {why}")))
        trouble.display = True
