"""Which chunk is asked of which source, and which bytes are wanted."""

from protocol.content.scheduler import Request
from protocol.content.state_plan import StatePlan

UNITS = [0, 1, 0, 1]
"""Two chunks of weights, each with one of momentum."""


def digests(text: str) -> list[bytes]:
    """A state of which each letter is a chunk."""
    return [letter.encode() for letter in text]


def asked(plan: StatePlan, name: str) -> list[int]:
    """What this source is asked for."""
    return [index for _, chunks in plan.next_of(name) for index in chunks]


def taken(plan: StatePlan, name: str) -> list[int]:
    """What this source is asked for, and gives."""
    taken = list[int]()
    for request, chunks in plan.next_of(name):
        for index in chunks:
            plan.arrived(name, index)
        plan.answered(request)
        taken += chunks
    return taken


def test_sources_of_the_same_bytes_share_a_state():
    plan = StatePlan()
    plan.follow_manifest("a", digests("abcdefgh"))
    plan.add_helper("b", digests("Xbcdefgh"))
    assert asked(plan, "a") == [0, 1]
    assert asked(plan, "b") == [2, 3]
    for name, chunks in (("a", (0, 1)), ("b", (2, 3))):
        for index in chunks:
            plan.arrived(name, index)
            plan.answered(Request(name, index))
    assert taken(plan, "a") + taken(plan, "b") == [4, 5, 6, 7]
    assert plan.complete
    assert plan.givers() == {"a": 4, "b": 4}


def test_what_is_known_without_being_sent_was_given_by_nobody_and_goes_with_its_source():
    plan = StatePlan()
    plan.follow_manifest("a", digests("ab0"))
    plan.arrived("a", 2, was_sent=False)
    assert plan.missing == [0, 1]
    assert not plan.givers()
    assert taken(plan, "a") == [0, 1]
    assert plan.complete
    assert plan.givers() == {"a": 2}
    plan.gone("a", believed=False)
    assert plan.missing == [0, 1, 2]


def test_a_source_that_holds_other_bytes_gives_only_what_is_the_same():
    plan = StatePlan()
    plan.follow_manifest("a", digests("abcd"))
    plan.add_helper("b", digests("aXcX"))
    assert taken(plan, "b") == [0, 2]
    assert not plan.next_of("b")
    assert plan.missing == [1, 3]


def test_the_bytes_that_most_name_are_wanted_but_for_the_leaders_scalars():
    plan = StatePlan()
    plan.follow_manifest("liar", digests("xyz"))
    assert taken(plan, "liar") + taken(plan, "liar") == [0, 1, 2]
    plan.add_helper("b", digests("abz"))
    assert plan.complete
    plan.add_helper("c", digests("abz"))
    assert plan.missing == [1]
    assert plan._wanted[0] == b"x"
    assert not plan.next_of("liar")
    assert taken(plan, "c") == [1]
    assert plan.complete
    plan.gone("c")
    assert plan._wanted[1] == b"y"


def test_what_one_source_owes_another_is_asked_for_at_the_end():
    plan = StatePlan()
    plan.follow_manifest("a", digests("abc"))
    plan.add_helper("b", digests("abc"))
    plan.add_helper("c", digests("abc"))
    assert asked(plan, "b") == [0, 1]
    assert asked(plan, "a") == [2]
    assert asked(plan, "a") == [], "it owes something itself"
    plan.arrived("a", 2)
    plan.answered(Request("a", 2))
    assert asked(plan, "a") == [0]
    assert asked(plan, "c") == [1], "each is asked of two at most"
    plan.failed(Request("b", 0))
    plan.failed(Request("b", 1))
    plan.gone("b")
    plan.arrived("a", 0)
    plan.answered(Request("a", 0))
    assert asked(plan, "a") == [1]


def test_what_is_here_is_kept_where_it_is_wanted():
    plan = StatePlan(dict(enumerate(digests("?bXd"))))
    plan.follow_manifest("a", digests("abcd"))
    assert plan.missing == [0, 2]
    plan.arrived("a", 0)
    plan.follow_manifest("b", digests("Abcd"))
    assert plan.missing == [0, 2]


def test_replicas_are_mixed_when_a_source_dies_but_for_scalars_and_own_chunks():
    plan = StatePlan({3: b"own"}, units=UNITS)
    plan.follow_manifest("a", digests("abcd"))
    assert taken(plan, "a") == [0, 2, 1, 3]
    plan.gone("a")
    plan.follow_manifest("b", digests("ABCD"))
    assert plan.missing == [0]
    plan.forget()
    plan.follow_manifest("a", digests("abcd"))
    ((request, chunks), _) = plan.next_of("a")
    assert chunks == [0, 2]
    plan.arrived("a", 2)
    plan.failed(request)
    plan.gone("a")
    plan.follow_manifest("b", digests("ABCD"))
    assert plan.missing == [0, 1, 3]


def test_what_a_source_gave_that_broke_the_protocol_is_not_kept():
    plan = StatePlan(units=UNITS)
    plan.follow_manifest("a", digests("abcd"))
    assert taken(plan, "a") == [0, 2, 1, 3]
    plan.gone("a", believed=False)
    plan.follow_manifest("b", digests("abCD"))
    assert plan.missing == [0, 1, 2, 3]


def test_a_state_that_is_not_believed_is_forgotten():
    plan = StatePlan()
    plan.follow_manifest("a", digests("ab"))
    assert taken(plan, "a") == [0, 1]
    plan.forget()
    assert plan.missing == [0, 1]


def test_a_source_of_another_number_of_chunks_is_none():
    plan = StatePlan()
    plan.follow_manifest("a", digests("ab"))
    plan.add_helper("b", digests("abc"))
    assert plan.givers() == {}
    assert not plan.next_of("b")
    assert plan.num_missing == 2


def mixed_plan(chunks_of_weights: int) -> StatePlan:
    """Replicas that differ in each chunk, led by `a`; `b` and `c` help."""
    plan = StatePlan(units=[*range(chunks_of_weights)] * 2)
    plan.follow_manifest("a", digests("a" * 2 * chunks_of_weights))
    for name in "bc":
        plan.add_helper(name, digests(name * 2 * chunks_of_weights))
    return plan


def givers_of(plan: StatePlan) -> str:
    return "".join(plan.giver(index) or "." for index in range(32))


def test_of_replicas_each_gives_its_own_weights_and_their_momentum():
    plan = mixed_plan(16)
    while not plan.complete:
        for name in "abc":
            taken(plan, name)
    assert givers_of(plan)[:16] == givers_of(plan)[16:]
    assert set(givers_of(plan)) == set("abc")


def test_of_a_small_state_there_is_something_for_each():
    plan = mixed_plan(5)
    assert [asked(plan, name) for name in "abc"] == [[0, 5, 1, 6], [2, 7, 3, 8], [4, 9]]


def test_only_the_leader_gives_scalars_and_the_first_bytes_to_come_are_kept():
    plan = mixed_plan(2)
    assert asked(plan, "b") == [1, 3]
    assert not plan.wants("b", 0)
    assert taken(plan, "a") == [0, 2]
    assert plan.wants("c", 1)
    plan.arrived("b", 1)
    assert not plan.wants("c", 1)


def test_two_replicas_that_name_the_same_decide_nothing():
    plan = StatePlan(units=UNITS)
    plan.follow_manifest("a", digests("abcd"))
    plan.add_helper("liar", digests("xyzw"))
    plan.add_helper("friend", digests("xyzw"))
    assert [plan._wanted[index] for index in range(4)] == digests("abcd")


def test_what_a_dead_replica_owes_others_give():
    plan = mixed_plan(2)
    ((request, chunks),) = plan.next_of("b")
    assert chunks == [1, 3]
    plan.arrived("b", 1)
    plan.failed(request)
    plan.gone("b")
    assert taken(plan, "a") == [0, 2, 3]
    assert plan.complete
    assert plan.giver(1) == "b", "what it gave is kept"


def test_a_slow_replica_does_not_hold_up_the_end():
    plan = mixed_plan(2)
    assert asked(plan, "b") == [1, 3]
    assert taken(plan, "a") == [0, 2]
    assert taken(plan, "a") == [3], "the last that b owes"
    assert taken(plan, "a") == [1]
    assert plan.complete


def test_what_a_doubted_replica_gave_comes_from_others():
    plan = mixed_plan(2)
    assert taken(plan, "b") == [1, 3]
    assert taken(plan, "a") == [0, 2]
    plan.gone("b", believed=False)
    assert plan.missing == [1, 3]
    while not plan.complete:
        taken(plan, "c")
    assert givers_of(plan)[:4] == "acac"
