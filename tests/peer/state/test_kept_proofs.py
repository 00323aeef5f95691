"""Proofs that outlive a process."""

import pytest

from peer.state.kept_files import ProofFile
from protocol.limits import MAX_CONVICTED, MAX_KEPT_EVIDENCE_BYTES


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
def test_a_damaged_file_is_as_good_as_none(tmp_path, data):
    path = tmp_path / "proofs"
    path.write_bytes(data)
    assert ProofFile(path).read() == []
    ProofFile(path).keep("a", b"1")
    assert ProofFile(path).read() == [("a", b"1")]
