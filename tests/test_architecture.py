"""The drawing of the rooms in docs/architecture.md, held against the imports."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITH_ROOMS_INSIDE = ("protocol", "peer", "peer/averaging")
"""Folders whose own folders are rooms."""


@cache
def rooms() -> list[str]:
    """Every room, as the drawing names it."""
    inside = [
        f"{folder}/{child.name}"
        for folder in WITH_ROOMS_INSIDE
        for child in sorted((ROOT / folder).iterdir())
        if (child / "__init__.py").is_file()
    ]
    return sorted(["protocol", *inside])


def room_of(module: str) -> str | None:
    """The innermost room that a module lies in; None for what is no module of ours."""
    path = module.replace(".", "/")
    holding = [room for room in rooms() if path == room or path.startswith(f"{room}/")]
    return max(holding, key=len, default=None)


def imported(file: Path) -> Iterator[str]:
    """Absolute names of what a file imports."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    package = parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{name.name}" for name in node.names)


@cache
def arrows() -> dict[str, set[str]]:
    """Each room, and the rooms that it imports."""
    found: dict[str, set[str]] = {room: set() for room in rooms()}
    for folder in ("protocol", "peer"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            own = room_of(".".join(file.relative_to(ROOT).with_suffix("").parts))
            if own is not None:
                others = {room_of(name) for name in imported(file)}
                found[own] |= {other for other in others if other is not None} - {own}
    return found


@cache
def drawn() -> dict[str, set[str]]:
    """The table of docs/architecture.md."""
    text = (ROOT / "docs/architecture.md").read_text()
    table = {}
    for line in text.splitlines():
        if row := re.fullmatch(r"\| `([\w/]+)/` \| (.*?) \| (.*?) \|", line):
            table[row[1]] = set(re.findall(r"`([\w/]+)`", row[3]))
    return table


def test_every_room_is_drawn() -> None:
    assert sorted(drawn()) == rooms()


@pytest.mark.parametrize("room", rooms())
def test_the_arrows_are_those_of_the_imports(room: str) -> None:
    assert drawn()[room] == arrows()[room]


def test_the_protocol_imports_nothing_of_the_peer() -> None:
    found = arrows()
    reached = set().union(*(found[room] for room in found if room.startswith("protocol")))
    assert not any(room.startswith("peer") for room in reached)
