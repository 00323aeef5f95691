"""The identity of this peer: an Ed25519 key in one file, readable by its owner alone.

The file is in libp2p's marshalled private key format, so that p2pd reads the very same one (`-id`):

    08 01     field 1, key type: Ed25519
    12 40     field 2, 64 bytes: the 32 bytes of the private key, then the 32 of the public one

Anybody who reads it can speak as this peer; a file that others may read is therefore refused, not
repaired.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peer.runtime import PeerId
from peer.runtime.files import PRIVATE_FILE, replace_file
from protocol.address.peer_id import peer_id_from_public_key
from protocol.errors import Unusable

SEED_BYTES: Final = 32
_FILE_PREFIX: Final = bytes.fromhex("08011240")
_FILE_BYTES: Final = len(_FILE_PREFIX) + 2 * SEED_BYTES


class IdentityUnusable(Unusable): ...


class Identity:
    """An Ed25519 key pair, made of the private key (32 bytes), and its peer id."""

    __slots__ = ("_key", "peer_id", "public_key")

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key: Final = self._key.public_key().public_bytes_raw()
        self.peer_id: Final[PeerId] = peer_id_from_public_key(self.public_key)

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)

    def to_file_bytes(self) -> bytes:
        return _FILE_PREFIX + self._key.private_bytes_raw() + self.public_key


def load_or_create(path: Path, entropy: Callable[[int], bytes] = os.urandom) -> Identity:
    """Read the identity at `path`; make one, with mode 0600, where there is none.

    The caller has locked the home, so nobody else makes one meanwhile.

    Raises:
        IdentityUnusable: the file cannot be read or written, is open to others, or is damaged.
    """
    try:
        return load(path)
    except FileNotFoundError:
        return _create(path, entropy)


def load(path: Path) -> Identity:
    """Read the identity at `path`. Raises FileNotFoundError, and IdentityUnusable as above."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_FILE_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise IdentityUnusable(
            f"cannot read the identity file {path} ({error.strerror}): make it readable by the "
            "user who runs the daemon, or choose another home"
        ) from error
    _check_mode(path, mode)
    return _parse(path, data)


def _check_mode(path: Path, mode: int) -> None:
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise IdentityUnusable(
            f"the identity file {path} is open to other users "
            f"(mode {stat.S_IMODE(mode):04o}): if nobody else has read it, run "
            f"'chmod 600 {path}'; otherwise delete it, and a new identity is made"
        )


def _parse(path: Path, data: bytes) -> Identity:
    advice = "restore it from a copy, or delete it, and a new identity is made"
    if data[:2] in (b"\x08\x00", b"\x08\x02", b"\x08\x03"):
        raise IdentityUnusable(
            f"the identity file {path} holds a key that is not Ed25519: {advice}"
        )
    if len(data) != _FILE_BYTES or not data.startswith(_FILE_PREFIX):
        raise IdentityUnusable(f"the identity file {path} is damaged: {advice}")
    identity = Identity(data[len(_FILE_PREFIX) : -SEED_BYTES])
    if identity.to_file_bytes() != data:
        raise IdentityUnusable(
            f"the identity file {path} is damaged (its two halves do not belong together): {advice}"
        )
    return identity


def _create(path: Path, entropy: Callable[[int], bytes]) -> Identity:
    identity = Identity(entropy(SEED_BYTES))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, identity.to_file_bytes(), PRIVATE_FILE)
    except OSError as error:
        raise IdentityUnusable(
            f"cannot write the identity file {path} ({error.strerror}): "
            f"make {path.parent} writable, or choose another home"
        ) from error
    return identity
