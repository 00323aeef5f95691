"""How fast bulk may go on a path: learnt from what the peer says it received."""

import math

import pytest

from peer.network.pacing import CRUISE, GAINS, LEAST_BYTES_PER_S, LinkRate

LINE = 1_000_000.0  # bytes per second that the path carries


class Path:
    """A peer that beats once a second, behind a line; bulk waits for it all the time."""

    def __init__(self, line: float = LINE) -> None:
        self.rate = LinkRate()
        self.line = line
        self._now_s = 100.0
        self._received = 0
        self.rate.heard(self._now_s, 0)
        self.second()  # the first one with bulk is no sample

    def second(self, *, busy_s: float = 1.0, received: float | None = None) -> float:
        """One more; what is held back arrives as it is sent. Returns the rate from now on."""
        if received is None:
            received = min(self.line, self.rate.bytes_per_s)
        self._now_s += 1.0
        self._received += int(received)
        self.rate.busy(busy_s)
        self.rate.heard(self._now_s, self._received)
        return self.rate.bytes_per_s


def test_bulk_is_not_held_back_before_the_path_is_known() -> None:
    path = Path()
    assert path.second() == path.second() == math.inf
    assert path.second() < math.inf


def test_it_settles_a_little_below_what_the_path_carries() -> None:
    path = Path()
    rates = [path.second() for _ in range(60)][-4 * len(GAINS) :]
    assert sum(rates) / len(rates) == pytest.approx(sum(GAINS) / len(GAINS) * LINE, rel=1e-3)
    assert sorted(rates)[len(rates) // 2] == pytest.approx(CRUISE * LINE, rel=1e-3)


def test_it_finds_that_there_is_more() -> None:
    path = Path()
    for _ in range(20):
        path.second()
    path.line = 4 * LINE
    rates = [path.second() for _ in range(20)]
    assert max(rates) > 3.5 * LINE


def test_it_finds_that_there_is_less() -> None:
    path = Path()
    for _ in range(20):
        path.second()
    path.line = LINE / 4
    for _ in range(len(GAINS)):
        path.second()
    assert path.second() < 1.3 * LINE / 4


def test_seconds_without_bulk_tell_nothing() -> None:
    path = Path()
    for _ in range(20):
        path.second()
    before = path.rate.bytes_per_s
    for _ in range(50):
        assert path.second(busy_s=0.5, received=10.0) == before


def test_the_first_second_of_a_burst_tells_nothing() -> None:
    """Bytes that have left are still on their way, and TCP finds its speed anew."""
    path = Path()
    for _ in range(20):
        path.second()
    before = path.rate.bytes_per_s
    for _ in range(50):
        path.second(busy_s=0.5, received=10.0)
        assert path.second(received=LINE / 2) == before


def test_one_bad_second_at_the_start_is_forgotten() -> None:
    path = Path()
    path.second(received=1.0)
    for _ in range(2 * len(GAINS)):
        path.second()
    assert path.rate.bytes_per_s > 0.7 * LINE


def test_uneven_seconds_do_not_drive_it_above_the_path() -> None:
    path = Path()
    rates = [
        path.second(received=min(LINE, path.rate.bytes_per_s) * (1.06 if n % 2 else 0.94))
        for n in range(200)
    ][40:]
    assert 0.88 * LINE < sum(rates) / len(rates) < 0.97 * LINE


def test_a_fast_path_is_not_held_back() -> None:
    path = Path(line=100 * LINE)
    assert all(path.second() == math.inf for _ in range(20))


def test_it_never_stops() -> None:
    path = Path()
    for _ in range(20):
        path.second(received=0.0)
    assert path.rate.bytes_per_s == LEAST_BYTES_PER_S


def test_another_life_of_the_peer_begins_anew_and_two_beats_at_once_are_one() -> None:
    path = Path()
    for _ in range(5):
        path.second()
    before = path.rate.bytes_per_s
    path.rate.heard(3.0, 0)
    path.rate.busy(0.1)
    path.rate.heard(3.1, 7)
    assert path.rate.bytes_per_s == before
