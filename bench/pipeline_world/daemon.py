"""The daemon whose trainer has stated compute, and whose paths stand in a file.

    python -m bench.pipeline_world.daemon start|join ...

It is `loco-peer`, but for these two. The file, which PATHS names, is JSON: data peer to the paths
of its microbatches, each the relays' peer ids and their stages. Until it is there, paths are those
of the run.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from unittest import mock

from peer.cli import main as loco_peer
from peer.stages import exchange
from peer.training import child_process
from protocol.microbatch.paths import Path as Route
from protocol.microbatch.paths import Relays, Router
from protocol.pipeline.problem import PathRules
from protocol.routing.routers import router_of
from protocol.run.run_spec import RunSpec

PATHS: Final = "GIVEN_PATHS"
TRAINER: Final = "bench.pipeline_world.trainer"


class GivenRouter:
    """The paths of the file, once it is there; else those of the run's own router."""

    def __init__(self, origin: str, usual: Router) -> None:
        self._origin = origin
        self._usual = usual

    def paths(self, iteration: int, microbatches: int, relays: Relays) -> Sequence[Route]:
        """One for each microbatch."""
        try:
            tree = json.loads(Path(os.environ[PATHS]).read_text())
        except FileNotFoundError:
            return self._usual.paths(iteration, microbatches, relays)
        return [Route(tuple(path), tuple(stages)) for path, stages in tree[self._origin]]

    def another(self, before: Route, turn: int, relays: Relays) -> Route | None:
        """As usual."""
        return self._usual.another(before, turn, relays)

    def whole(self, turn: int, relays: Relays) -> Route | None:
        """As usual."""
        return self._usual.whole(turn, relays)


def given_router(spec: RunSpec, origin: str, rules: PathRules) -> Router:
    """In place of the run's router."""
    return GivenRouter(origin, router_of(spec, origin, rules))


def main() -> None:
    """Run the command line."""
    with (
        mock.patch.object(child_process, "PROGRAM", TRAINER),
        mock.patch.object(exchange, "router_of", given_router),
    ):
        loco_peer()


if __name__ == "__main__":
    main()
