import json

from demo.reading import Carried, EventFollower, Point, parse_carried

PARTNER = "12D3KooWpartner"


def line(event, **fields):
    return json.dumps({"event": event, "peer": "me", **fields}).encode() + b"\n"


def closed(round_, **changes):
    fields = {"round": round_, "steps": 10, "tokens": 1000, "seconds": 2.0, "loss": 2.5}
    fields["step"] = 12.0 * (round_ + 1)
    return line("RoundClosed", **(fields | changes))


def test_an_event_log_is_followed_while_it_grows(tmp_path):
    path = tmp_path / "events.jsonl"
    follower = EventFollower(path)
    follower.read()
    assert (follower.parameters, follower.partner, follower.tokens_per_s) == (None, None, None)
    path.write_bytes(line("TrainerStarted", parameters=77) + closed(0) + closed(1)[:20])
    follower.read()
    assert (follower.parameters, follower.training) == (77, [Point(12.0, 2.5)])
    with path.open("ab") as file:
        file.write(closed(1, loss=2.25)[20:] + line("RoundAveraged", round=1, partner=PARTNER))
        file.write(line("Validated", round=1, loss=2.75, seconds=0.1))
    follower.read()
    assert follower.training == [Point(12.0, 2.5), Point(24.0, 2.25)]
    assert (follower.partner, follower.validation) == (PARTNER, [Point(24.0, 2.75)])
    assert follower.tokens_per_s == 500.0


def test_speed_is_that_of_the_last_rounds_with_steps(tmp_path):
    path = tmp_path / "events.jsonl"
    slow = closed(0, seconds=1000.0)
    final = closed(9, steps=0, tokens=0, seconds=50.0, loss="nan")
    path.write_bytes(slow + b"".join(closed(r) for r in range(1, 6)) + final)
    follower = EventFollower(path)
    follower.read()
    assert follower.tokens_per_s == 500.0
    assert follower.training[-1].step == 72.0


def test_sent_bytes_are_read_from_the_metrics():
    page = """\
# HELP loco_wire_bytes Bytes.
# TYPE loco_wire_bytes counter
loco_wire_bytes_total{direction="sent",protocol="/loco/gossip/1"} 1000.0
loco_wire_bytes_total{direction="sent",protocol="/loco/hello/1"} 30.0
loco_wire_bytes_total{direction="received",protocol="/loco/gossip/1"} 999.0
"""
    assert parse_carried(page) == Carried(1000, 1030)
    assert parse_carried("") == Carried(0, 0)
