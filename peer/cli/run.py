"""`start` and `join`: check everything that must be right, then run the daemon."""

import os
import sys
from pathlib import Path

import trio

from peer.options.config import ConfigError, PeerConfig
from peer.options.exit_codes import ExitCode
from peer.options.run_options import check_options
from peer.process.exception_groups import leaves
from peer.process.imports import large_imports
from peer.process.rejoin import JoinAgain, rejoin_command
from peer.state.home import Home
from peer.training.child_process import spare_child
from protocol.errors import InvalidRunSpec
from protocol.limits import MAX_SPEC_BYTES
from protocol.run.run_spec import RunSpec, parse_toml


async def _run_daemon(config: PeerConfig, spec: RunSpec | None, home: Home) -> ExitCode:
    """Start the trainer's process, then the daemon: both import for seconds, at the same time."""
    async with spare_child(config.threads or 0) as spare:
        with large_imports():
            _check_device(config)
            from peer.daemon.run import run_daemon

        return await run_daemon(config, spec, home, spare)


def _check_founder(config: PeerConfig) -> None:
    """Refuse a stage that a founder cannot hold. Raises ConfigError."""
    if config.stage:
        raise ConfigError(
            f"stage = {config.stage} ({config.origins['stage']}): the first peer of a run holds"
            " stage 0; leave it out, or join with it"
        )


def _check_device(config: PeerConfig) -> None:
    """Refuse a device that is not here, as soon as torch can tell. Raises ConfigError."""
    if config.device is None:
        return
    from peer.training.device import choose_device

    try:
        choose_device(config.device)
    except ValueError as error:
        where = config.origins["device"]
        raise ConfigError(f"device = {config.device} ({where}): {error}") from error


def run_peer(config: PeerConfig, run_toml: Path | None) -> ExitCode:
    """Run a daemon in the foreground until it ends.

    Args:
        config: of this machine.
        run_toml: the run to found; None joins one.

    Raises:
        LocoError: configuration, run spec or home cannot be used, or the swarm refused us.
    """
    spec = None if run_toml is None else read_spec(run_toml)
    if spec is None and not config.bootstrap:
        raise ConfigError("join needs an address to join by: --bootstrap ADDR, or LOCO_BOOTSTRAP")
    if spec is not None and config.bootstrap:
        raise ConfigError(
            "start founds a new run and takes no bootstrap address"
            f" ({config.origins['bootstrap']}); to join one: loco-peer join --bootstrap ADDR"
        )
    if spec is not None:
        _check_founder(config)
        check_options(config, spec)
    _show(config)
    home = Home(config.home)
    home.prepare()
    with home.locked():
        code, again = ExitCode.OK, None
        try:
            code = trio.run(_run_daemon, config, spec, home)
        except* JoinAgain as group:
            again = next(error for error in leaves(group) if isinstance(error, JoinAgain))
    if again is not None:
        print(f"loco-peer: {again}; joining again in a new process", file=sys.stderr, flush=True)
        command = rejoin_command(config, again.addresses)
        os.execv(command[0], command)  # noqa: S606 - our own command line, and no shell
    return code


def read_spec(path: Path) -> RunSpec:
    """Read and check a run spec.

    Raises:
        InvalidRunSpec: names the file, and what to change.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SPEC_BYTES + 1)
        if len(data) > MAX_SPEC_BYTES:
            raise InvalidRunSpec(f"longer than {MAX_SPEC_BYTES} bytes")
        return parse_toml(data.decode())
    except OSError as error:
        raise InvalidRunSpec(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRunSpec(f"{path}: not UTF-8 text") from error
    except InvalidRunSpec as error:
        raise InvalidRunSpec(f"{path}: {error}") from error


def _show(config: PeerConfig) -> None:
    if config.verbose:
        print(*config.describe(), sep="\n", file=sys.stderr)
