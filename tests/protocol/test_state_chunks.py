"""Which chunk is asked of which source, and which bytes are wanted."""

from protocol.state_chunks import ChunkPlan


def digests(text: str) -> list[bytes]:
    """A state of which each letter is a chunk."""
    return [letter.encode() for letter in text]


def taken(plan: ChunkPlan, name: str, most: int = 4) -> list[int]:
    """What this source is asked for, and gives."""
    wanted = list(plan.next_of(name, most) or ())
    for index in wanted:
        plan.arrived(name, index)
    return wanted


def test_sources_of_the_same_bytes_share_a_state():
    plan = ChunkPlan()
    plan.lead("a", digests("abcdefgh"))
    plan.join("b", digests("Xbcdefgh"))
    assert plan.next_of("a", 4) == range(4)
    assert plan.next_of("b", 4) == range(4, 8)
    for name, chunks in (("a", range(4)), ("b", range(4, 8))):
        for index in chunks:
            plan.arrived(name, index)
    assert plan.complete
    assert plan.givers() == {"a": 4, "b": 4}


def test_a_source_that_holds_other_bytes_gives_only_what_is_the_same():
    plan = ChunkPlan()
    plan.lead("a", digests("abcd"))
    plan.join("b", digests("aXcX"))
    assert taken(plan, "b") == [0]
    assert taken(plan, "b") == [2]
    assert plan.next_of("b", 4) is None
    assert plan.missing() == [1, 3]


def test_the_bytes_that_most_name_are_wanted_but_for_the_leaders_scalars():
    plan = ChunkPlan()
    plan.lead("liar", digests("xyz"))
    assert taken(plan, "liar") == [0, 1, 2]
    plan.join("b", digests("abz"))
    assert plan.complete
    plan.join("c", digests("abz"))
    assert plan.missing() == [1]
    assert plan.wanted(0) == b"x"
    assert plan.next_of("liar", 4) is None
    assert taken(plan, "c") == [1]
    assert plan.complete
    plan.gone("c")
    assert plan.wanted(1) == b"y"


def test_what_one_source_owes_another_is_asked_for_at_the_end():
    plan = ChunkPlan()
    plan.lead("a", digests("abc"))
    plan.join("b", digests("abc"))
    assert plan.next_of("b", 4) == range(3)
    assert plan.next_of("a", 4) == range(1)
    assert plan.next_of("a", 4) == range(1, 2), "each is asked of two at most"
    plan.gone("b")
    plan.arrived("a", 0)
    plan.arrived("a", 1)
    assert plan.next_of("a", 4) == range(2, 3)


def test_what_is_here_is_kept_where_it_is_wanted():
    plan = ChunkPlan(dict(enumerate(digests("?bXd"))))
    plan.lead("a", digests("abcd"))
    assert plan.missing() == [0, 2]
    assert taken(plan, "a") == [0]
    plan.lead("b", digests("Abcd"))
    assert plan.missing() == [0, 2]


def test_replicas_are_mixed_when_a_source_dies_but_for_scalars_and_own_chunks():
    plan = ChunkPlan({3: b"own"}, mixes=True)
    plan.lead("a", digests("abcd"))
    assert taken(plan, "a", most=2) == [0, 1]
    plan.gone("a")
    plan.lead("b", digests("ABCD"))
    assert plan.missing() == [0, 2, 3]


def test_what_a_source_gave_that_broke_the_protocol_is_not_kept():
    plan = ChunkPlan(mixes=True)
    plan.lead("a", digests("abcd"))
    assert taken(plan, "a", most=2) == [0, 1]
    plan.gone("a", believed=False)
    plan.lead("b", digests("abCD"))
    assert plan.missing() == [0, 1, 2, 3]


def test_a_state_that_is_not_believed_is_forgotten():
    plan = ChunkPlan()
    plan.lead("a", digests("ab"))
    assert taken(plan, "a") == [0, 1]
    plan.forget()
    assert plan.missing() == [0, 1]


def test_a_source_of_another_number_of_chunks_is_none():
    plan = ChunkPlan()
    plan.lead("a", digests("ab"))
    plan.join("b", digests("abc"))
    assert plan.givers() == {}
    assert plan.next_of("b", 4) is None
    assert repr(plan) == "<ChunkPlan, 2 missing, 1 sources>"
