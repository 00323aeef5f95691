"""`--help`: options in groups, whole sentences, an example, and what comes next.

typer groups options where rich draws the help, and rich takes longer to import than everything
else that `--help` needs. So typer's plain formatter writes the groups. What is in no group comes
last, under "Options".
"""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from typer.core import TyperCommand, TyperGroup

from peer.options.config import OPTIONS, Group

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

REST: Final = "Options"
_OF_START: Final = ("home", "new_run", "restore")
"""First of all; the second and third are no options of a peer."""
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    group: (
        *(_OF_START if group is Group.RUN else ()),
        *(option.key for option in OPTIONS.values() if option.group is group),
    )
    for group in Group
} | {
    "Machines": ("peers", "links", "microbatches", "sequences"),
    "Pipeline": ("stages", "visited", "full_every", "codec"),
    "Output": ("picture", "as_json"),
}
"""Options by their names in code, for commands of more than FEW of them."""
FEW: Final = 10
COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "Before a run": ("new", "plan", "measure", "doctor"),
    "A peer": ("start", "join", "status", "pause", "resume", "leave"),
    "The model": ("export", "generate"),
    "The founder": ("invite", "admit", "ban", "delegate", "amend"),
}
EXAMPLES: Final[Mapping[str, tuple[str, str]]] = {
    "new": (
        "loco-peer new run.toml --preset 125m",
        "read run.toml, then run: loco-peer start run.toml",
    ),
    "start": (
        "loco-peer start run.toml --announce 203.0.113.5:31337",
        "it prints the command for other machines; `loco-peer status` shows its progress",
    ),
    "join": (
        "loco-peer join --bootstrap 203.0.113.5:31337",
        "`loco-peer status` shows its progress; after a restart: loco-peer start",
    ),
    "plan": (
        "loco-peer plan run.toml --peers peers.csv",
        "rent them; `loco-peer measure run.toml` on one measures its real speed",
    ),
    "measure": (
        "loco-peer measure run.toml --peers peers.csv --location Iowa --price 2.49",
        "loco-peer plan run.toml --peers peers.csv",
    ),
    "doctor": ("loco-peer doctor --bootstrap 203.0.113.5:31337", "loco-peer join with the same"),
    "export": (
        "loco-peer export --hf checkpoint --swarm",
        'loco-peer generate --hf checkpoint --prompt "Once"',
    ),
    "generate": (
        'loco-peer generate --prompt "def main" --tokens 100 --temperature 0.8',
        "loco-peer export --hf checkpoint, for other programs",
    ),
    "invite": ("loco-peer invite --expires 12h --uses 4", "send the command that it prints"),
    "amend": ("loco-peer amend run.toml --dry-run", "the same without --dry-run"),
}
"""How a command is called, and what comes next, by command."""


class Command(TyperCommand):
    """A command whose help has groups and an example."""

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write arguments, then options group by group, then the example."""
        shown = {p.name: r for p in self.get_params(ctx) if (r := _record(p, ctx)) is not None}
        arguments = [p.name for p in self.params if p.param_type_name == "argument"]
        groups = {"Arguments": tuple(arguments)}
        if len(shown) > FEW:
            groups |= GROUPS
        _write_groups(formatter, shown, groups)
        if found := EXAMPLES.get(self.name or ""):
            example, then = found
            with formatter.section("Example"):
                formatter.write(f"  {example}\n")
            formatter.write(f"\nNext: {then}\n")


class Commands(TyperGroup):
    """All commands, in groups, each with its whole sentence."""

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write the commands."""
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
    rest: str = REST,
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
    """What a parameter is called and what is said of it: without types, and ranges of numbers."""
    record = parameter.get_help_record(ctx)
    if record is None:
        return None
    name, said = record
    name = re.sub(r" <[^>]*>", "", name)
    said = re.sub(r"(?:; )?(?<=[\[ ])(?:[\d.]+<=)?x[<>]=[\d.]+\]", "]", said)
    return name, re.sub(r"\s*\[\]$", "", said).strip()


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())
