"""The drawing of the rooms in docs/architecture.md, held against the imports."""

import ast
import re
import tomllib
from collections import defaultdict
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


FOR_THE_TRAINER = {"codec", "runtime", "training"}
"""The rooms of the peer that the trainer may know of."""


def test_the_trainer_is_kept_from_all_other_rooms() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {each["id"]: each for each in project["tool"]["importlinter"]["contracts"]}
    others = {path.parent.name for path in (ROOT / "peer").glob("*/__init__.py")} - FOR_THE_TRAINER
    forbidden = contracts["training-knows-no-peers"]["forbidden_modules"]
    assert set(forbidden) == {f"peer.{room}" for room in others}


# --- circles --------------------------------------------------------------------------------------
@cache
def package_arrows() -> dict[tuple[str, str], set[str]]:
    """Which package imports which, and in which of its files; a package is a folder with code."""
    packages = {
        path.parent.relative_to(ROOT).as_posix()
        for folder in ("protocol", "peer")
        for path in (ROOT / folder).rglob("*.py")
    }
    found = defaultdict(set)
    for own in packages:
        for file in (ROOT / own).glob("*.py"):
            for name in imported(file):
                parts = name.split(".")
                above = ("/".join(parts[:depth]) for depth in range(len(parts), 0, -1))
                other = next((path for path in above if path in packages), own)
                if other != own:
                    found[own, other].add(file.stem)
    return found


def reached(start: str) -> set[str]:
    """Packages to which imports lead from this one, over however many others."""
    found: set[str] = set()
    queue = [start]
    while queue:
        here = queue.pop()
        new = {other for own, other in package_arrows() if own == here} - found
        found |= new
        queue += new
    return found


def test_packages_import_each_other_in_no_circle() -> None:
    """However long; what would need one lies in the wrong room."""
    back = {
        arrow: files for arrow, files in package_arrows().items() if arrow[0] in reached(arrow[1])
    }
    assert back == {}
