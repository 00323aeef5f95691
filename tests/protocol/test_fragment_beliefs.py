"""What one peer alone says of fragments moves nothing: results, states, ends of cycles."""

from core_worlds import GROUP, stamp_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from test_fragment_core import Alone, asked_of, of_kind

from protocol.diloco import commands as e
from protocol.diloco.chunk_ledger import can_be
from protocol.diloco.collecting import MAX_COLLECT_S, Collection
from protocol.diloco.healing import most_say, state_to_take
from protocol.diloco.owners import may_own, owners_of_chunks
from protocol.limits import MAX_CONTRIBUTORS
from protocol.outcomes import RefusalReason
from protocol.trainer_messages import Yield
from protocol.wire.fragment_messages import (
    ChunkStateReply,
    GetChunkState,
    GetStamps,
    Stamp,
    Stamps,
    mask_of,
)

OURS = Stamp(0, 4, 9, b"ours")
LIE = Stamp(0, 5, 5 * MAX_CONTRIBUTORS, b"lie")
AHEAD = Stamp(1, 5, 5, bytes(16))
"""A state of chunk 1 that somebody claims to have got to."""
stamps = st.builds(
    Stamp, st.just(0), st.integers(0, 5), st.integers(0, 20), st.binary(min_size=2, max_size=2)
)


# --- votes ----------------------------------------------------------------------------------------
def test_one_peer_of_several_moves_nothing_whatever_it_claims():
    said = {"b": OURS, "liar": LIE}
    assert state_to_take(OURS, said, 2, settled=True) is None
    assert state_to_take(OURS, {"liar": LIE}, 2, settled=False) is None
    assert state_to_take(OURS, {"liar": LIE}, 2, settled=True) is None


def test_what_most_are_in_is_taken():
    better = Stamp(0, 5, 11, b"better")
    assert state_to_take(OURS, {"b": better, "c": better}, 2, settled=False) == better
    assert state_to_take(OURS, {"b": better, "c": better}, 3, settled=True) is None
    spoilt = Stamp(0, 0, 0, b"spoilt")
    assert state_to_take(spoilt, {"b": OURS, "c": OURS}, 2, settled=False) == OURS


def test_a_state_without_a_step_has_no_vote_once_all_must_have_some():
    blank, founders = Stamp(0, 0, 0, b"blank"), Stamp(0, 3, 3, b"founder's")
    said = {"founder": founders, "c": blank}
    assert state_to_take(blank, said, 2, settled=False) is None
    assert state_to_take(blank, said, 2, settled=False, begun=True) == founders
    assert state_to_take(blank, {"c": blank}, 2, settled=False, begun=True) is None
    collection = Collection("abc", own_id="a", begun=True)
    for peer, stamp in (("a", blank), ("founder", founders), ("b", blank)):
        collection.add(peer, {0: stamp})
    assert collection.admitted(0).contributors == ("founder",)


def test_a_contribution_on_a_state_that_cannot_be_is_refused():
    alone = Alone("bc")
    alone.see("bc", 5)
    far = Stamp(1, 7, 7, bytes(16))
    commands = alone(*alone.contribution("b", 5, (far,)))
    assert alone.refused == {RefusalReason.IMPLAUSIBLE: 1}
    assert asked_of(commands, GetStamps) == []


def test_what_is_behind_ours_is_never_taken():
    assert state_to_take(LIE, {"b": OURS, "c": OURS}, 2, settled=True) is None


def test_two_that_differ_take_what_is_ahead_and_many_that_all_differ_too_once_all_are_through():
    ahead = Stamp(0, 5, 1, b"ahead")
    assert state_to_take(OURS, {"b": ahead}, 1, settled=False) == ahead
    said = {"b": ahead, "c": Stamp(0, 3, 9, b"c")}
    assert state_to_take(OURS, said, 2, settled=False) is None
    assert state_to_take(OURS, said, 2, settled=True) == ahead


@given(ours=stamps, liar=stamps, others=st.integers(2, 9), settled=st.booleans())
def test_peers_that_agree_are_never_moved_by_one(ours, liar, others, settled):
    said = {f"p{number}": ours for number in range(others - 1)} | {"liar": liar}
    assert state_to_take(ours, said, others, settled=settled) is None


@given(st.lists(stamps, min_size=2, max_size=6), st.data())
def test_all_that_have_heard_the_same_take_the_same_or_stay_with_what_is_ahead(states, data):
    names = [f"p{number}" for number in range(len(states))]
    ends = set()
    for i, ours in enumerate(states):
        said = {name: state for name, state in zip(names, states, strict=True) if name != names[i]}
        taken = state_to_take(ours, said, len(states) - 1, settled=True)
        if taken is not None:
            ends.add(taken)
            assert not ours.is_ahead_of(taken)
    assert len(ends) <= 1


def test_a_joiner_takes_for_its_values_the_states_that_most_say():
    def says(*states: Stamp) -> Stamps:
        return Stamps(0, states, (4,) * len(states))

    digest = bytes(16)
    honest, lie = Stamp(0, 4, 9, digest), Stamp(0, 10**9, 10**9, digest)
    answers = [says(lie), says(honest), says(honest)]
    assert most_say(answers) == [(4, honest), (4, honest)]
    assert most_say(answers[:2]) == [(4, honest)]  # nobody can have come so far by this cycle


# --- states ---------------------------------------------------------------------------------------
def test_no_state_has_more_steps_than_cycles_nor_more_weight_than_all_can_bring():
    assert can_be(Stamp(0, 0, 0, b""), -1)
    assert can_be(Stamp(0, 8, 8 * MAX_CONTRIBUTORS, b""), 7)
    assert not can_be(Stamp(0, 9, 9, b""), 7)
    assert not can_be(Stamp(0, 8, 8 * MAX_CONTRIBUTORS + 1, b""), 7)


def in_cycle_5(others: str) -> Alone:
    """One that has stepped its chunks in cycle 4, among these others."""
    alone = Alone(others)
    alone.see(others, 5)
    for chunk in range(2):
        alone.peer.core.ledger(0).healed(chunk, 4, Stamp(chunk, 4, 4, b"four steps".ljust(16)))
    return alone


def answer(alone: Alone, peer: str, stamp: Stamp | None = None) -> list[e.FragmentCommand]:
    """A peer tells its states: ours, or this one of chunk 1."""
    ledger = alone.peer.core.ledger(0)
    states = tuple(stamp if stamp and stamp.chunk == each.chunk else each for each in ledger.stamps)
    asked = GetStamps(GROUP, 0)
    commands = alone("answered", peer, asked, Stamps(0, states, (5,) * len(states)), {})
    return commands + alone("answered", peer, asked, None, {})


def fetched(alone: Alone, cycle: int, stamp: Stamp, value: bytes) -> list[e.FragmentCommand]:
    """Chunk 1 comes from `b`."""
    state = ChunkStateReply(0, cycle, stamp)
    asked = GetChunkState(GROUP, 0, 1)
    return alone("answered", "b", asked, state, {1: memoryview(value)})


def test_a_claim_of_one_peer_is_asked_of_the_others_and_not_believed_when_they_deny_it():
    alone = in_cycle_5("bcd")
    commands = alone(*alone.contribution("b", 5, (AHEAD,)))
    assert asked_of(commands, GetChunkState) == []
    assert {asked.peer_id for asked in asked_of(commands, GetStamps)} == set("bcd")
    commands = answer(alone, "b", AHEAD) + answer(alone, "c") + answer(alone, "d")
    assert asked_of(commands, GetChunkState) == []
    contributions = of_kind(alone.send(5), e.Contribute)
    assert all(each.stamps for each in contributions)  # nor has it kept us from the averages


def test_a_claim_that_most_confirm_is_fetched_and_nothing_else_is_taken_in_its_place():
    alone = in_cycle_5("bcd")
    alone(*alone.contribution("b", 5, (AHEAD,)))
    commands = [each for peer in "bcd" for each in answer(alone, peer, AHEAD)]
    assert asked_of(commands, GetChunkState) == [e.Ask("b", GetChunkState(GROUP, 0, 1))]
    other = Stamp(1, 5, 6, bytes(16))
    commands = fetched(alone, 4, other, b"else")
    assert {asked.peer_id for asked in asked_of(commands, GetStamps)} == set("bcd")
    commands += [each for peer in "bcd" for each in answer(alone, peer)]
    assert of_kind(commands, Yield) == []


def test_a_chunk_that_comes_a_step_later_than_voted_is_taken_when_most_have_stepped_too():
    alone = in_cycle_5("bcd")
    alone(*alone.contribution("b", 5, (AHEAD,)))
    for peer in "bcd":
        answer(alone, peer, AHEAD)
    value = b"stepped"
    stamp = stamp_of(1, value, 5, 6, 8)
    commands = fetched(alone, 5, stamp, value)
    assert of_kind(commands, Yield) == []
    commands = [each for peer in "bcd" for each in answer(alone, peer, stamp)]
    assert asked_of(commands, GetChunkState) == []
    assert alone.peer.core.ledger(0).stamp(1) == stamp


# --- results --------------------------------------------------------------------------------------
def test_a_result_of_no_owner_is_refused():
    others = "bcdefghij"
    alone = Alone(others, num_chunks=[6])
    rightful = {peer: may_own("group/0/0", 6, peer, ["a", *others]) for peer in others}
    liar, chunk = next(
        (peer, chunk) for peer in others for chunk in range(6) if chunk not in rightful[peer]
    )
    alone.come(liar, alone.result(liar, chunk))
    assert alone.refused == {RefusalReason.NOT_OWNER: 1}
    alone.send(0)
    assert alone.peer.core.ledger(0).stamp(chunk).steps == 0


def test_a_result_that_names_somebody_unknown_is_refused():
    alone = Alone("b")
    result = alone.result("b", 0)
    both = replace(result.chunks[0], mask=mask_of([0, 1]))
    alone.come("b", replace(result, contributors=("b", "x"), weights=(1, 1), chunks=(both,)))
    assert alone.refused == {RefusalReason.NOT_LINKED: 1}


@given(st.sets(st.sampled_from("abcdefgh"), min_size=2), st.data())
def test_an_owner_by_a_view_that_lacks_one_peer_of_ours_or_has_one_more_may_own(view, data):
    members = sorted(view)
    one = data.draw(st.sampled_from(members))
    owners = owners_of_chunks("key", 5, [each for each in members if each != one])
    for chunk, owner in enumerate(owners):
        assert chunk in may_own("key", 5, owner, members)
    owners = owners_of_chunks("key", 5, [*members, "new"])
    for chunk, owner in enumerate(owners):
        assert chunk in may_own("key", 5, owner, members, ["new"])


# --- when a cycle is over -------------------------------------------------------------------------
def test_a_peer_that_claims_to_be_ahead_excludes_nobody_from_an_average():
    collection = Collection("abc", own_id="a")
    for peer, stamp in (("a", OURS), ("liar", LIE), ("b", OURS)):
        collection.add(peer, {0: stamp})
    assert collection.admitted(0).contributors == ("a", "b")
    alone_with_it = Collection("ab", own_id="a")
    for peer, stamp in (("liar", LIE), ("a", OURS)):
        alone_with_it.add(peer, {0: stamp})
    assert alone_with_it.admitted(0).contributors == ("a",)


def test_a_peer_that_is_a_cycle_ahead_does_not_close_it_for_the_others():
    alone = Alone("bc")
    alone(*alone.contribution("b", 1))
    assert of_kind(alone.wait(2 * MAX_COLLECT_S), e.Average) == []
    alone.see("bc", 1)
    commands = alone(*alone.contribution("c", 1)) + alone(*alone.contribution("a", 1))
    (average,) = of_kind(commands, e.Average)
    assert set(average.admitted[0].contributors) == set("abc")
