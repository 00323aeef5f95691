"""Owners that bring nothing rest."""

import pytest

from protocol.owner_rests import MAX_REST, REST, OwnerRests

ALL = "abcde"


def sends_until_back(rests: OwnerRests, member: str) -> int:
    """How many sends pass without the member, which is heard all the time."""
    rests.heard(member)
    return next(n for n in range(10 * MAX_REST) if member in rests.chosen(ALL))


def test_who_brings_nothing_rests_for_a_while() -> None:
    rests = OwnerRests("a")
    assert rests.chosen(ALL) == list(ALL)
    rests.returned(ALL, {"b"})
    assert rests.chosen(ALL) == list("acde")
    assert sends_until_back(rests, "b") == REST - 2


def test_failures_in_a_row_double_the_rest_up_to_a_bound() -> None:
    rests, lengths = OwnerRests("a"), []
    for _ in range(8):
        rests.returned(ALL, {"b"})
        lengths.append(sends_until_back(rests, "b") + 1)
    assert lengths[:4] == [REST, 2 * REST, 4 * REST, 8 * REST]
    assert lengths[-1] == MAX_REST


def test_a_result_ends_the_row() -> None:
    rests = OwnerRests("a")
    for _ in range(3):
        rests.returned(ALL, {"b"})
        sends_until_back(rests, "b")
    rests.returned(ALL, set())
    rests.returned(ALL, {"b"})
    assert sends_until_back(rests, "b") == REST - 1


def test_failing_twice_in_one_rest_counts_once() -> None:
    rests = OwnerRests("a")
    rests.returned(ALL, {"b"})
    rests.returned(ALL, {"b"})
    assert sends_until_back(rests, "b") == REST - 1


def test_where_most_fail_it_is_rather_we() -> None:
    rests = OwnerRests("a")
    rests.returned(ALL, {"a", "b", "c"})
    assert rests.chosen(ALL) == list(ALL)
    rests.returned(ALL, {"a", "b"})
    assert rests.chosen(ALL) == list("cde")


@pytest.mark.parametrize("members", ["a", "ab"])
def test_when_all_rest_nobody_does(members: str) -> None:
    rests = OwnerRests("a")
    for member in members:
        rests.returned(ALL, {member})
    assert rests.chosen(members) == list(members)


def test_who_leaves_is_forgotten() -> None:
    rests = OwnerRests("a")
    rests.returned(ALL, {"b"})
    rests.chosen("acde")
    assert rests.chosen(ALL) == list(ALL)


def test_who_stays_silent_goes_on_resting_but_for_ourselves() -> None:
    rests = OwnerRests("a")
    rests.returned(ALL, {"a", "b"})
    for _ in range(MAX_REST):
        chosen = rests.chosen(ALL)
    assert chosen == list("acde")
    rests.heard("b")
    assert rests.chosen(ALL) == list(ALL)
