"""Small files of a home: other peers, proofs against them, and the run's admission.

    neighbours.json  peers that were linked recently, to be dialled after a restart; each proves its
                     identity then.
    admission        msgpack [run id, the run's secret or nothing, our own pass, statements]. Secret
                     and pass are why only the owner may read the file.
    state/proofs     msgpack [[owner, proof], ...], the oldest first: proofs that owners have lied,
                     each checked again when it is read.
    known_peers      `HOST:PORT PEER_ID`, a line each: trust on first use. Another id at the same
                     place is an error until the user removes the line, as with ssh's known hosts.

All are replaced atomically. Of the first three, a damaged one counts as none: what is lost comes
again from other peers, except a pass.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from peer.runtime import PeerId
from peer.runtime.files import PRIVATE_FILE, replace_file
from protocol import limits
from protocol.membership.view import Member

from .home import read_small, replace_small

T = TypeVar("T")


def _read(path: Path, parse: Callable[[bytes], T], otherwise: T) -> T:
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError, TypeError, AttributeError, msgpack.UnpackException):
        return otherwise


# --- neighbours -----------------------------------------------------------------------------------
class Acquaintances:
    """The file of neighbours, at most MAX_LINKS. Blocking."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: Mapping[PeerId, Sequence[str]] = {}

    def read(self) -> Mapping[PeerId, tuple[str, ...]]:
        return _read(self._path, _addresses, {})

    def keep(self, members: Iterable[Member]) -> None:
        """Keep these, if there are any: a peer alone remembers earlier ones."""
        known = {m.peer_id: m.addresses for m in members if m.addresses}
        kept = dict(list(known.items())[: limits.MAX_LINKS])
        if kept and kept != self._last:
            replace_file(self._path, json.dumps(kept, indent=1).encode())
            self._last = kept


def _addresses(data: bytes) -> Mapping[PeerId, tuple[str, ...]]:
    return {
        str(peer_id): tuple(map(str, addresses[: limits.MAX_ADDRESSES_PER_PEER]))
        for peer_id, addresses in list(json.loads(data).items())[: limits.MAX_LINKS]
    }


# --- admission ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class KeptAdmission:
    """The content of the file; the run id is None before the first run."""

    run_id: str | None = None
    secret: bytes | None = None
    own_pass: bytes = b""
    statements: tuple[bytes, ...] = ()

    def to_bytes(self) -> bytes:
        fields = [self.run_id, self.secret, self.own_pass, list(self.statements)]
        data: bytes = msgpack.packb(fields)
        return data


class AdmissionFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> KeptAdmission:
        return _read(self._path, _admission, KeptAdmission())

    def write(self, kept: KeptAdmission) -> None:
        replace_file(self._path, kept.to_bytes(), PRIVATE_FILE)


def _admission(data: bytes) -> KeptAdmission:
    run_id, secret, own_pass, statements = msgpack.unpackb(data)
    return KeptAdmission(run_id, secret, bytes(own_pass), tuple(map(bytes, statements)))


# --- proofs ---------------------------------------------------------------------------------------
class ProofFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Sequence[tuple[PeerId, bytes]]:
        return _read(self._path, _proofs, [])

    def keep(self, owner: PeerId, proof: bytes) -> None:
        """Keep one more; the oldest go where they are too many, or too long. Raises OSError."""
        kept = [each for each in self.read() if each[0] != owner]
        kept = [*kept, (owner, proof)][-limits.MAX_CONVICTED :]
        while sum(len(each) for _, each in kept) > limits.MAX_KEPT_EVIDENCE_BYTES:
            del kept[0]
        packed: bytes = msgpack.packb(kept)
        replace_file(self._path, packed)


def _proofs(data: bytes) -> Sequence[tuple[PeerId, bytes]]:
    found: Any = msgpack.unpackb(data, max_map_len=0, max_ext_len=0)
    return [(str(owner), bytes(proof)) for owner, proof in found[-limits.MAX_CONVICTED :]]


# --- pins -----------------------------------------------------------------------------------------
class Pins:
    """For each address that a user gave, the id of the peer that answered there first.

    Without a path they are kept in memory. Methods raise HomeError.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._passing: dict[str, PeerId] = {}

    @property
    def cure(self) -> str:
        """Advice for a user who wants another id believed."""
        removed = f", remove its line from {self._path} and" if self._path else ","
        return f"if that is right{removed} join again"

    def get(self, address: str) -> PeerId | None:
        return self._read().get(address)

    def put(self, address: str, peer_id: PeerId) -> None:
        self._passing = {**self._read(), address: peer_id}
        if self._path is not None:
            lines = (f"{where} {who}\n" for where, who in sorted(self._passing.items()))
            replace_small(self._path, "".join(lines).encode())

    def _read(self) -> Mapping[str, PeerId]:
        if self._path is None:
            return self._passing
        text = (read_small(self._path) or b"").decode(errors="replace")
        split = (line.split() for line in text.splitlines())
        return {words[0]: words[1] for words in split if len(words) == 2}
