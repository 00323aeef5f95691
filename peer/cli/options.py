"""The options of the commands; those of a peer are declared in peer/options/config.py.

An option that is not given is None: environment or file may still set it.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from peer.options.config import OPTIONS, Option, Taken


def print_version(wanted: bool = True) -> None:
    """Print the version and exit."""
    if wanted:
        from importlib.metadata import version as version_of

        print(version_of("loco-peer"))
        raise typer.Exit


def _spelled(option: Option, hidden: bool = False) -> Any:
    """How typer takes an option of a peer."""
    names = [f"--{option.name}", *([option.letter] if option.letter else [])]
    metavar = option.metavar or None
    return typer.Option(*names, metavar=metavar, help=option.told, hidden=hidden)


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True),
]
RunToml = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run spec.")]
RunTomlIfNew = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN.toml]",
        help="The run spec; not needed if the home has a run.",
        show_default=False,
    ),
]
NewRun = Annotated[
    bool,
    typer.Option("--new-run", help="Found a new run; the home's old run is moved to old-runs/."),
]
Restore = Annotated[
    str | None,
    typer.Option(
        "--restore",
        metavar="URL",
        help="Fill an empty home from what --checkpoint-upload copied, and continue from it.",
    ),
]
Peer = Annotated[str, typer.Argument(metavar="PEER", help="A peer id, as `status` shows it.")]
Home = Annotated[Path | None, _spelled(OPTIONS["home"])]
Bootstrap = Annotated[list[str] | None, _spelled(OPTIONS["bootstrap"])]
Invite = Annotated[str | None, _spelled(OPTIONS["invite"])]
Listen = Annotated[str | None, _spelled(OPTIONS["listen"])]
Device = Annotated[str | None, _spelled(OPTIONS["device"])]
Threads = Annotated[int | None, _spelled(OPTIONS["threads"])]
Verbose = Annotated[bool | None, _spelled(OPTIONS["verbose"])]

_TYPES: Final = {
    Taken.ONCE: str | None,
    Taken.MANY: list[str] | None,
    Taken.FLAG: bool | None,
}


def takes_peer_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, which takes them as `**given`, all options that it may be given.

    The founder of a run is told which of them others alone take, where it gives one (`--bootstrap`)
    or a variable does; the rest are unknown to it.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    founds = command.__name__ == "start"
    of_peers = [
        inspect.Parameter(
            option.key,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                _TYPES[option.taken], _spelled(option, hidden=founds and not option.founder)
            ],
        )
        for option in OPTIONS.values()
        if option.founder or not founds or option.name == "bootstrap"
    ]
    command.__signature__ = inspect.Signature([*own, *of_peers])  # type: ignore[attr-defined]
    return command
