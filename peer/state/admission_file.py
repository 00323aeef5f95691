"""What a home keeps of its run's admission, so that a peer that starts again knows whom it knew.

    msgpack [run id, the run's secret or nothing, our own pass, statements]

The secret and the pass are why only the owner may read the file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgpack

from peer.ports.files import PRIVATE_FILE, replace_file
from protocol.limits import MAX_AMENDMENTS, MAX_MEMBERS, MAX_STATEMENT_BYTES

MAX_STATEMENTS: Final = MAX_MEMBERS + MAX_MEMBERS + MAX_AMENDMENTS
MAX_FILE_BYTES: Final = (MAX_STATEMENTS + 2) * (MAX_STATEMENT_BYTES + 8)


@dataclass(frozen=True, slots=True)
class KeptAdmission:
    """See the top of the file; the run id is None before the first run."""

    run_id: str | None = None
    secret: bytes | None = None
    own_pass: bytes = b""
    statements: tuple[bytes, ...] = ()


class AdmissionFile:
    """One file in one home."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> KeptAdmission:
        """What is kept; nothing where there is no file, or none that can be read.

        Whatever is lost comes again from the peers that this one links with, but for a pass.
        """
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES)
            run_id, secret, own_pass, statements = msgpack.unpackb(data)
            return KeptAdmission(run_id, secret, bytes(own_pass), tuple(map(bytes, statements)))
        except (OSError, ValueError, TypeError):
            return KeptAdmission()

    def write(self, kept: KeptAdmission) -> None:
        """Replace what is kept. Raises OSError."""
        data: bytes = msgpack.packb(
            [kept.run_id, kept.secret, kept.own_pass, list(kept.statements)]
        )
        replace_file(self._path, data, PRIVATE_FILE)
