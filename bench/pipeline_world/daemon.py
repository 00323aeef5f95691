"""The daemon whose trainer has stated compute (trainer.py); else it is `loco-peer`.

python -m bench.pipeline_world.daemon start|join ...
"""

from typing import Final
from unittest import mock

from peer.cli import main as loco_peer
from peer.training import child_process

TRAINER: Final = "bench.pipeline_world.trainer"


def main() -> None:
    """Run the command line."""
    with mock.patch.object(child_process, "PROGRAM", TRAINER):
        loco_peer()


if __name__ == "__main__":
    main()
