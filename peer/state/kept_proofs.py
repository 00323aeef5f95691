"""Proofs that owners have lied, kept in the home: a convicted peer stays convicted after a restart.

    msgpack [[owner, proof], ...], the oldest first

What is in the file is believed as little as what a stranger sends: each proof is checked again by
whoever reads it, and one about another group or run convicts nobody. At most MAX_CONTRIBUTORS
proofs are kept, of MAX_KEPT_EVIDENCE_BYTES together; the newest are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgpack

from peer.ports import PeerId
from peer.ports.files import replace_file
from protocol.limits import MAX_CONTRIBUTORS, MAX_KEPT_EVIDENCE_BYTES

MAX_FILE_BYTES: Final = MAX_KEPT_EVIDENCE_BYTES + MAX_CONTRIBUTORS * 256


class KeptProofs:
    """See the top of the file. Blocking."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Sequence[tuple[PeerId, bytes]]:
        """What is kept; nothing where there is no file, or none that can be read."""
        try:
            with self._path.open("rb") as file:
                found = msgpack.unpackb(file.read(MAX_FILE_BYTES), max_map_len=0, max_ext_len=0)
            return [(str(owner), bytes(proof)) for owner, proof in found[-MAX_CONTRIBUTORS:]]
        except (OSError, ValueError, TypeError, msgpack.UnpackException):
            return []

    def keep(self, owner: PeerId, proof: bytes) -> None:
        """Keep one more, and let the oldest go for it. Raises OSError."""
        kept = [each for each in self.read() if each[0] != owner]
        kept = [*kept, (owner, proof)][-MAX_CONTRIBUTORS:]
        while sum(len(each) for _, each in kept) > MAX_KEPT_EVIDENCE_BYTES:
            del kept[0]
        packed: bytes = msgpack.packb(kept)
        replace_file(self._path, packed)
