"""`loco-peer invite`, `admit`, `ban` and `delegate`: admission to the run of a home."""

import re
import sys
from pathlib import Path
from typing import Final

import trio

from peer.observe.control import REPLY_TIMEOUT_S
from peer.options.config import ConfigError
from protocol.address.peer_id import public_key_from_peer_id
from protocol.admission.statements import MAX_USES, Verdict
from protocol.errors import RemoteProtocolError

from .client import ask_daemon, home_of

UNITS_S: Final = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
SHORT_ID: Final = re.compile(r"[1-9A-HJ-NP-Za-km-z]{4,16}")
"""The end of a peer id, as `status` shows it."""
DONE: Final = {Verdict.ADMIT: "admitted", Verdict.BAN: "banned", Verdict.DELEGATE: "delegated to"}
MAX_LASTS_S: Final = 10 * 366 * 86_400


def print_invitation(home: Path | None, expires: str, uses: int) -> None:
    """Print the command with which the invited peer joins.

    Raises:
        ConfigError, NoDaemon, ControlFailed
    """
    if not 1 <= uses <= MAX_USES:
        raise ConfigError(f"--uses: must be from 1 to {MAX_USES} (got {uses})")
    wanted = {"lasts_s": duration_s(expires), "uses": uses}
    made = trio.run(lambda: ask_daemon(home_of(home), "invite", REPLY_TIMEOUT_S, **wanted))
    print(f"loco-peer join --bootstrap {made['address']} --invite {made['token']}")
    if made["note"]:
        print(f"({made['note']})", file=sys.stderr)


def rule(home: Path | None, verdict: Verdict, peer: str) -> None:
    """Have the daemon rule on a peer.

    Raises:
        ConfigError, NoDaemon, ControlFailed
    """
    if not SHORT_ID.fullmatch(peer):
        try:
            public_key_from_peer_id(peer)
        except RemoteProtocolError as error:
            raise ConfigError(
                f"{error}; `loco-peer status` shows a peer's own id, and of the other peers the"
                " last eight characters, which are enough here"
            ) from error
    wanted = {"verdict": str(verdict), "peer": peer}
    told = trio.run(lambda: ask_daemon(home_of(home), "rule", REPLY_TIMEOUT_S, **wanted))
    print(f"{DONE[verdict]} {told['peer']}")


def duration_s(text: str) -> int:
    """A time as users write it: a whole number and m, h, d or w.

    Raises:
        ConfigError
    """
    found = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text)
    lasts_s = 0 if found is None else int(found[1]) * UNITS_S[found[2]]
    if not 0 < lasts_s <= MAX_LASTS_S:
        raise ConfigError(
            f"--expires: use a whole number and m, h, d or w, up to ten years: 7d (got {text!r})"
        )
    return lasts_s
