"""When only a new process can heal us: enter the swarm again by the peers we know.

A hung thread cannot be killed, so a directory that hangs again and again takes the process with it.
The new process keeps home, identity and options, and joins by peers that were alive a moment ago;
its state comes from them.
"""

import sys
from collections.abc import Sequence

from peer.config import OPTIONS, Origin, PeerConfig
from peer.ports import Address
from protocol.errors import LocoError


class JoinAgain(LocoError):
    """This process cannot go on; a new one should join by these addresses."""

    def __init__(self, addresses: Sequence[Address], why: str) -> None:
        super().__init__(why)
        self.addresses = tuple(addresses)


def rejoin_command(config: PeerConfig, addresses: Sequence[Address]) -> list[str]:
    """The command line of the new process; environment and file say the rest again."""
    command = [sys.executable, sys.argv[0], "join", "--home", str(config.home)]
    for address in addresses:
        command += ["--bootstrap", address]
    for option in OPTIONS:
        given = config.origins[option.name] is Origin.COMMAND_LINE
        if given and option.name not in ("home", "bootstrap"):
            command += _spelled(f"--{option.name}", getattr(config, option.attribute))
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
