"""The commands that documentation shows, as tests run them.

A block ```console has commands behind a prompt: `$ `, or `you@first$ ` with the machine's name.
Other lines are what they say. A comment `<!-- not run: why -->` stands above a block that tests
only parse.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
TRIED: Final = ("Start here", "Recipes")
"""Sections of the site whose commands are all tried."""
BLOCK: Final = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```console\n(?P<lines>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMAND: Final = re.compile(r"^(?:you@)?(?P<machine>\w*)\$ (?P<line>(?:.*\\\n)*.*)$", re.MULTILINE)


class Written(NamedTuple):
    """One command.

    Attributes:
        machine: empty where there is only one.
        not_run: why, or nothing.
    """

    line: str
    machine: str
    not_run: str


def commands_of(page: Path) -> list[Written]:
    """All commands of a page, in order."""
    return [
        Written(command["line"].replace("\\\n", ""), command["machine"], block["why"] or "")
        for block in BLOCK.finditer(page.read_text(encoding="utf-8"))
        for command in COMMAND.finditer(block["lines"])
    ]


def navigation() -> dict[str, list[Path]]:
    """Sections of the site with their pages, in order; the first page stands in none."""
    tree = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    return {title: list(_pages(pages)) for entry in tree for title, pages in entry.items()}


def _pages(entry: Any) -> Iterator[Path]:
    if isinstance(entry, str):
        yield DOCS / entry
    else:
        for each in entry:
            for pages in each.values():
                yield from _pages(pages)


def tried_pages() -> list[Path]:
    """Pages whose commands are run, or at least parsed."""
    sections = navigation()
    return [page for title in TRIED for page in sections[title]]
