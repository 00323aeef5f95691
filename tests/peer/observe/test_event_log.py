"""The event log: one whole line per event, whatever happens."""

import ast
import errno
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest
import trio
from event_fields import FIELDS

import peer
from bench.real_peers import read_events
from peer.observe.event_names import EventName
from peer.observe.events import EventLog, LineFile, rotated, said_of
from peer.options.values import LogFormat
from protocol.limits import MAX_HEADER_BYTES

PEER = "12D3KooWQYV9dGMFoRzNStwpXztXaBUjtPqi6aU76ZgUriHhKust"


def log_to(lines: list[bytes], **options) -> EventLog:
    options.setdefault("stream", None)
    return EventLog(lines.append, peer=PEER, wall_time_s=lambda: 1_700_000_000.0, **options)


async def test_an_event_carries_time_clock_peer_and_fields(autojump_clock) -> None:
    lines: list[bytes] = []
    before = trio.current_time()
    await trio.sleep(2)
    log_to(lines).emit(EventName.ROUND_SKIPPED, round=3, reason="deadline", partner=None)
    event = json.loads(lines[0])
    assert event.pop("monotonic_s") - before == pytest.approx(2)
    assert event == {
        "time": 1_700_000_000.0,
        "peer": PEER,
        "event": "RoundSkipped",
        "round": 3,
        "reason": "deadline",
        "partner": None,
    }


async def test_events_are_a_closed_list() -> None:
    log = log_to([])
    with pytest.raises(ValueError, match="RoundForgotten"):
        log.emit("RoundForgotten")
    assert set(FIELDS) == set(EventName)


@pytest.mark.parametrize("event", [EventName.CHECKPOINT_WRITTEN, EventName.RUN_RESUMED])
def test_a_checkpoint_of_the_end_is_told_as_such(event: EventName) -> None:
    fields = {"event": str(event), "path": "p", "step": 1600}
    assert "checkpoint of step 1,600 (the end of the run)" in str(said_of(fields | {"over": True}))
    assert "(" not in str(said_of(fields | {"over": False}))


def emitted() -> Iterator[tuple[str, set[str]]]:
    """Event and fields of every call of `emit` in the source."""
    for path in Path(peer.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(args=[ast.Attribute(value=ast.Name(id="EventName"), attr=name)]):
                    yield name, {keyword.arg or "**" for keyword in node.keywords}


def test_every_field_in_the_source_is_documented() -> None:
    found = list(emitted())
    assert found
    for name, fields in found:
        assert fields <= set(FIELDS[EventName[name]]), name


async def test_every_line_is_strict_json_and_bounded() -> None:
    lines: list[bytes] = []
    log = log_to(lines)
    log.emit("Validated", round=1, loss=float("nan"))
    log.emit("DaemonStarted", home=Path("/x"), addresses=("a", "b\nc"))
    log.emit("TrainerDied", detail="x" * 2 * MAX_HEADER_BYTES)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    events = [json.loads(line, parse_constant=refuse) for line in lines]
    assert events[0]["loss"] == "nan"
    assert events[1]["home"] == "/x"
    assert events[2]["cut_bytes"] > MAX_HEADER_BYTES
    assert all(len(line) <= MAX_HEADER_BYTES and b"\n" not in line for line in lines)


async def test_a_full_disk_is_survived() -> None:
    def full(_line: bytes) -> None:
        raise OSError(28, "No space left on device")

    stream = io.StringIO()
    log = EventLog(full, peer=PEER, wall_time_s=lambda: 0.0, stream=stream)
    log.emit("Leaving")
    assert stream.getvalue() == "00:00:00 leaving\n"


async def test_people_see_short_lines_of_what_matters() -> None:
    stream = io.StringIO()
    log = log_to([], stream=stream)
    log.emit("RoundOpened", round=3)
    log.emit("RoundSkipped", round=3, reason="no_partner")
    log.emit("RoundAveraged", round=3, partner=PEER, seconds=0.123456)
    log.emit("PeerLost", remote=PEER, reason="silent")
    log.emit("CheckpointWritten", step=1600, over=True)
    log.emit("RunFinished", round=3, step=1600, validation_loss=1.23456, replica_loss=None)
    log.say("step 110")
    assert stream.getvalue().splitlines() == [
        f"22:13:20 lost {PEER[-8:]}: silent",
        "22:13:20 checkpoint of step 1,600 (the end of the run) written",
        "22:13:20 the run has ended: held-out loss 1.2346",
        "22:13:20 step 110",
    ]


def test_sentences_name_fields_of_their_events() -> None:
    for name in EventName:
        named = {field for _, field, _, _ in Formatter().parse(name.sentence or "") if field}
        assert named <= set(FIELDS[name]), name


async def test_a_sentence_that_lacks_a_field_is_the_event_itself() -> None:
    stream = io.StringIO()
    log_to([], stream=stream).emit("StateReceived", seconds="nan", bytes=1)
    assert stream.getvalue() == "22:13:20 StateReceived seconds=nan bytes=1\n"


@pytest.mark.parametrize("verbose", [False, True])
async def test_what_others_wrote_moves_no_cursor_and_makes_no_line(verbose: bool) -> None:
    stream = io.StringIO()
    log = log_to([], stream=stream, verbose=verbose)
    log.emit("RunReceived", remote=PEER, run_id="ab", name="demo\x1b[2J\n22:13:20_banned")
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    assert r"demo\x1b[2J\n22:13:20_banned" in line


async def test_verbose_shows_everything() -> None:
    stream = io.StringIO()
    log_to([], stream=stream, verbose=True).emit("RoundOpened", round=3)
    assert "RoundOpened round=3" in stream.getvalue()


async def test_what_is_said_is_not_among_lines_of_json() -> None:
    stream = io.StringIO()
    log_to([], stream=stream, log_format=LogFormat.JSON).say("step 110")
    assert stream.getvalue() == ""


async def test_json_on_the_stream_is_the_logs_own_line() -> None:
    stream = io.StringIO()
    lines: list[bytes] = []
    log_to(lines, stream=stream, log_format=LogFormat.JSON).emit("RoundOpened", round=3)
    assert stream.getvalue().encode() == lines[0] + b"\n"


async def test_a_closed_terminal_ends_nothing() -> None:
    stream = io.StringIO()
    stream.close()
    lines: list[bytes] = []
    log = log_to(lines, stream=stream)
    log.emit("Leaving")
    log.emit("Leaving")
    assert len(lines) == 2


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "A"}\n{"event": "torn')
    file = LineFile(path)
    file.write_line(b'{"event": "B"}')
    file.close()
    assert [event["event"] for event in read_events(path)] == ["A", "B"]


def test_a_short_write_is_told_and_closed_by_the_next(tmp_path: Path, monkeypatch) -> None:
    import os

    path = tmp_path / "events.jsonl"
    file = LineFile(path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    with pytest.raises(OSError, match="wrote 5 of"):
        file.write_line(b'{"event": "A"}')
    monkeypatch.undo()
    file.write_line(b'{"event": "B"}')
    file.close()
    assert [event["event"] for event in read_events(path)] == ["B"]


def test_files_are_rotated_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = LineFile(path, max_file_bytes=100, keep_files=3)
    for number in range(40):
        file.write_line(json.dumps({"n": number, "pad": "x" * 20}).encode())
    file.close()
    kept = sorted(entry.name for entry in tmp_path.iterdir())
    assert kept == ["events.jsonl", "events.jsonl.1", "events.jsonl.2"]
    assert all(entry.stat().st_size <= 100 for entry in tmp_path.iterdir())
    numbers = [
        event["n"]
        for name in (rotated(path, 2), rotated(path, 1), path)
        for event in read_events(name)
    ]
    assert numbers == list(range(40))[-len(numbers) :]


def test_one_file_can_be_enough(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = LineFile(path, max_file_bytes=40, keep_files=1)
    for number in range(9):
        file.write_line(b'{"n": %d, "pad": "xxxxxxxx"}' % number)
    file.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["events.jsonl"]
    assert [event["n"] for event in read_events(path)] == [8]


def test_without_a_descriptor_for_the_next_file_the_old_one_goes_on(
    tmp_path: Path, monkeypatch
) -> None:
    """A closed descriptor's number may be that of another file by the next line."""
    path = tmp_path / "events.jsonl"
    log = LineFile(path, max_file_bytes=20, keep_files=2)
    log.write_line(b'{"n": 1}')

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", none_left)
        with pytest.raises(OSError, match="Too many"):
            log.write_line(b'{"n": 2, "long": 1}')
        log.write_line(b'{"n": 3}')
    log.write_line(b'{"n": 4, "long": 1}')
    log.close()
    assert [event["n"] for event in read_events(rotated(path, 1))] == [1, 3]
    assert [event["n"] for event in read_events(path)] == [4]
    assert {each.name for each in tmp_path.iterdir()} == {path.name, rotated(path, 1).name}
