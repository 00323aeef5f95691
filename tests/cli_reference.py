"""docs/cli.md: what `--help` of each command says, from the real parser.

`make docs` writes the page; tests/test_docs.py holds it against the parser.
"""

from pathlib import Path
from typing import Any, Final

import typer.main

from peer.cli.app import app
from peer.cli.options import COMMANDS

PAGE: Final = Path(__file__).resolve().parents[1] / "docs/cli.md"
COLUMNS: Final = 90
HEAD: Final = """# Command line

`loco-peer COMMAND --help` says what stands here, and `make docs` writes it into this page.
[Settings](running.md#settings) lists the options of a peer with their names in the environment, and
[exit codes](running.md#exit-codes) what a command ends with.
"""


def page() -> str:
    """All commands, in the groups of `loco-peer --help`."""
    group: Any = typer.main.get_group(app)
    whole = group.make_context("loco-peer", [], resilient_parsing=True, max_content_width=COLUMNS)
    named = {name for names in COMMANDS.values() for name in names}
    rest = {"Other": [name for name in group.commands if name not in named]}
    parts = [HEAD]
    for title, names in {**COMMANDS, **rest}.items():
        parts += [f"## {title}\n", *(_section(group.commands[name], name, whole) for name in names)]
    return "\n".join(parts)


def _section(command: Any, name: str, whole: Any) -> str:
    of = command.make_context(
        name, [], parent=whole, resilient_parsing=True, terminal_width=COLUMNS
    )
    lines = [f"    {line}".rstrip() for line in command.get_help(of).splitlines()]
    return f"### {name}\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
