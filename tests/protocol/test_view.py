from hypothesis import given
from hypothesis import strategies as st

from protocol.limits import MAX_ADDRESSES_PER_PEER
from protocol.records import PeerRecord
from protocol.view import Progress, View

BEAT_S = 1.0
SILENCE_S = 3.5


def _names(members):
    return [member.peer_id for member in members]


def _record(peer_id, incarnation=1, addresses=("/ip4/1.2.3.4/tcp/5",)):
    return PeerRecord(peer_id, incarnation, addresses, 1.75e9)


def test_one_missed_beat_does_not_evict_but_silence_does():
    view = View(SILENCE_S)
    view.heard(0.0, "a", 1)
    assert view.expire(2 * BEAT_S + 0.5) == ()
    assert _names(view.alive(2.5)) == ["a"]
    assert view.expire(SILENCE_S) == ()
    assert view.expire(SILENCE_S + 0.1) == ("a",)
    assert view.expire(SILENCE_S + 0.2) == ()
    assert view.alive(SILENCE_S + 0.2) == ()
    assert view.statistics().evicted_silent == 1


def test_an_evicted_peer_takes_no_part_even_before_expire_was_called():
    view = View(SILENCE_S)
    view.heard(0.0, "a", 1, progress=Progress(state="training"))
    assert _names(view.members_training(1.0)) == ["a"]
    assert view.members_training(SILENCE_S + 1) == ()
    assert view.alive(SILENCE_S + 1) == ()


def test_a_sign_of_life_brings_an_evicted_peer_back_at_once():
    view = View(SILENCE_S)
    view.heard(0.0, "a", 1)
    view.expire(10.0)
    assert view.heard(10.1, "a", 1)
    assert _names(view.alive(10.1)) == ["a"]


def test_same_key_killed_and_restarted_is_accepted_at_once():
    view = View(SILENCE_S)
    view.heard(0.0, "a", 1, progress=Progress(state="training", round=9), rtt_s=0.1)
    assert view.heard(0.5, "a", 2, progress=Progress(state="downloading"))
    [member] = view.alive(0.5)
    assert (member.incarnation, member.progress.round, member.rtt_s) == (2, 0, None)
    assert view.statistics().replaced == 1


def test_an_older_incarnation_is_ignored_everywhere():
    view = View(SILENCE_S)
    view.heard(0.0, "a", 2)
    assert not view.heard(5.0, "a", 1)
    assert not view.record(5.0, _record("a", 1))
    assert not view.gone(1.0, "a", 1)
    assert _names(view.alive(1.0)) == ["a"]
    assert view.expire(5.0) == ("a",)
    assert view.statistics().stale_ignored == 2


def test_the_death_of_an_old_life_does_not_end_the_new_one():
    view = View(SILENCE_S)
    view.heard(0.0, "a", 1)
    view.heard(0.1, "a", 2)
    assert not view.gone(0.2, "a", 1)
    assert _names(view.alive(0.2)) == ["a"]
    assert view.gone(0.3, "a", 2)
    assert view.alive(0.3) == ()
    assert not view.gone(0.4, "a", 2)
    assert view.heard(0.5, "a", 2)
    assert _names(view.alive(0.5)) == ["a"]


def test_a_record_introduces_but_does_not_prove_life():
    view = View(SILENCE_S)
    assert view.record(0.0, _record("a"))
    assert view.alive(0.0) == ()
    assert view.get("a").addresses == ("/ip4/1.2.3.4/tcp/5",)
    assert not view.record(0.0, _record("a"))
    assert view.record(0.0, _record("a", addresses=("/ip4/5.6.7.8/tcp/5",)))
    view.heard(1.0, "a", 1, addresses=("/ip4/9.9.9.9/tcp/9",))
    assert not view.record(1.0, _record("a"))
    assert view.get("a").addresses == ("/ip4/9.9.9.9/tcp/9",)
    assert _names(view.alive(1.0)) == ["a"]


def test_a_record_of_a_newer_life_replaces_the_old_one():
    view = View(SILENCE_S)
    view.heard(0.0, "a", 1, addresses=("/ip4/9.9.9.9/tcp/9",))
    assert view.record(0.1, _record("a", 2))
    assert view.alive(0.1) == ()
    assert view.get("a").addresses == ("/ip4/1.2.3.4/tcp/5",)


def test_what_is_not_said_stays():
    view = View(SILENCE_S)
    view.heard(0.0, "a", 1, addresses=("/x",), progress=Progress(round=3), rtt_s=0.2)
    view.heard(1.0, "a", 1)
    member = view.get("a")
    assert (member.addresses, member.progress.round, member.rtt_s) == (("/x",), 3, 0.2)
    view.heard(0.5, "a", 1)
    assert view.get("a").last_heard_s == 1.0


def test_addresses_are_bounded():
    view = View(SILENCE_S)
    view.heard(0.0, "a", 1, addresses=tuple(f"/{n}" for n in range(100)))
    assert len(view.get("a").addresses) == MAX_ADDRESSES_PER_PEER


def test_a_full_view_gives_the_places_of_the_dead_to_newcomers():
    view = View(SILENCE_S, max_members=2)
    view.heard(0.0, "a", 1)
    view.heard(1.0, "b", 1)
    assert not view.heard(1.0, "c", 1)
    assert not view.record(1.0, _record("d"))
    assert view.statistics().refused_full == 2
    assert view.heard(1.0, "a", 2)
    view.expire(4.55)
    assert view.heard(4.6, "c", 1)
    assert _names(view.members()) == ["b", "c"]


def test_forgotten_is_forgotten():
    view = View(SILENCE_S)
    view.heard(0.0, "a", 5)
    view.forget("a")
    view.forget("never there")
    assert view.heard(1.0, "a", 1)


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
def test_whatever_happens_the_view_stays_bounded_sorted_and_true_to_silence(steps):
    view, now = View(SILENCE_S, max_members=3), 0.0
    for kind, peer, incarnation, pause in steps:
        now += pause
        before = view.get(peer)
        if kind == "heard":
            view.heard(now, peer, incarnation)
        elif kind == "record":
            view.record(now, _record(peer, incarnation))
        elif kind == "gone":
            view.gone(now, peer, incarnation)
        else:
            view.expire(now)
        after = view.get(peer)
        if before and after:
            assert after.incarnation >= before.incarnation
        alive = view.alive(now)
        assert len(view.members()) <= 3
        assert _names(alive) == sorted(_names(alive))
        assert all(now - member.last_heard_s <= SILENCE_S for member in alive)
