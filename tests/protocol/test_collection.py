"""An owner averages what is there, on one base, in one order."""

from existing import existing

from protocol.diloco.owner import Collection
from protocol.fragment.chunk_ledger import Stamp

BASE = Stamp(3, 9, b"base")
BETTER = Stamp(4, 9, b"base")


def test_complete_when_all_have_come_were_excused_or_lost():
    collection = Collection(["a", "b", "c", "d"])
    assert collection.add("a", 1, {0: BASE, 2: BASE})
    assert not collection.add("b", 0, {})
    collection.excuse("c")
    assert (collection.is_complete, collection.awaited) == (False, frozenset("d"))
    assert collection.add("d", 1, {0: BASE, 2: BASE})
    assert collection.is_complete


def test_contributors_are_listed_by_peer_id_with_their_weights():
    collection = Collection(["b", "a"])
    collection.add("b", 2, {0: BASE})
    collection.add("a", 1, {0: BASE})
    admitted = existing(collection.admitted(0))
    assert (list(admitted.weights.items()), admitted.weight) == ([("a", 1), ("b", 2)], 3)


def test_nobody_counts_twice():
    collection = Collection(["a", "b"])
    assert collection.add("a", 1, {0: BASE})
    assert not collection.add("a", 5, {0: BETTER})
    assert existing(collection.admitted(0)).weight == 1


def test_the_best_base_wins_whatever_the_owners_is():
    collection = Collection(["owner", "a", "b"])
    collection.add("owner", 1, {0: BASE, 1: BASE})
    collection.add("b", 1, {0: BETTER, 1: BASE})
    collection.add("a", 1, {0: BETTER, 1: BASE})
    assert (
        existing(collection.admitted(0)).base,
        list(existing(collection.admitted(0)).weights),
    ) == (
        BETTER,
        ["a", "b"],
    )
    assert list(existing(collection.admitted(1)).weights) == ["a", "b", "owner"]


def test_chunks_are_those_that_somebody_contributed_to():
    collection = Collection(["a", "b"])
    collection.add("a", 1, {1: BASE})
    collection.add("b", 1, {3: BASE, 1: BASE})
    assert collection.chunks == (1, 3)
    assert list(existing(collection.admitted(3)).weights) == ["b"]


def test_of_equally_far_bases_the_one_with_more_weight_wins_then_the_lower_digest():
    spoilt = Stamp(3, 9, b"aaaa")
    collection = Collection(["a", "b", "c"])
    collection.add("a", 1, {0: spoilt, 1: spoilt})
    collection.add("b", 1, {0: BASE, 1: BASE})
    assert existing(collection.admitted(0)).base == spoilt
    collection.add("c", 1, {0: BASE})
    assert (
        existing(collection.admitted(0)).base,
        list(existing(collection.admitted(0)).weights),
    ) == (BASE, ["b", "c"])
    assert existing(collection.admitted(1)).base == spoilt
