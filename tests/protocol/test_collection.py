"""An owner averages what is there, on one base, in one order."""

from protocol.diloco.collecting import Collection
from protocol.diloco.commands import Admitted
from protocol.wire.fragment_messages import Stamp

BASE = Stamp(0, 3, 9, b"base")
BETTER = Stamp(0, 4, 9, b"base")


def test_complete_when_all_have_come_were_excused_or_lost():
    collection = Collection(["a", "b", "c", "d"])
    assert collection.add("a", {0: BASE, 2: BASE})
    collection.excuse("b")
    collection.excuse("c")
    assert (collection.is_complete, collection.awaited) == (False, frozenset("d"))
    assert collection.add("d", {0: BASE, 2: BASE})
    assert collection.is_complete


def test_contributors_are_listed_by_peer_id():
    collection = Collection(["b", "a"])
    collection.add("b", {0: BASE})
    collection.add("a", {0: BASE})
    assert collection.admitted(0).contributors == ("a", "b")


def test_nobody_counts_twice():
    collection = Collection(["a", "b"])
    assert collection.add("a", {0: BASE})
    assert not collection.add("a", {0: BETTER})
    assert collection.admitted(0).contributors == ("a",)


def test_the_best_base_wins_whatever_the_owners_is():
    collection = Collection(["owner", "a", "b"])
    collection.add("owner", {0: BASE, 1: BASE})
    collection.add("b", {0: BETTER, 1: BASE})
    collection.add("a", {0: BETTER, 1: BASE})
    assert collection.admitted(0) == Admitted(BETTER, ("a", "b"))
    assert collection.admitted(1).contributors == ("a", "b", "owner")


def test_chunks_are_those_that_somebody_contributed_to():
    collection = Collection(["a", "b"])
    collection.add("a", {1: BASE})
    collection.add("b", {3: BASE, 1: BASE})
    assert collection.chunks == (1, 3)
    assert collection.admitted(3).contributors == ("b",)


def test_of_equally_far_bases_the_one_with_more_weight_wins_then_the_lower_digest():
    spoilt = Stamp(0, 3, 9, b"aaaa")
    collection = Collection(["a", "b", "c"])
    collection.add("a", {0: spoilt, 1: spoilt})
    collection.add("b", {0: BASE, 1: BASE})
    assert collection.admitted(0).base == spoilt
    collection.add("c", {0: BASE})
    assert collection.admitted(0) == Admitted(BASE, ("b", "c"))
    assert collection.admitted(1).base == spoilt
