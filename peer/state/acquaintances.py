"""Peers that were linked of late, kept in the home: those to look for after a restart.

What is in the file introduces peers, and no more: each is dialled, and proves its identity. It is
a help, so a file that is damaged is as good as none.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from peer.ports.files import replace_file
from protocol.limits import MAX_HELD
from protocol.membership.view import Member

from .home import MAX_SMALL_FILE_BYTES

MAX_KEPT: Final = 32
Known = Mapping[str, tuple[str, ...]]
"""Peer id to addresses."""


class Acquaintances:
    """See the top of the file. Blocking."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: Known | None = None

    def read(self) -> Known:
        """The peers that were there."""
        try:
            with self._path.open("rb") as file:
                tree = json.loads(file.read(MAX_SMALL_FILE_BYTES))
            return {
                str(peer_id): tuple(str(address) for address in addresses[:MAX_HELD])
                for peer_id, addresses in list(tree.items())[:MAX_KEPT]
            }
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def keep(self, members: Iterable[Member]) -> None:
        """Keep these, if there are any: a peer alone remembers those that were there."""
        known = {m.peer_id: m.addresses for m in members if m.addresses}
        kept = dict(list(known.items())[:MAX_KEPT])
        if kept and kept != self._last:
            replace_file(self._path, json.dumps(kept, indent=1).encode())
            self._last = kept
