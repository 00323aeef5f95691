"""Commands that speak to the daemon of a home; they raise NoDaemon, NotNow and ControlFailed."""

import json
import os
import re
import sys
import tomllib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from peer.observe.control import ControlFailed, NoDaemon, NotNow, ask
from peer.options.config import ConfigError, read_text, resolve_home
from peer.options.exit_codes import ExitCode
from peer.state.home import Home, HomeError
from protocol.address.peer_id import public_key_from_peer_id
from protocol.admission.statements import MAX_USES, Verdict
from protocol.errors import InvalidRunSpec, LocoError, RemoteProtocolError
from protocol.limits import ANSWER_S, MAX_SPEC_BYTES
from protocol.run.amendments import MODE, values_of
from protocol.run.run_spec import RunSpec, parse_toml
from protocol.run.signed_spec import SignedSpec

LEAVE_TIMEOUT_S: Final = 60.0
"""Beyond the daemon's grace; it ends itself long before."""
SLOW_S: Final = 3700.0
"""How long the daemon may take to write a state, or to ask peers on slow lines, one by one."""
WIDE_COLUMNS: Final = 200


def home_of(given: Path | None) -> Home:
    return Home(resolve_home(given, os.environ))


def run_of(home: Home) -> RunSpec:
    """The run of this home. Raises HomeError: it belongs to none."""
    signed = home.run()
    if signed is None:
        raise HomeError(f"{home.root} belongs to no run yet: there is no model")
    return signed.spec()


def spec_of(home: Home) -> RunSpec:
    """The run of this home, or its expert's model alone."""
    spec = run_of(home)
    number = spec.expert_named(home.expert() if spec.experts else None)
    return spec if number is None else spec.of_expert(number)


def check_exportable(home: Home, *, swarm: bool = False) -> None:
    """Raises NoDaemon: neither a daemon nor a checkpoint can give weights."""
    if home.in_use():
        return
    if swarm:
        raise _none_in(home)
    if not any(home.checkpoints_dir.glob("*")):
        raise NoDaemon(f"{_none_in(home)}; the home has no checkpoint either")


def ask_now(
    home: Home, request: str, timeout_s: float = ANSWER_S, **arguments: Any
) -> dict[str, Any]:
    return trio.run(lambda: ask_daemon(home, request, timeout_s, **arguments))


async def ask_daemon(
    home: Home, request: str, timeout_s: float, **arguments: Any
) -> dict[str, Any]:
    try:
        return await ask(home.control_socket, request, timeout_s=timeout_s, **arguments)
    except NoDaemon as error:
        if home.in_use():
            raise NotNow(
                f"the daemon of {home.root} takes no requests now: it is starting or ending"
                f" (it has run for {home.held_s():.0f} s); try again in a few seconds"
            ) from error
        raise _none_in(home) from error


def _none_in(home: Home) -> NoDaemon:
    return NoDaemon(
        f"no daemon is running in {home.root}; start one, or name its home with --home"
        " (a daemon that was just started needs a moment)"
    )


def show_status(home: Home, *, as_json: bool, full_ids: bool) -> None:
    tree = ask_now(home, "status")
    if as_json:
        print(json.dumps(tree))
        return
    from rich.console import Console

    from peer.observe.status import Status, render

    console = Console()
    if full_ids or not console.is_terminal:  # no id and no address is broken into two lines
        console.width = max(console.width, WIDE_COLUMNS)
    console.print(render(Status.from_json(tree), full_ids=full_ids))


def watch(home: Home) -> None:
    """Raises ConfigError: there is no terminal. NoDaemon, NotNow, ControlFailed: nobody answers."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("top needs a terminal; for programs there is: loco-peer status --json")
    read = partial(ask_now, home, "snapshot", history=True)
    read()
    from .top import Top  # after the checks, because textual imports for a second

    Top(read).run()


def say_health(home: Home) -> ExitCode:
    """For health checks, which know two exit codes: 0 where the peer does its part, else 1."""
    from peer.observe.status import Status, health_of

    try:
        status = Status.from_json(ask_now(home, "status"))
        works, sentence = health_of(status, founder=home.founder_key_path.exists())
    except LocoError as error:
        works, sentence = False, str(error)
    print(sentence)
    return ExitCode.OK if works else ExitCode.FAILURE


def leave_swarm(home: Home) -> None:
    from peer.process.bottom_line import shown

    with shown("waiting until the daemon has left: it writes a checkpoint first"):
        trio.run(_leave, home)


async def _leave(home: Home) -> None:
    """Ask until the daemon answers: it may be about to join again in a new process."""
    if not home.in_use():
        raise _none_in(home)
    limit_s, asked = LEAVE_TIMEOUT_S, False
    with trio.move_on_after(limit_s) as scope:
        while home.in_use():
            if not asked:
                with suppress(NotNow, NoDaemon):
                    reply = await ask_daemon(home, "leave", ANSWER_S)
                    asked, grace_s = True, reply.get("grace_s", 0.0)
                    limit_s += grace_s
                    scope.deadline += grace_s
            await trio.sleep(0.05)
    if scope.cancelled_caught:
        raise ControlFailed(f"the daemon is still running after {limit_s:.0f} s")


UNITS_S: Final = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
SHORT_ID: Final = re.compile(r"[1-9A-HJ-NP-Za-km-z]{4,16}")
"""The end of a peer id, as `status` shows it."""
DONE: Final = {Verdict.ADMIT: "admitted", Verdict.BAN: "banned", Verdict.DELEGATE: "delegated to"}


def print_invitation(home: Home, expires: str, uses: int) -> None:
    """Print the command with which the invited peer joins. Raises ConfigError."""
    if not 1 <= uses <= MAX_USES:
        raise ConfigError(f"--uses: must be from 1 to {MAX_USES} (got {uses})")
    made = ask_now(home, "invite", lasts_s=duration_s(expires), uses=uses)
    print(f"LOCO_INVITE={made['token']} loco-peer join --bootstrap {made['address']}")
    if made["note"]:
        print(f"({made['note']})", file=sys.stderr)


def rule(home: Home, verdict: Verdict, peer: str) -> None:
    """Raises ConfigError: no peer id."""
    if not SHORT_ID.fullmatch(peer):
        try:
            public_key_from_peer_id(peer)
        except RemoteProtocolError as error:
            raise ConfigError(
                f"{error}; `loco-peer status` shows a peer's own id, and of the other peers the"
                " last eight characters, which are enough here"
            ) from error
    reply = ask_now(home, "rule", verdict=str(verdict), peer=peer)
    print(f"{DONE[verdict]} {reply['peer']}")


def duration_s(text: str) -> int:
    """Read a whole number and m, h, d or w. Raises ConfigError."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text)
    lasts_s = 0 if found is None else int(found[1]) * UNITS_S[found[2]]
    if not 0 < lasts_s <= 3660 * UNITS_S["d"]:
        raise ConfigError(
            f"--expires: use a whole number and m, h, d or w, up to ten years: 7d (got {text!r})"
        )
    return lasts_s


def amend_run(home: Home, run_toml: Path | None, at_round: int | None, *, dry_run: bool) -> None:
    """Amend, and print what changes. Raises ConfigError, InvalidRunSpec."""
    if run_toml is None:
        raise ConfigError("name the run spec with your changes: loco-peer amend RUN.toml")
    values = _written(run_toml, home.run())
    reply = ask_now(home, "amend", values=values, at_round=at_round, dry_run=dry_run)
    would = "would change" if dry_run else "changes"
    at_once, later = list[str](), list[str]()
    for key, before, after in reply["changes"]:
        (at_once if key == MODE else later).append(f"  {key}: {before} -> {after}")
    at_once += [f"  admitted: {peer}" for peer in reply["admitted"]]
    if later:
        print(
            f"{would} from round {reply['round']:,} on (step {reply['step']:,}; the run is in round"
            f" {reply['present']:,}, and ends with round {reply['end']:,}):"
        )
        print(*later, sep="\n")
    if at_once:
        print(f"{would} at once:", *at_once, sep="\n")


def name_successor(home: Home, other: Home) -> None:
    """Name the run of another home here as what follows; its daemon says by which address.

    Raises ConfigError: that home is of no other run.
    """
    own, signed = home.run(), other.run()
    if (why := _why_none_follows(own, signed)) is not None:
        raise ConfigError(
            f"--successor: {other.root} {why}; name the home of a peer that trains the next one"
        )
    assert signed is not None
    status = ask_now(other, "status")
    run_id, address = signed.run_id, status["address"]
    ask_now(home, "name_successor", run_id=run_id, address=address)
    print(f"peers with --follow join '{signed.spec().name}' ({run_id}) when this run is over, by")
    print(f"  {address} (reachable from {status['reachable_from']})")


def _why_none_follows(own: SignedSpec | None, other: SignedSpec | None) -> str | None:
    if other is None:
        return "belongs to no run yet"
    if own is not None and own.run_id == other.run_id:
        return "is of this very run"
    return "is of a run with experts, which is joined by hand" if other.spec().experts else None


def show_amendments(home: Home) -> None:
    from peer.observe.status import amendment_lines, successor_lines  # slow to import: the record

    status = ask_now(home, "status")
    lines = amendment_lines(status["amendments"]) or ["nothing has been amended"]
    lines += [f"successor: {line}" for line in successor_lines(status["successor"])]
    print(*lines, sep="\n")


def _written(path: Path, signed: SignedSpec | None) -> dict[str, Any]:
    """Values of the keys that a file names. Raises ConfigError, InvalidRunSpec.

    Args:
        signed: the run's spec, to which the file's keys are added where they make none alone.
    """
    text = read_text(path, MAX_SPEC_BYTES)
    try:
        try:
            spec = parse_toml(text)
        except InvalidRunSpec:
            if signed is None:
                raise
            spec = parse_toml(text, beside=signed.spec())
        return values_of(spec, tomllib.loads(text))
    except InvalidRunSpec as error:
        raise InvalidRunSpec(f"{path}: {error}") from error
