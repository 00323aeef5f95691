from dataclasses import replace

from existing import existing
from hypothesis import given
from hypothesis import strategies as st

from protocol.limits import MAX_ADDRESSES_PER_PEER
from protocol.membership.records import PeerRecord
from protocol.membership.view import STUCK_S, STUCK_STEPS, Progress, Roster, View

BEAT_S = 1.0
SILENCE_S = 3.5


def _names(members):
    return [member.peer_id for member in members]


def _record(peer_id, incarnation=1, addresses=("/ip4/1.2.3.4/tcp/5",)):
    return PeerRecord(peer_id, incarnation, addresses, 1.75e9)


def test_one_missed_beat_does_not_evict_but_silence_does():
    roster = Roster(SILENCE_S)
    roster.heard(0.0, "a", 1)
    assert roster.expire(2 * BEAT_S + 0.5) == ()
    assert _names(roster.alive(2.5)) == ["a"]
    assert roster.expire(SILENCE_S) == ()
    assert roster.expire(SILENCE_S + 0.1) == ("a",)
    assert roster.expire(SILENCE_S + 0.2) == ()
    assert roster.alive(SILENCE_S + 0.2) == ()


def test_an_evicted_peer_takes_no_part_even_before_expire_was_called():
    roster = Roster(SILENCE_S)
    roster.heard(0.0, "a", 1, progress=Progress(state="training"))
    assert _names(roster.members_training(1.0)) == ["a"]
    assert roster.members_training(SILENCE_S + 1) == ()
    assert roster.alive(SILENCE_S + 1) == ()


def test_a_peer_that_beats_and_tells_nothing_new_is_stuck():
    roster, told = Roster(SILENCE_S), Progress(state="training", step=3, steps_per_s=10.0)
    roster.heard(0.0, "a", 1)
    assert not existing(roster.get("a")).goes_on(0.0)
    for second in range(30):
        roster.heard(float(second), "a", 1, progress=told)
    assert existing(roster.get("a")).goes_on(STUCK_S)
    assert not existing(roster.get("a")).goes_on(STUCK_S + 0.1)
    assert _names(roster.alive(29.0)) == ["a"]
    roster.heard(30.0, "a", 1, progress=replace(told, step=4))
    assert existing(roster.get("a")).goes_on(30.0 + STUCK_S)


def test_steps_that_are_long_are_waited_for():
    roster = Roster(SILENCE_S)
    roster.heard(0.0, "a", 1, progress=Progress(state="training", steps_per_s=0.01))
    assert existing(roster.get("a")).goes_on(100.0 * STUCK_STEPS)
    assert not existing(roster.get("a")).goes_on(100.0 * STUCK_STEPS + 1)


def test_a_sign_of_life_brings_an_evicted_peer_back_at_once():
    roster = Roster(SILENCE_S)
    roster.heard(0.0, "a", 1)
    roster.expire(10.0)
    assert roster.heard(10.1, "a", 1)
    assert _names(roster.alive(10.1)) == ["a"]


def test_same_key_killed_and_restarted_is_accepted_at_once():
    roster = Roster(SILENCE_S)
    roster.heard(0.0, "a", 1, progress=Progress(state="training", round=9), rtt_s=0.1)
    assert roster.heard(0.5, "a", 2, progress=Progress(state="downloading"))
    [member] = roster.alive(0.5)
    assert (member.incarnation, member.progress.round, member.rtt_s) == (2, 0, None)


def test_an_older_incarnation_is_ignored_everywhere():
    roster = Roster(SILENCE_S)
    roster.heard(0.0, "a", 2)
    assert not roster.heard(5.0, "a", 1)
    assert not roster.record(_record("a", 1))
    assert not roster.gone("a", 1)
    assert _names(roster.alive(1.0)) == ["a"]
    assert roster.expire(5.0) == ("a",)


def test_the_death_of_an_old_life_does_not_end_the_new_one():
    roster = Roster(SILENCE_S)
    roster.heard(0.0, "a", 1)
    roster.heard(0.1, "a", 2)
    assert not roster.gone("a", 1)
    assert _names(roster.alive(0.2)) == ["a"]
    assert roster.gone("a", 2)
    assert roster.alive(0.3) == ()
    assert not roster.gone("a", 2)
    assert roster.heard(0.5, "a", 2)
    assert _names(roster.alive(0.5)) == ["a"]


def test_a_record_introduces_but_does_not_prove_life():
    roster = Roster(SILENCE_S)
    assert roster.record(_record("a"))
    assert roster.alive(0.0) == ()
    assert existing(roster.get("a")).addresses == ("/ip4/1.2.3.4/tcp/5",)
    assert not roster.record(_record("a"))
    assert roster.record(_record("a", addresses=("/ip4/5.6.7.8/tcp/5",)))
    roster.heard(1.0, "a", 1, addresses=("/ip4/9.9.9.9/tcp/9",))
    assert not roster.record(_record("a"))
    assert existing(roster.get("a")).addresses == ("/ip4/9.9.9.9/tcp/9",)
    assert _names(roster.alive(1.0)) == ["a"]


def test_a_record_of_a_newer_life_replaces_the_old_one():
    roster = Roster(SILENCE_S)
    roster.heard(0.0, "a", 1, addresses=("/ip4/9.9.9.9/tcp/9",))
    assert roster.record(_record("a", 2))
    assert roster.alive(0.1) == ()
    assert existing(roster.get("a")).addresses == ("/ip4/1.2.3.4/tcp/5",)


def test_what_is_not_said_stays():
    roster = Roster(SILENCE_S)
    roster.heard(
        0.0, "a", 1, addresses=("/ip4/10.0.0.1/tcp/1",), progress=Progress(round=3), rtt_s=0.2
    )
    roster.heard(1.0, "a", 1)
    member = existing(roster.get("a"))
    assert member.addresses == ("/ip4/10.0.0.1/tcp/1",)
    assert (member.progress.round, member.rtt_s) == (3, 0.2)
    roster.heard(0.5, "a", 1)
    assert existing(roster.get("a")).last_heard_s == 1.0


def test_what_is_no_address_is_dropped():
    good, bad = "/ip4/10.0.0.1/tcp/1", ("/dns4/a..b/tcp/1", "/x")
    roster = Roster(SILENCE_S)
    roster.heard(0.0, "a", 1, addresses=(*bad, good))
    roster.introduced("b", (*bad, good))
    assert [member.addresses for member in roster.members()] == [(good,), (good,)]


def test_addresses_are_bounded():
    roster = Roster(SILENCE_S)
    roster.heard(0.0, "a", 1, addresses=tuple(f"/ip4/10.0.0.{n}/tcp/1" for n in range(100)))
    assert len(existing(roster.get("a")).addresses) == MAX_ADDRESSES_PER_PEER


def test_a_full_roster_gives_the_places_of_the_dead_to_newcomers():
    roster = Roster(SILENCE_S, max_members=2)
    roster.heard(0.0, "a", 1)
    roster.heard(1.0, "b", 1)
    assert not roster.heard(1.0, "c", 1)
    assert not roster.record(_record("d"))
    assert roster.heard(1.0, "a", 2)
    roster.expire(4.55)
    assert roster.heard(4.6, "c", 1)
    assert _names(roster.members()) == ["b", "c"]


def test_forgotten_is_forgotten():
    roster = Roster(SILENCE_S)
    roster.heard(0.0, "a", 5)
    roster.forget("a")
    roster.forget("never there")
    assert roster.heard(1.0, "a", 1)


# --- groups ---------------------------------------------------------------------------------------
OURS, OTHERS = "ab" * 16, "cd" * 16


def _trains(roster, now_s, peer_id, group, incarnation=1):
    progress = Progress(state="training", group=group)
    roster.heard(now_s, peer_id, incarnation, progress=progress)


def test_a_view_lists_its_group_alone_and_the_roster_all():
    roster = Roster(SILENCE_S)
    view, other = View(roster, OURS), View(roster, OTHERS)
    _trains(roster, 0.0, "c", OURS)
    _trains(roster, 0.0, "b", OTHERS)
    roster.heard(0.0, "a", 1, progress=Progress(state="downloading", group=OURS))
    assert _names(roster.alive(0.0)) == ["a", "b", "c"]
    assert _names(view.alive(0.0)) == ["a", "c"]
    assert _names(view.members_training(0.0)) == ["c"]
    assert _names(other.alive(0.0)) == _names(other.members_training(0.0)) == ["b"]


def test_a_view_is_as_alive_as_its_roster():
    roster = Roster(SILENCE_S)
    view = View(roster, OURS)
    _trains(roster, 0.0, "a", OURS)
    _trains(roster, 0.0, "b", OURS)
    roster.gone("b", 1)
    assert _names(view.alive(1.0)) == ["a"]
    assert view.alive(SILENCE_S + 0.1) == view.members_training(SILENCE_S + 0.1) == ()


def test_only_a_peer_itself_says_which_group_it_is_in():
    roster = Roster(SILENCE_S)
    view = View(roster, OURS)
    roster.record(_record("a"))
    roster.heard(0.0, "a", 1)
    assert view.alive(0.0) == ()
    _trains(roster, 1.0, "a", OURS)
    roster.heard(2.0, "a", 1)  # any byte: it is where it was
    assert _names(view.alive(2.0)) == ["a"]
    _trains(roster, 3.0, "a", OTHERS)  # it has moved
    assert view.alive(3.0) == ()
    _trains(roster, 4.0, "a", OURS)
    roster.heard(4.5, "a", 2)  # a new life has told nothing yet
    assert view.alive(4.5) == ()


events = st.lists(
    st.tuples(
        st.sampled_from(["heard", "record", "gone", "expire"]),
        st.sampled_from("abcde"),
        st.integers(0, 3),
        st.floats(0, 3),
    ),
    max_size=40,
)


@given(events)
def test_whatever_happens_the_roster_stays_bounded_sorted_and_true_to_silence(steps):
    roster, now = Roster(SILENCE_S, max_members=3), 0.0
    for kind, peer, incarnation, pause in steps:
        now += pause
        before = roster.get(peer)
        if kind == "heard":
            roster.heard(now, peer, incarnation)
        elif kind == "record":
            roster.record(_record(peer, incarnation))
        elif kind == "gone":
            roster.gone(peer, incarnation)
        else:
            roster.expire(now)
        after = roster.get(peer)
        if before and after:
            assert after.incarnation >= before.incarnation
        alive = roster.alive(now)
        assert len(roster.members()) <= 3
        assert _names(alive) == sorted(_names(alive))
        assert all(now - member.last_heard_s <= SILENCE_S for member in alive)
