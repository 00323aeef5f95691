"""What a bug has ended stands in the event log: a stream, also in the metrics, and a request."""

import json

import trio
from event_fields import FIELDS
from swarm_worlds import simulated, start, toy_spec

from peer.observe.event_names import EventName
from peer.observe.events import MAX_ERROR_CHARS, EventLog
from simulation.swarm import open_swarm


@simulated()
async def test_it_is_logged_with_whose_it_was_and_what_happened() -> None:
    lines: list[bytes] = []
    events = EventLog(lines.append, peer="me", wall_time_s=trio.current_time, stream=None)
    events.stream_failed("stranger", "/loco/content/1", OverflowError("x" * 10_000))
    (event,) = map(json.loads, lines)
    assert event["event"] == EventName.STREAM_FAILED
    assert (event["remote"], event["protocol"]) == ("stranger", "/loco/content/1")
    assert (event["error"], len(event["detail"])) == ("OverflowError", MAX_ERROR_CHARS)
    assert set(FIELDS[EventName.STREAM_FAILED]) <= set(event)


@simulated()
async def test_a_request_is_logged_with_what_happened() -> None:
    lines: list[bytes] = []
    events = EventLog(lines.append, peer="me", wall_time_s=trio.current_time, stream=None)
    events.request_failed("amend", OverflowError("x" * 10_000))
    (event,) = map(json.loads, lines)
    assert event["event"] == EventName.REQUEST_FAILED
    assert (event["request"], event["error"]) == ("amend", "OverflowError")
    assert len(event["detail"]) == MAX_ERROR_CHARS
    assert set(FIELDS[EventName.REQUEST_FAILED]) <= set(event)


@simulated()
async def test_it_stands_in_the_metrics(tmp_path) -> None:
    async with open_swarm(1, toy_spec(20), tmp_path) as swarm:
        await start(swarm, "a")
        a = swarm["a"]
        assert a.report.now().carried.failed_streams == 0
        a.network.carried.failed_streams += 3
        assert b"loco_failed_streams_total 3.0" in a.report.metrics.render()
