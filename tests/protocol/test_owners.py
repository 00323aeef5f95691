"""Owners: the same for all who see the same, evenly loaded, stable when views differ a little."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from protocol.diloco.owners import owners_of_chunks

names = st.lists(st.text("abcdefgh", min_size=3, max_size=6), min_size=1, max_size=12, unique=True)


@given(names, st.integers(1, 64), st.randoms())
def test_the_order_of_the_view_does_not_matter(members, num_chunks, random):
    shuffled = list(members)
    random.shuffle(shuffled)
    assert owners_of_chunks("k", num_chunks, members) == owners_of_chunks("k", num_chunks, shuffled)


@given(names, st.integers(1, 64))
def test_nobody_owns_more_than_their_share(members, num_chunks):
    owned = Counter(owners_of_chunks("k", num_chunks, members))
    assert max(owned.values()) <= -(-num_chunks // len(members))


def test_the_chunks_go_round():
    members = [f"peer{i}" for i in range(4)]
    choices = {owners_of_chunks(f"run/0/{cycle}", 4, members) for cycle in range(20)}
    assert len(choices) > 10


def test_who_misses_one_member_agrees_on_most_chunks_of_the_others():
    members = [f"peer{i}" for i in range(8)]
    agreed = total = 0
    for cycle in range(50):
        full = owners_of_chunks(f"run/0/{cycle}", 64, members)
        less = owners_of_chunks(f"run/0/{cycle}", 64, members[:-1])
        of_others = [(a, b) for a, b in zip(full, less, strict=True) if a != members[-1]]
        agreed += sum(a == b for a, b in of_others)
        total += len(of_others)
    assert agreed / total > 0.7
