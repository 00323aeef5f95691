"""The Merkle root: it names a list of chunks, in their order and number, and nothing else."""

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.state_chunks import chunk_digest, list_matches_root, merkle_root

chunk_lists = st.lists(st.binary(max_size=8), min_size=1, max_size=20)


@given(chunk_lists, chunk_lists)
def test_different_lists_have_different_roots(first: list[bytes], second: list[bytes]) -> None:
    roots = [merkle_root([chunk_digest(chunk) for chunk in chunks]) for chunks in (first, second)]
    assert (roots[0] == roots[1]) == (first == second)


@given(chunk_lists, st.data())
def test_any_change_of_the_list_is_seen(chunks: list[bytes], data: st.DataObject) -> None:
    digests = [chunk_digest(chunk) for chunk in chunks]
    root = merkle_root(digests)
    index = data.draw(st.integers(0, len(digests) - 1))
    flipped = bytes([digests[index][0] ^ 1]) + digests[index][1:]
    assert list_matches_root(digests, root)
    assert not list_matches_root([*digests[:index], flipped, *digests[index + 1 :]], root)
    assert not list_matches_root([*digests, digests[-1]], root)
    assert not list_matches_root(digests[:-1], root)


def test_a_duplicated_last_leaf_changes_the_root() -> None:
    digests = [chunk_digest(bytes([i])) for i in range(3)]
    assert merkle_root(digests) != merkle_root([*digests, digests[2]])


def test_leaf_node_and_root_never_pass_for_another() -> None:
    left, right = chunk_digest(b"left"), chunk_digest(b"right")
    pair_root = merkle_root([left, right])
    assert merkle_root([chunk_digest(left + right)]) != pair_root
    assert merkle_root([left]) != left
    assert chunk_digest(b"left") != blake3.blake3(b"left").digest()
    assert pair_root not in (merkle_root([pair_root]), chunk_digest(left + right))


def test_the_root_is_stable() -> None:
    root = merkle_root([chunk_digest(bytes([i])) for i in range(5)])
    assert root.hex() == "ce7d5ab781b69a3f7d71319d2cf06674b04c418e2a0382705a0216c17da5a75e"


@pytest.mark.parametrize("digests", [[], [b"short"], [bytes(32), bytes(33)]])
def test_malformed_lists_are_refused(digests: list[bytes]) -> None:
    assert not list_matches_root(digests, bytes(32))
    with pytest.raises(ValueError, match="32 bytes"):
        merkle_root(digests)
