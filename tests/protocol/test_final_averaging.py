"""The plan of the final averaging: exact for every number of peers, the same for both sides."""

import pytest

from protocol.gossip.final_averaging import meetings, roster_digest


@pytest.mark.parametrize("num_peers", range(1, 20))
def test_all_end_with_the_mean_of_all(num_peers: int) -> None:
    roster = [f"peer{place:02d}" for place in range(num_peers)]
    plans = {
        peer: {meeting.number: meeting for meeting in meetings(roster, peer)} for peer in roster
    }
    value = {peer: float(3**place) for place, peer in enumerate(roster)}
    mean = sum(value.values()) / num_peers
    for number in range(8):
        before = dict(value)
        for peer in roster:
            if (meeting := plans[peer].get(number)) is None:
                continue
            theirs = plans[meeting.partner][number]
            assert theirs.partner == peer
            assert theirs.asks != meeting.asks
            assert theirs.own_share + meeting.own_share == pytest.approx(1.0)
            share = meeting.own_share
            value[peer] = share * before[peer] + (1 - share) * before[meeting.partner]
    assert value == pytest.approx(dict.fromkeys(roster, mean))


def test_a_power_of_two_takes_log2_meetings_of_equal_shares() -> None:
    planned = meetings(list("abcdefgh"), "c")
    assert [meeting.partner for meeting in planned] == ["d", "a", "g"]
    assert {meeting.own_share for meeting in planned} == {0.5}
    assert [meeting.asks for meeting in planned] == [True, False, True]


def test_alone_there_is_nobody_to_meet() -> None:
    assert meetings(["a"], "a") == ()


def test_a_roster_is_named_whatever_its_order() -> None:
    assert roster_digest(["b", "a"]) == roster_digest(["a", "b"])
    assert roster_digest(["a"]) != roster_digest(["a", "b"])
