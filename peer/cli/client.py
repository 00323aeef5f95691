"""Commands that speak to the daemon of a home over its control socket."""

import json
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import trio

from peer.observe.control import REPLY_TIMEOUT_S, ControlFailed, NoDaemon, NotNow, ask
from peer.options.config import resolve_home
from peer.state.home import Home

LEAVE_TIMEOUT_S: Final = 60.0
"""Beyond the daemon's grace; it ends itself long before."""
WRITE_STATE_TIMEOUT_S: Final = 600.0
WIDE_COLUMNS: Final = 200
_POLL_S: Final = 0.05


def show_status(home: Path | None, *, as_json: bool, full_ids: bool = False) -> None:
    """Print the status, as JSON or as a table.

    Raises:
        NoDaemon, ControlFailed
    """
    tree = trio.run(ask_daemon, home_of(home), "status", REPLY_TIMEOUT_S)
    if as_json:
        print(json.dumps(tree))
        return
    from rich.console import Console

    from peer.observe.status import Status, render

    console = Console()
    if full_ids or not console.is_terminal:  # no id and no address is broken into two lines
        console.width = max(console.width, WIDE_COLUMNS)
    console.print(render(Status.from_json(tree), full_ids=full_ids))


def leave_swarm(home: Path | None) -> None:
    """Ask the daemon to leave, and wait until the home is free.

    Raises:
        NoDaemon, ControlFailed
    """
    trio.run(_leave, home_of(home))


def pause_training(home: Path | None) -> None:
    """Pause the daemon's training when its round is done.

    Raises:
        NoDaemon, ControlFailed
    """
    trio.run(ask_daemon, home_of(home), "pause", REPLY_TIMEOUT_S)
    print("pausing when this round is done; 'loco-peer resume' continues")


def resume_training(home: Path | None) -> None:
    """Resume the daemon's training.

    Raises:
        NoDaemon, ControlFailed
    """
    trio.run(ask_daemon, home_of(home), "resume", REPLY_TIMEOUT_S)
    print("training resumed")


def export_checkpoint(
    home: Path | None, directory: Path, without: Collection[int] = frozenset()
) -> None:
    """Have the daemon write its state, and convert that to `directory`.

    Where none runs, or it has none yet, the newest checkpoint of the home is converted.

    Args:
        without: stages that are not fetched from others; what they hold becomes zeros.

    Raises:
        NoDaemon, ControlFailed, ExportFailed
    """
    of = home_of(home)
    try:
        written = trio.run(ask_daemon, of, "write_state", WRITE_STATE_TIMEOUT_S)
    except (NoDaemon, NotNow) as error:
        from .kept_export import export_kept  # here: it imports torch

        export_kept(of, directory, error)
        return
    from .export import export_state, other_stages  # here: it imports torch

    others = {
        stage: Path(trio.run(_fetch_stage, of, stage, size)["path"])
        for stage, size in other_stages(of, written["part"]).items()
        if stage not in without
    }
    try:
        export_state(of, written, others, directory, without)
    finally:
        for path in others.values():
            path.unlink(missing_ok=True)


def home_of(given: Path | None) -> Home:
    """The home that a command is about."""
    return Home(resolve_home(given, os.environ))


async def _fetch_stage(home: Home, stage: int, padded_parameters: int) -> dict[str, Any]:
    return await ask_daemon(
        home,
        "fetch_stage",
        WRITE_STATE_TIMEOUT_S,
        stage=stage,
        padded_parameters=padded_parameters,
    )


async def ask_daemon(
    home: Home, request: str, timeout_s: float, **arguments: Any
) -> dict[str, Any]:
    """The daemon's reply to a request.

    Raises:
        NoDaemon, ControlFailed; NotNow: one is there, and takes no requests now.
    """
    try:
        return await ask(home.control_socket, request, timeout_s=timeout_s, **arguments)
    except NoDaemon as error:
        if home.in_use():
            since_s = home.held_s()
            raise NotNow(
                f"the daemon of {home.root} takes no requests now: it is starting or ending"
                f" (it has run for {since_s:.0f} s); try again in a few seconds"
            ) from error
        raise _none_in(home) from error


def _none_in(home: Home) -> NoDaemon:
    return NoDaemon(
        f"no daemon is running in {home.root}; start one, or name its home with --home"
        " (a daemon that was just started needs a moment)"
    )


async def _leave(home: Home) -> None:
    """Ask until the daemon answers: it may be about to join again in a new process."""
    if not home.in_use():
        raise _none_in(home)
    limit_s, asked = LEAVE_TIMEOUT_S, False
    with trio.move_on_after(limit_s) as scope:
        while home.in_use():
            if not asked:
                with suppress(NotNow, NoDaemon):
                    reply = await ask_daemon(home, "leave", REPLY_TIMEOUT_S)
                    asked, grace_s = True, reply.get("grace_s", 0.0)
                    limit_s += grace_s
                    scope.deadline += grace_s
            await trio.sleep(_POLL_S)
    if scope.cancelled_caught:
        raise ControlFailed(f"the daemon is still running after {limit_s:.0f} s")
