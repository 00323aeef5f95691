"""When only a new process can heal us: enter the swarm again by the peers we know.

What calls for it:

- weights that are too old to be averaged (protocol/schedule/rounds.py, rule 5);
- weights that came too late for the final averaging, when others have better ones;
- another stage of a pipeline, or another expert, that needs us more;
- a run that ended while this peer was paused, or was made longer after this peer had ended it;
- a run that follows ours when that is over.

The new process keeps home, identity and options, and joins by the peers that the home remembers,
which were alive a moment ago (peer/daemon/returning.py); its state comes from them. So what
strangers say of where they are stands on no command line, and none of them can send us away by
refusing us.
"""

import sys
from collections.abc import Iterable
from typing import Final

from peer.options.config import OPTIONS, SECRETS, PeerConfig
from peer.options.values import Origin
from protocol.admission.statements import Successor
from protocol.errors import LocoError
from protocol.membership.view import Member


class JoinAgain(LocoError):
    """A new process should join, as this one cannot go on.

    Attributes:
        part: of the model, that the new one is to hold; None leaves it as it is.
        successor: the run that the new one is to join; None is the same.
    """

    def __init__(
        self, why: str, part: str | None = None, successor: Successor | None = None
    ) -> None:
        super().__init__(why)
        self.part = part
        self.successor = successor


def can_be_joined(members: Iterable[Member]) -> bool:
    """Whether some of them say where they can be dialled."""
    return any(member.addresses for member in members)


def join_the_finished(alive: Iterable[Member]) -> None:
    """Raises JoinAgain if some of these peers have ended the run without us."""
    from peer.facts import PeerState  # slow to import, and the command line reads this file

    if can_be_joined(m for m in alive if m.progress.state == PeerState.FINISHED):
        raise JoinAgain("it came too late for the final averaging")


NOT_REPEATED: Final = frozenset({"home", *SECRETS})


def rejoin_command(config: PeerConfig) -> list[str]:
    """The command line of the new process; environment and file say the rest again.

    No secret is said again, nor an address but the user's: the home has kept an invitation, and
    what it has not kept is handed on in the environment.
    """
    command = [sys.executable, sys.argv[0], "join", "--home", str(config.home)]
    for name, option in OPTIONS.items():
        if config.origins[name] is Origin.COMMAND_LINE and name not in NOT_REPEATED:
            command += _spelled(f"--{name}", getattr(config, option.attribute))
    return command


def handed_on(config: PeerConfig) -> dict[str, str]:
    """Variables for the new process: secrets that only the command line has named."""
    return {
        OPTIONS[name].environment_name: value
        for name in SECRETS
        if config.origins[name] is Origin.COMMAND_LINE
        and isinstance(value := getattr(config, OPTIONS[name].attribute), str)
    }


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
