"""What a home remembers of other peers; a damaged file is as good as none."""

import pytest

from peer.state.kept_files import Acquaintances, ProofFile
from protocol.limits import MAX_CONVICTED, MAX_KEPT_EVIDENCE_BYTES, MAX_LINKS
from protocol.membership.view import Member


def test_who_was_there_is_remembered(tmp_path):
    path = tmp_path / "neighbours.json"
    kept = Acquaintances(path)
    assert kept.read() == {}
    kept.keep([Member("a", 1, ("/ip4/1.2.3.4/tcp/1",)), Member("b", 1)])
    assert Acquaintances(path).read() == {"a": ("/ip4/1.2.3.4/tcp/1",)}
    kept.keep([])  # alone: those that were there are remembered
    assert Acquaintances(path).read() == {"a": ("/ip4/1.2.3.4/tcp/1",)}
    kept.keep([Member("c", 1, ("/ip4/1.2.3.4/tcp/2",))])
    assert Acquaintances(path).read().keys() == {"c"}


def test_only_so_many_are_kept(tmp_path):
    kept = Acquaintances(tmp_path / "neighbours.json")
    kept.keep([Member(str(number), 1, ("/ip4/1.2.3.4/tcp/1",)) for number in range(2 * MAX_LINKS)])
    assert len(kept.read()) == MAX_LINKS


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 3}', "{", "\ufffd", "null"])
def test_a_damaged_file_of_neighbours_is_as_good_as_none(tmp_path, text):
    path = tmp_path / "neighbours.json"
    path.write_text(text)
    assert Acquaintances(path).read() == {}


# --- proofs ---------------------------------------------------------------------------------------
def test_what_is_kept_is_there_again_and_once(tmp_path):
    path = tmp_path / "proofs"
    assert ProofFile(path).read() == []
    for owner, proof in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        ProofFile(path).keep(owner, proof)
    assert ProofFile(path).read() == [("b", b"2"), ("a", b"3")]


def test_the_oldest_go_for_the_newest(tmp_path):
    proofs = ProofFile(tmp_path / "proofs")
    for number in range(MAX_CONVICTED + 1):
        proofs.keep(f"liar{number}", b"proof")
    kept = proofs.read()
    assert (len(kept), kept[0][0], kept[-1][0]) == (
        MAX_CONVICTED,
        "liar1",
        f"liar{MAX_CONVICTED}",
    )
    for name in "ab":
        proofs.keep(name, bytes(MAX_KEPT_EVIDENCE_BYTES // 2 + 1))
    assert [owner for owner, _ in proofs.read()] == ["b"]


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02", b"\x05", b"\x91\x91\xa1a"])
def test_a_damaged_file_of_proofs_is_as_good_as_none(tmp_path, data):
    path = tmp_path / "proofs"
    path.write_bytes(data)
    assert ProofFile(path).read() == []
    ProofFile(path).keep("a", b"1")
    assert ProofFile(path).read() == [("a", b"1")]
