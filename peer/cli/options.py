"""Options and run specs of the commands, and their `--help`.

An option of a peer that is not given is None: environment or file may still set it.

typer groups options only where rich draws the help, and rich takes longer to import than all else
that `--help` needs. So typer's plain formatter writes the groups here.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from peer.options.config import OPTIONS, ConfigError, Option, OptionGroup, read_text

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

    from protocol.run.run_spec import RunSpec


# --- options --------------------------------------------------------------------------------------
def print_version(wanted: bool = True) -> None:
    if wanted:
        from importlib.metadata import version as version_of

        from protocol.wire.versions import SPOKEN

        print(f"loco-peer {version_of('loco-peer')}")
        print(f"speaks {', '.join(SPOKEN)}")
        raise typer.Exit


def option(
    name: str, metavar: str, help: str, default: Any = ..., *letter: str, **more: Any
) -> Any:
    """An option for typer; without a default it must be given."""
    more["autocompletion"] = _choices_in(metavar)
    return typer.Option(default, name, *letter, metavar=metavar or None, help=help, **more)


def argument(metavar: str, help: str, default: Any = ..., **more: Any) -> Any:
    complete = _choices_in(metavar)
    return typer.Argument(default, metavar=metavar, help=help, autocompletion=complete, **more)


def _choices_in(metavar: str) -> Callable[[str], list[str]] | None:
    """Completions for a shell, where the metavar is `this|or|that`."""
    if "|" not in metavar:
        return None

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in metavar.split("|") if choice.startswith(incomplete)]

    return complete


def spelled(of: Option, default: Any = ..., *, hidden: bool = False) -> Any:
    letter = [of.letter] if of.letter else []
    return option(f"--{of.name}", of.metavar, of.help_with_default, default, *letter, hidden=hidden)


Peer = Annotated[str, argument("PEER", "A peer id, as `status` shows it.")]
Home = Annotated[Path | None, spelled(OPTIONS["home"])]
Bootstrap = Annotated[list[str] | None, spelled(OPTIONS["bootstrap"])]
Invite = Annotated[str | None, spelled(OPTIONS["invite"])]
Listen = Annotated[str | None, spelled(OPTIONS["listen"])]
Device = Annotated[str | None, spelled(OPTIONS["device"])]
AsJson = Annotated[bool, option("--json", "", "Print JSON.")]
Verbose = Annotated[bool | None, spelled(OPTIONS["verbose"])]

Handler = Callable[..., None]


def takes_peer_options(command: Handler) -> Handler:
    """Give a command the options of a peer, as `**given`.

    `start` takes `--bootstrap`, hidden, to say that it is for others.
    """
    founds = command.__name__ == "start"
    told = [o for o in OPTIONS.values() if o.founder or not founds or o.name == "bootstrap"]
    kinds = {
        o.key: (Annotated[o.kind, spelled(o, hidden=founds and not o.founder)], None) for o in told
    }
    return _with_options(command, kinds)


def takes_plan_options(command: Handler) -> Handler:
    kinds = get_type_hints(PlanOptions, include_extras=True)
    return _with_options(command, {f.name: (kinds[f.name], f.default) for f in fields(PlanOptions)})


def _with_options(command: Handler, options: Mapping[str, tuple[Any, Any]]) -> Handler:
    signature = extended(inspect.signature(command), options)
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def extended(of: inspect.Signature, options: Mapping[str, tuple[Any, Any]]) -> inspect.Signature:
    """Put options in place of `**given`: type and default by name."""
    own = [p for p in of.parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in options.items()
    ]
    return of.replace(parameters=[*own, *more])


@dataclass(frozen=True, slots=True)
class Start:
    """The arguments of `start` that no peer's configuration has."""

    run_toml: Path | None
    new_run: bool
    restore: str | None = None


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of `plan`, in place of the run spec's values; None leaves these."""

    stages: Annotated[
        int | None, option("--stages", "N", "Stages of the pipeline. Default: the spec's.")
    ] = None
    visited: Annotated[
        int | None, option("--visited", "N", "Stages on a path. Default: the spec's, or 3 of 4.")
    ] = None
    full_every: Annotated[
        int | None, option("--full-every", "K", "Every K-th iteration skips no stage; 0: none.")
    ] = None
    microbatches: Annotated[
        int | None, option("--microbatches", "N", "Microbatches per iteration, in total.")
    ] = None
    sequences: Annotated[
        int | None,
        option("--sequences", "N", "Sequences per microbatch. Default: the spec's.", min=1),
    ] = None
    codec: Annotated[
        str | None, option("--codec", "fp32|bf16|int8", "Format of values sent between stages.")
    ] = None
    picture: Annotated[
        Path | None, option("--picture", "FILE", "Draw the timeline: a .png or .svg file.")
    ] = None
    as_json: AsJson = False


# --- files ----------------------------------------------------------------------------------------
def read_spec(path: Path) -> "RunSpec":
    """Raises ConfigError: the file cannot be read. InvalidRunSpec."""
    from protocol.errors import InvalidRunSpec  # here, for `--help` needs none of it
    from protocol.limits import MAX_SPEC_BYTES
    from protocol.run.run_spec import parse_toml

    with suppress(OSError):  # where it cannot be looked at, reading says why
        if path.is_dir():
            raise ConfigError(
                f"{path} is a folder, as Docker makes it where a file to mount is missing"
            )
        if not path.exists():
            raise ConfigError(
                f"{path.absolute()} does not exist; loco-peer new {path} writes a run spec"
            )
    try:
        return parse_toml(read_text(path, MAX_SPEC_BYTES))
    except InvalidRunSpec as error:
        raise InvalidRunSpec(f"{path}: {error}") from error


def check_folder(folder: Path, told: str) -> None:
    """Refuse a folder that no model can be written to. Raises ConfigError."""
    from peer.state.export_folder import check_export_folder

    try:
        check_export_folder(folder)
    except OSError as error:
        raise ConfigError(f"{told}: {error}") from error


# --- help -----------------------------------------------------------------------------------------
_OF_START: Final = ("home", "new_run", "restore")
"""First of all; the second and third are no options of a peer."""
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    **{
        group: (
            *(_OF_START if group is OptionGroup.RUN else ()),
            *(option.key for option in OPTIONS.values() if option.group is group),
        )
        for group in OptionGroup
    },
    "Machines": ("peers", "links", "microbatches", "sequences"),
    "Pipeline": ("stages", "visited", "full_every", "codec"),
    "Output": ("picture", "as_json"),
}
"""Options by their names in code, for commands of more than FEW of them."""
FEW: Final = 11
COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "Before a run": ("new", "plan", "measure", "doctor"),
    "A peer": ("start", "join", "status", "top", "pause", "resume", "leave"),
    "The model": ("export", "generate", "eval", "extend"),
    "The founder": ("invite", "admit", "ban", "delegate", "amend"),
}
EXAMPLES: Final = (
    "loco-peer new run.toml --preset 125m",
    "loco-peer new run.toml --stages 2",
    'loco-peer new run.toml --data "text:books/*.txt" --method diloco',
    "loco-peer start run.toml",
    "loco-peer start run.toml --announce 203.0.113.5:31337",
    "loco-peer start --alone",
    "loco-peer join --bootstrap 192.0.2.2:31337",
    "loco-peer join --bootstrap 192.0.2.2:31337 --device cuda:1 --home gpu1",
    "loco-peer status",
    "loco-peer status --json",
    "loco-peer status --health",
    "loco-peer top",
    "loco-peer top --home gpu1",
    "loco-peer doctor",
    "loco-peer doctor --bootstrap 192.0.2.2:31337",
    "loco-peer leave",
    "loco-peer pause",
    "loco-peer resume",
    "loco-peer invite --expires 7d",
    "loco-peer invite --expires 12h --uses 4",
    "loco-peer ban A1h2Xhd3",
    "loco-peer admit A1h2Xhd3",
    "loco-peer delegate A1h2Xhd3",
    "loco-peer amend longer.toml --dry-run",
    "loco-peer amend longer.toml --at-round 20",
    "loco-peer amend --show",
    "loco-peer export --hf checkpoint",
    "loco-peer export --hf checkpoint --swarm",
    "loco-peer export --hf checkpoint --experts general,code",
    'loco-peer generate --prompt "def main" --tokens 100 --temperature 0.8',
    'loco-peer generate --hf checkpoint --prompt "def main"',
    "loco-peer eval --tasks hellaswag,arc_easy --hf checkpoint",
    "loco-peer eval --check",
    'loco-peer extend next.toml --data "text:more/*.txt" --steps 2000',
    'loco-peer extend next.toml --data "text:more/*.txt" --steps 2000 --replay 0.05',
    "loco-peer plan run.toml --peers peers.csv",
    "loco-peer plan run.toml --peers peers.csv --links links.csv --picture plan.svg",
    "loco-peer measure run.toml",
    "loco-peer measure run.toml --peers peers.csv --location Iowa --price 2.49",
    "loco-peer completion bash >> ~/.bashrc",
    "loco-peer completion zsh >> ~/.zshrc",
    "loco-peer completion fish > ~/.config/fish/completions/loco-peer.fish",
    "loco-peer version",
)
"""Calls of the commands; `--help` of each shows its own."""
NEXT: Final[Mapping[str, str]] = {
    "new": "read run.toml, then run: loco-peer start run.toml",
    "start": "it prints the command for other machines; `loco-peer status` shows its progress",
    "join": "`loco-peer status` shows its progress; after a restart: loco-peer start",
    "status": "`loco-peer top` shows it again and again",
    "doctor": "loco-peer join with the same address",
    "leave": "loco-peer start, in the same home, to come back",
    "pause": "loco-peer resume",
    "invite": "send the command that it prints",
    "ban": "`loco-peer admit` lifts it",
    "export": 'loco-peer generate --hf checkpoint --prompt "def main"',
    "generate": "loco-peer export --hf checkpoint, for other programs",
    "eval": "docs/recipes/use-the-model.md has tasks, docs/experts.md experts",
    "extend": "read next.toml, then run: loco-peer start next.toml --new-run",
    "plan": "rent them; `loco-peer measure run.toml` on one measures its real speed",
    "measure": "loco-peer plan run.toml --peers peers.csv",
    "completion": "open a new shell; zsh needs `compinit` in ~/.zshrc before it",
}
"""Told after a command's examples."""


def examples_of(command: str) -> list[str]:
    return [line for line in EXAMPLES if line.split()[1] == command]


class Command(TyperCommand):
    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        shown = {p.name: r for p in self.get_params(ctx) if (r := _record(p, ctx)) is not None}
        arguments = [p.name for p in self.params if p.param_type_name == "argument"]
        groups = {"Arguments": tuple(arguments)}
        if len(shown) > FEW:
            groups |= GROUPS
        _write_groups(formatter, shown, groups)
        lines = examples_of(self.name or "")
        with formatter.section("Examples" if len(lines) > 1 else "Example"):
            formatter.write("".join(f"  {line}\n" for line in lines))
        if then := NEXT.get(self.name or ""):
            formatter.write(f"\nNext: {then}\n")


class New(Command):
    """In a terminal, and without arguments, it asks for them."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if in_terminal and not args and not ctx.resilient_parsing:
            from .asking import arguments_of_new

            args = arguments_of_new()
        return super().parse_args(ctx, args)


class Commands(TyperGroup):
    """Shows all commands in groups, each with its whole sentence."""

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        told = {
            name: (name, _sentence(command.help))
            for name, command in self.commands.items()
            if not command.hidden
        }
        _write_groups(formatter, told, COMMANDS, rest="Other")
        formatter.write("\nFirst: loco-peer new run.toml, then: loco-peer start run.toml\n")


def _write_groups(
    formatter: "HelpFormatter",
    rows: Mapping[Any, tuple[str, str]],
    groups: Mapping[str, Iterable[str]],
    rest: str = "Options",
) -> None:
    left = dict(rows)
    for title, names in groups.items():
        if found := [left.pop(name) for name in names if name in left]:
            with formatter.section(title):
                formatter.write_dl(found)
    if left:
        with formatter.section(rest):
            formatter.write_dl(list(left.values()))


def _record(parameter: Any, ctx: "Context") -> tuple[str, str] | None:
    """A parameter's name and help, without types and ranges of numbers."""
    record = parameter.get_help_record(ctx)
    if record is None:
        return None
    name, said = record
    name = re.sub(r" <[^>]*>", "", name)
    said = re.sub(r"(?:; )?(?<=[\[ ])(?:[\d.]+<=)?x[<>]=[\d.]+\]", "]", said)
    return name, re.sub(r"\s*\[\]$", "", said).strip()


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())
