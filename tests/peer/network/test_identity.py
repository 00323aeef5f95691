"""The identity file: who may read it, and what is refused."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from network_worlds import SeededEntropy

from peer.network.identity import Identity, IdentityUnusable, load, load_or_create
from protocol.membership.records import verify_with_peer_id

ENTROPY = SeededEntropy("identity").token_bytes


def made(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "identity.key"
    load_or_create(path, ENTROPY)
    return path


def test_the_file_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = made(tmp_path)
    before = path.read_bytes()
    again = load_or_create(path, SeededEntropy("another").token_bytes)
    assert again.peer_id == Identity(ENTROPY(32)).peer_id
    assert path.read_bytes() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_the_file_is_libp2ps_marshalled_key(tmp_path: Path) -> None:
    identity = load(made(tmp_path))
    data = made(tmp_path).read_bytes()
    assert data[:4] == bytes.fromhex("08011240")
    assert data[4:36] == ENTROPY(32)
    assert data[36:] == identity.public_key


def test_signatures_verify_for_their_peer_and_data_alone() -> None:
    identity, other = (Identity(SeededEntropy(name).token_bytes(32)) for name in ("one", "other"))
    signature = identity.sign(b"data")
    assert len(signature) == 64
    assert verify_with_peer_id(identity.peer_id, b"data", signature)
    assert not verify_with_peer_id(identity.peer_id, b"date", signature)
    assert not verify_with_peer_id(other.peer_id, b"data", signature)
    assert not verify_with_peer_id(identity.peer_id, b"data", signature[:-1])
    assert not verify_with_peer_id("not a peer id", b"data", signature)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = made(tmp_path)
    path.chmod(mode)
    with pytest.raises(IdentityUnusable, match=r"open to other users .*chmod 600"):
        load_or_create(path, ENTROPY)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"", "damaged"),
        (lambda data: data[:-1], "damaged"),
        (lambda data: data + b"x", "damaged"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "do not belong together"),
        (lambda data: b"\x08\x00" + data[2:], "not Ed25519"),
    ],
)
def test_a_damaged_file_is_refused_and_left_alone(
    tmp_path: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    path = made(tmp_path)
    damaged = change(path.read_bytes())
    path.write_bytes(damaged)
    with pytest.raises(IdentityUnusable, match=f"{words}.*(delete|restore)"):
        load_or_create(path, ENTROPY)
    assert path.read_bytes() == damaged


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityUnusable, match="cannot read the identity file"):
        load_or_create(tmp_path, ENTROPY)  # a directory: unreadable as a file even for root


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IdentityUnusable, match="identity file"):
        load_or_create(tmp_path / "file" / "identity.key", ENTROPY)
