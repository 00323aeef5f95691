"""`loco-peer amend`: changes of the run of a home while it is under way."""

import tomllib
from pathlib import Path
from typing import Any

import trio

from peer.observe.control import REPLY_TIMEOUT_S
from peer.observe.status import amendment_lines
from peer.options.config import ConfigError
from protocol.errors import InvalidRunSpec
from protocol.run.amendments import MODE, values_of
from protocol.run.run_spec import RunSpec, parse_toml
from protocol.run.signed_spec import SignedSpec

from .client import ask_daemon, home_of


def amend_run(
    home: Path | None, run_toml: Path | None, at_round: int | None, *, dry_run: bool
) -> None:
    """Have the daemon amend its run, and print what changes.

    Raises:
        ConfigError, InvalidRunSpec, NoDaemon, ControlFailed
    """
    if run_toml is None:
        raise ConfigError("name the run spec with your changes: loco-peer amend RUN.toml")
    of = home_of(home)
    values = _written(run_toml, of.run())
    wanted = {"values": values, "at_round": at_round, "dry_run": dry_run}
    told = trio.run(lambda: ask_daemon(of, "amend", REPLY_TIMEOUT_S, **wanted))
    for line in _lines(told, dry_run=dry_run):
        print(line)


def show_amendments(home: Path | None) -> None:
    """Print what has been amended.

    Raises:
        NoDaemon, ControlFailed
    """
    status = trio.run(ask_daemon, home_of(home), "status", REPLY_TIMEOUT_S)
    for line in amendment_lines(status["amendments"]) or ["nothing has been amended"]:
        print(line)


def _written(path: Path, signed: SignedSpec | None) -> dict[str, Any]:
    """The keys that a file says, and their values; what it leaves out stays as it is.

    Args:
        signed: the run's, beside whose keys those of the file are read where they are not enough
            for a run spec by themselves.

    Raises:
        ConfigError: it cannot be read.
        InvalidRunSpec: it is no run spec.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        return values_of(_read(text, signed), tomllib.loads(text))
    except InvalidRunSpec as error:
        raise InvalidRunSpec(f"{path}: {error}") from error


def _read(text: str, signed: SignedSpec | None) -> RunSpec:
    try:
        return parse_toml(text)
    except InvalidRunSpec:
        if signed is None:
            raise
        return parse_toml(text, beside=signed.spec())


def _lines(told: dict[str, Any], *, dry_run: bool) -> list[str]:
    """What is said of an amendment."""
    would = "would change" if dry_run else "changes"
    scheduled = [change for change in told["changes"] if change[0] != MODE]
    lines = []
    if scheduled:
        lines.append(
            f"{would} from round {told['round']:,} on (step {told['step']:,}; the run is in round"
            f" {told['present']:,}, and ends with round {told['end']:,}):"
        )
        lines += [_change(*change) for change in scheduled]
    at_once = [_change(*change) for change in told["changes"] if change[0] == MODE]
    at_once += [f"  admitted: {peer}" for peer in told["admitted"]]
    return lines + ([f"{would} at once:", *at_once] if at_once else [])


def _change(key: str, before: Any, after: Any) -> str:
    return f"  {key}: {before} -> {after}"
