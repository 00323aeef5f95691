"""Pins of HOST:PORT: trust on first use, kept in the home.

Where a user gives no peer id, the id of whoever answers first is believed and pinned. The pins
stand in a text file, a line each: `HOST:PORT PEER_ID`. Another id at the same place is an error
until its user removes the line, as with ssh's known hosts.
"""

from pathlib import Path
from typing import Final, Protocol

from peer.ports.files import replace_file

from .home import MAX_SMALL_FILE_BYTES, HomeError

FILE_NAME: Final = "known_peers"


class Pins(Protocol):
    """Peer ids by the address that a user gave."""

    def get(self, address: str) -> str | None:
        """The peer id that is pinned there."""

    def put(self, address: str, peer_id: str) -> None:
        """Pin it."""

    @property
    def cure(self) -> str:
        """What a user does to have another id believed."""


class KeptPins:
    """Pins in a file of the home. Raises HomeError where it cannot be read or written."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE_NAME

    @property
    def cure(self) -> str:
        """What a user does to have another id believed."""
        return f"if that is right, remove its line from {self._path} and join again"

    def get(self, address: str) -> str | None:
        """The peer id that is pinned there."""
        return self._read().get(address)

    def put(self, address: str, peer_id: str) -> None:
        """Pin it."""
        pins = {**self._read(), address: peer_id}
        lines = (f"{where} {who}\n" for where, who in sorted(pins.items()))
        try:
            replace_file(self._path, "".join(lines).encode())
        except OSError as error:
            raise HomeError(f"cannot write {self._path}: {error.strerror}") from error

    def _read(self) -> dict[str, str]:
        try:
            with self._path.open("rb") as file:
                text = file.read(MAX_SMALL_FILE_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise HomeError(f"cannot read {self._path}: {error.strerror}") from error
        split = (line.split() for line in text.splitlines())
        return {words[0]: words[1] for words in split if len(words) == 2}


class PassingPins:
    """Pins for as long as the process lives."""

    cure = "if that is right, join again"

    def __init__(self) -> None:
        self._pins: dict[str, str] = {}

    def get(self, address: str) -> str | None:
        """The peer id that is pinned there."""
        return self._pins.get(address)

    def put(self, address: str, peer_id: str) -> None:
        """Pin it."""
        self._pins[address] = peer_id
