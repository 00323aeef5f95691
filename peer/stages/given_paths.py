"""Paths that are given, not planned: to measure those of another planner with real peers.

A file `paths.json` in the state folder of a data peer's home takes the place of its plans, from the
next iteration on, and again whenever it is written anew:

    {"paths": {"PEER ID": [["RELAY ID", "RELAY ID"], ...], ...}}

The list of each data peer is gone through once in an iteration, and as often as its microbatches
need. All peers may be given the same file. Relays of stages that nobody is known to hold yet are
looked for again with every look.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import blake3

from peer.ports import PeerId
from protocol.errors import LocoError
from protocol.microbatch.paths import Path as RelayPath
from protocol.routing.plans import PlannedPaths

FILE_NAME: Final = "paths.json"
NO_SNAPSHOT: Final = "given"


class BadPaths(LocoError):
    """The file cannot be used; the message says why."""


class GivenPaths:
    """The paths in a file, if there is one.

    Args:
        stage_of: the stage that a peer holds; None while it is not known.
    """

    def __init__(self, path: Path, stage_of: Callable[[PeerId], int | None]) -> None:
        self._path = path
        self._stage_of = stage_of
        self._taken = b""

    def __repr__(self) -> str:
        return f"<GivenPaths of {self._path}>"

    @property
    def there(self) -> bool:
        """Whether there is such a file."""
        return self._path.exists()

    def news(self) -> PlannedPaths | None:
        """What the file says; None where it has been taken, or names peers that are not known.

        Raises:
            BadPaths
        """
        data = self._path.read_bytes()
        if data == self._taken:
            return None
        try:
            given = {
                str(origin): [tuple(map(str, path)) for path in own]
                for origin, own in json.loads(data)["paths"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadPaths(f"{self._path}: not paths of data peers: {error!r}") from error
        digest = blake3.blake3(data).hexdigest(length=16)
        paths = {}
        for origin, own in given.items():
            stages = [[self._stage_of(relay) for relay in path] for path in own]
            if any(not stage for path in stages for stage in path):
                return None
            paths[origin] = tuple(
                RelayPath(relays, tuple(stage or 0 for stage in held), digest)
                for relays, held in zip(own, stages, strict=True)
            )
        self._taken = data
        return PlannedPaths(NO_SNAPSHOT, digest, 0, paths)
