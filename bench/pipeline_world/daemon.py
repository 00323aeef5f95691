"""The daemon with stated compute (trainer.py) and given paths; else it is `loco-peer`.

python -m bench.pipeline_world.daemon start|join ...
"""

import os
from functools import partial
from typing import Final
from unittest import mock

import peer.daemon.peer
from peer.cli import main as loco_peer
from peer.stages.roles import exchange_of
from peer.training import child_process

from .given_paths import GIVEN, GivenPaths

TRAINER: Final = "bench.pipeline_world.trainer"


def main() -> None:
    """Run the command line."""
    following = partial(exchange_of, plan=GivenPaths(os.environ[GIVEN]))
    with (
        mock.patch.object(child_process, "PROGRAM", TRAINER),
        mock.patch.object(peer.daemon.peer, "exchange_of", following),
    ):
        loco_peer()


if __name__ == "__main__":
    main()
