"""The first line of `start` and `join`: what follows it imports for seconds, and says nothing."""

import sys
from importlib.metadata import version as version_of

from peer.options.config import PeerConfig
from peer.options.values import LogFormat


def say_starting(config: PeerConfig) -> None:
    """Say who starts where; not among the lines of JSON, which are those of the event log."""
    if config.log_format is LogFormat.CONSOLE:
        version = version_of("loco-peer")
        print(f"loco-peer {version}: starting in {config.home}", file=sys.stderr, flush=True)
