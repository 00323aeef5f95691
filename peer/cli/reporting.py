"""How errors end a command: one sentence on stderr, and an exit code from the closed list.

And the first line of `start` and `join`, for what follows it imports for seconds, and says nothing.
"""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as version_of

import typer

from peer.options.config import PeerConfig
from peer.options.exit_codes import ExitCode
from peer.options.values import LogFormat
from protocol.errors import InvalidRunSpec, LocoError, Refused, leaves


# --- reporting ------------------------------------------------------------------------------------
def exit_code_of(error: LocoError) -> ExitCode:
    """The exit code that goes with `error`."""
    from peer.network.identity import IdentityUnusable
    from peer.network.p2pd import CannotListen
    from peer.observe.control import NoDaemon
    from peer.observe.endpoint import EndpointUnavailable
    from peer.options.config import (
        ConfigError,  # here, because a command that goes well needs none of these
    )
    from peer.state.home import HomeError
    from peer.training.ports import CannotTrain
    from protocol.pipeline.question import CannotPlan
    from protocol.pipeline.tables import BadTable

    usage = (ConfigError, HomeError, InvalidRunSpec, IdentityUnusable, EndpointUnavailable)
    if isinstance(error, (*usage, CannotListen, CannotTrain, BadTable, CannotPlan)):
        return ExitCode.USAGE
    if isinstance(error, Refused):
        return ExitCode.REFUSED
    return ExitCode.NO_DAEMON if isinstance(error, NoDaemon) else ExitCode.FAILURE


@contextmanager
def reported(*, verbose: bool = False) -> Iterator[None]:
    """Turn errors raised inside into a sentence and an exit code.

    Errors of ours show a traceback only when `verbose`; anything else is a bug, and always does.

    Raises:
        typer.Exit
    """
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except typer.Exit:
        raise
    except Exception as error:
        raise typer.Exit(_report(error, verbose=verbose)) from error


def _report(error: Exception, *, verbose: bool) -> ExitCode:
    found = leaves(error)
    if all(isinstance(leaf, KeyboardInterrupt) for leaf in found):
        return ExitCode.INTERRUPTED
    ours = [leaf for leaf in found if isinstance(leaf, LocoError)]
    if verbose or len(ours) < len(found):
        traceback.print_exception(error)
    if len(ours) < len(found):
        print(
            "loco-peer: this is a bug in loco-peer; please report it with the lines above",
            file=sys.stderr,
        )
        return ExitCode.FAILURE
    for sentence in dict.fromkeys(str(leaf) for leaf in ours):
        print(f"loco-peer: {sentence}", file=sys.stderr)
    return exit_code_of(ours[0])


# --- first line -----------------------------------------------------------------------------------
def say_starting(config: PeerConfig) -> None:
    """Say who starts where; not among the lines of JSON, which are those of the event log."""
    if config.log_format is LogFormat.CONSOLE:
        version = version_of("loco-peer")
        print(f"loco-peer {version}: starting in {config.home}", file=sys.stderr, flush=True)
