"""How far something is, in words, by a clock that the tests turn."""

import pytest

from protocol.schedule.progress import (
    SHOW_AFTER_S,
    Counting,
    TaskProgress,
    Watched,
    progress_sentence,
)

MIB = 1 << 20


def told(watched: Watched, done: float, now_s: float, **changes: object) -> str:
    progress = TaskProgress(**{"part": "tokenising", "total": 720e6, **changes, "done": done})  # type: ignore[arg-type]
    return watched.words("preparing the data", progress, now_s)


def test_share_rate_and_time_left_follow_from_what_was_seen() -> None:
    watched = Watched()
    assert told(watched, 0, 0) == "preparing the data: tokenising, 0% (1 MB of 720 MB)"
    for now_s in range(1, 10):
        told(watched, 12e6 * now_s, now_s)
    assert told(watched, 120e6, 10) == (
        "preparing the data: tokenising, 17%, 50 s left, 12 MB/s (120 MB of 720 MB)"
    )


def test_what_was_there_at_the_beginning_counts_for_no_rate() -> None:
    watched = Watched()
    told(watched, 600e6, 100)
    assert "92%, 10 s left, 6 MB/s" in told(watched, 660e6, 110)


def test_the_rate_is_that_of_late() -> None:
    """A source that came first gave ten times as much."""
    watched = Watched()
    for now_s in range(100):
        told(watched, 1e6 * now_s, now_s)
    for now_s in range(100, 1000):
        told(watched, 99e6 + 1e5 * (now_s - 99), now_s)
    assert "0.1 MB/s" in told(watched, 189.1e6, 1000)


def test_another_part_or_another_thing_begins_anew() -> None:
    watched = Watched()
    told(watched, 0, 0)
    assert " left" in told(watched, 360e6, 10)
    assert " left" not in told(watched, 400e6, 11, part="hashing")
    assert " left" not in watched.words("elsewhere", TaskProgress("hashing", 700e6, 720e6), 30)
    assert " left" not in watched.words("elsewhere", TaskProgress("hashing", 1e6, 720e6), 40)


def test_what_stands_still_has_no_time_left() -> None:
    watched = Watched()
    for now_s in range(400):
        said = told(watched, 360e6, now_s)
    assert said == "preparing the data: tokenising, 50% (360 MB of 720 MB)"


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        (None, "waiting"),
        (TaskProgress(), "waiting"),
        (TaskProgress("compiling"), "waiting: compiling"),
        (TaskProgress("", 3, 12, "pieces"), "waiting: 25% (3 of 12 pieces)"),
        (TaskProgress("", 2, 8, ""), "waiting: 25%"),
        (TaskProgress("", 9, 8, ""), "waiting: 100%"),
        (TaskProgress("", 3, 0, "pieces"), "waiting"),
    ],
)
def test_nothing_is_said_that_nobody_knows(progress: TaskProgress | None, said: str) -> None:
    assert Watched().words("waiting", progress, 0) == said


def test_what_ends_soon_is_worth_no_line() -> None:
    assert progress_sentence("compiling", None, SHOW_AFTER_S - 0.1) == ""
    assert progress_sentence("compiling", None, 150) == "compiling; 2 min so far"
    assert progress_sentence("fetching: 50%", TaskProgress("", 1, 2), 150) == "fetching: 50%"


def test_counts_add_up() -> None:
    heard = list[TaskProgress]()
    counting = Counting(heard.append, "reading", 3 * MIB)
    counting.add(MIB)
    counting.add(2 * MIB)
    assert heard == [
        TaskProgress("reading", MIB, 3 * MIB),
        TaskProgress("reading", 3 * MIB, 3 * MIB),
    ]
