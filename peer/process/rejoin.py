"""When only a new process can heal us: enter the swarm again by the peers we know.

Three things call for it: weights that are too old to be averaged (protocol/schedule/rounds.py, rule
5), those that came too late for the final averaging, when others have better ones, and another
stage of a pipeline that needs us more. The new process keeps home, identity and options, and joins
by peers that were alive a moment ago; its state comes from them.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Final

from peer.options.config import OPTIONS, SECRETS, Origin, PeerConfig
from peer.runtime import Address
from protocol.errors import LocoError
from protocol.membership.view import Member

MAX_ADDRESSES: Final = 8
"""Peers named to the new process."""


class JoinAgain(LocoError):
    """A new process should join by these addresses, as this one cannot go on.

    Attributes:
        stage: of a pipeline, that the new one is to hold; None leaves it as it is.
    """

    def __init__(self, addresses: Sequence[Address], why: str, stage: int | None = None) -> None:
        super().__init__(why)
        self.addresses = tuple(addresses)
        self.stage = stage


def addresses_of(members: Iterable[Member]) -> list[Address]:
    """Full multiaddrs, one of each member, to join by."""
    known = [(m.addresses[0], m.peer_id) for m in members if m.addresses]
    return [
        address if "/p2p/" in address else f"{address}/p2p/{peer_id}"
        for address, peer_id in known[:MAX_ADDRESSES]
    ]


def join_the_finished(alive: Iterable[Member]) -> None:
    """Raises JoinAgain if some of these peers have ended the run without us."""
    from peer.facts import PeerState  # slow to import, and the command line reads this file

    addresses = addresses_of(m for m in alive if m.progress.state == PeerState.FINISHED)
    if addresses:
        raise JoinAgain(addresses, "it came too late for the final averaging")


def rejoin_command(config: PeerConfig, addresses: Sequence[Address]) -> list[str]:
    """The command line of the new process; environment and file say the rest again.

    An invitation is not said again: the home has kept what came of it.
    """
    command = [sys.executable, sys.argv[0], "join", "--home", str(config.home)]
    for address in addresses:
        command += ["--bootstrap", address]
    for name, option in OPTIONS.items():
        given = config.origins[name] is Origin.COMMAND_LINE
        if given and name not in ("home", "bootstrap", *SECRETS):
            command += _spelled(f"--{name}", getattr(config, option.attribute))
    return command


def _spelled(flag: str, value: object) -> list[str]:
    match value:
        case True:
            return [flag]
        case False | None:
            return []
        case tuple():
            return [part for each in value for part in (flag, str(each))]
        case _:
            return [flag, str(value)]
