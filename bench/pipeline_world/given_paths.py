"""A planner of data peers that plans nothing: it has the paths that it is given.

As soon as a snapshot has all peers that they name, they are the plan; before, there is none. The
paths of each data peer are gone through once in an iteration, and as often as its microbatches
need.
"""

import json
from typing import Final

import blake3

from protocol.routing.routers import PlannedPaths
from protocol.routing.snapshots import LinkSnapshot, Terms
from protocol.wire.stage_messages import Path

GIVEN: Final = "GIVEN_PATHS"
"""Environment variable: JSON, the paths of each data peer as lists of relays, all by peer id."""


class GivenPaths:
    """See the top of the file. Is a `Planner` (peer/stages/survey.py)."""

    def __init__(self, table: str) -> None:
        self._paths: dict[str, list[list[str]]] = json.loads(table)
        self.digest = blake3.blake3(table.encode()).hexdigest(length=16)

    def __call__(self, snapshot: LinkSnapshot, terms: Terms, visited: int) -> PlannedPaths | None:
        """The given paths; None while the snapshot lacks some of their peers."""
        stage_of = {vector.peer_id: vector.stage for vector in snapshot.vectors}
        named = {relay for own in self._paths.values() for path in own for relay in path}
        if not stage_of.keys() >= named | self._paths.keys():
            return None
        paths = {
            origin: tuple(
                Path(tuple(relays), tuple(stage_of[relay] for relay in relays), self.digest)
                for relays in own
            )
            for origin, own in self._paths.items()
        }
        return PlannedPaths(snapshot.digest, self.digest, 0, paths)
