"""Which rounds of the soak fail, and how."""

from collections import Counter

from bench.memory_soak import SPOILS, spoils


def test_every_second_round_is_spoilt_and_each_way_as_often():
    ways = [spoils(round_) for round_ in range(60)]
    expected: dict[str | None, int] = {None: 30}
    assert Counter(ways) == expected | dict.fromkeys(SPOILS, 10)
    assert not any(ways[::2])
