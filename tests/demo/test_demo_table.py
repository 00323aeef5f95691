import io
from dataclasses import replace

import trio
from readings import guest, reading
from rich.console import Console

from demo.reading import Reading
from demo.table import (
    COLUMNS,
    PLAIN_EVERY_S,
    PlainView,
    Scene,
    guest_rows,
    human_bytes,
    open_view,
    plain_line,
    row,
    table,
)

NAMES = {"12D3Koopeer-1": "peer-1", "12D3Koopeer-2": "peer-2"}


def scene(*readings, **changes):
    return replace(Scene("four", readings, total_steps=100, names=NAMES), **changes)


def test_a_row_says_everything_about_a_peer():
    cells = row(reading(partner="12D3Koopeer-2"), NAMES)
    assert dict(zip(COLUMNS, cells, strict=True)) == {
        "peer": "peer-1",
        "state": "training",
        "round": "3",
        "step": "30",
        "tokens/s": "5,000",
        "train loss": "2.500",
        "validation loss": "2.250",
        "partner": "peer-2",
        "bytes": "3.0 MB",
    }


def test_what_is_unknown_is_a_dash():
    assert row(Reading("peer-3"), NAMES) == ["peer-3", "starting", *["-"] * 7]


def test_a_guest_has_a_row_and_a_partner_that_is_one_has_a_short_id():
    shown = scene(reading(partner=guest().peer_id, peers=(guest(),)))
    assert guest_rows(shown)[0][:3] == [f"guest {guest().peer_id[-8:]}", "training", "2"]
    assert row(shown.readings[0], NAMES)[7] == guest().peer_id[-8:]


def test_our_own_peers_are_no_guests_while_they_start():
    assert guest_rows(scene(reading(peers=(guest(),)), complete=False)) == []


def test_the_table_shows_every_column_and_row():
    console = Console(file=(file := io.StringIO()), width=160)
    console.print(table(scene(reading(), reading("peer-2", step=20))))
    text = file.getvalue()
    assert all(column in text for column in COLUMNS)
    assert [line.split()[0] for line in text.splitlines()] == ["peer", "peer-1", "peer-2"]


def test_progress_is_that_of_the_slowest():
    assert scene(reading(step=50), reading(step=40), Reading("peer-3")).step == 40
    assert scene(reading(step=500)).step == 100
    assert scene(Reading("peer-1")).step == 0


def test_a_plain_line_sums_up():
    line = plain_line(scene(reading(peers=(guest(),)), reading("peer-2", step=20)))
    assert line == (
        "four: step 20/100  training 2  10,000 tokens/s  train loss 2.500  "
        "validation loss 2.250  sent 6.0 MB  guests 1"
    )


async def test_plain_lines_come_now_and_then(autojump_clock):
    file = io.StringIO()
    with open_view(file) as view:
        assert isinstance(view, PlainView)
        for _ in range(20):
            view.show(scene(reading(), hint="join like this"))
            await trio.sleep(PLAIN_EVERY_S / 10)
    lines = file.getvalue().splitlines()
    assert lines[0] == "join like this"
    assert len(lines) == 3


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_table_and_a_bar(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with open_view(file) as view:
        view.say("a sentence")
        view.show(scene(reading(step=40), hint="join like this"))
        view.show(scene(reading(step=100), title="alone"))
    text = file.getvalue()
    assert "a sentence" in text
    assert "40%" in text
    assert "join like this" in text
    assert "100%" in text.rpartition("alone")[2]


def test_bytes_for_people():
    assert [human_bytes(n) for n in (0, 999, 1500, 2_500_000, 3_210_000_000)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "3.21 GB",
    ]
