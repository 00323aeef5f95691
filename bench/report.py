"""What all measurements share: their options, their table, their goals, their JSON.

A measurement gathers rows (one mapping each, the same keys in all), states its goals, and publishes
both: a table for the terminal and, with `--json FILE`, everything with the machine it ran on.
Figures of a shared machine are compared within one run only.
"""

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]
SIGNIFICANT_DIGITS: Final = 4
PIPED_WIDTH: Final = 150
"""Columns where there is no terminal: wide enough for every table here."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Something that should hold.

    Attributes:
        what: in words, with the unit.
        measured: what came out.
        at_least: lower bound, if there is one.
        at_most: upper bound, if there is one.
    """

    what: str
    measured: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        """Whether the measured value lies within the bounds."""
        low = self.at_least is None or self.measured >= self.at_least
        high = self.at_most is None or self.measured <= self.at_most
        return low and high

    def describe(self) -> str:
        """One line for people."""
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in (("≥", self.at_least), ("≤", self.at_most))
            if bound is not None
        ]
        verdict = "met" if self.met else "MISSED"
        return f"{verdict}: {self.what}: {_text(self.measured)} (goal {' and '.join(bounds)})"


@dataclass(slots=True)
class Report:
    """What one measurement found.

    Attributes:
        name: of the module: `python -m bench.NAME`.
        title: one sentence.
        settings: what it ran with.
    """

    name: str
    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Everything, with the machine and the moment."""
        return {
            "bench": self.name,
            "title": self.title,
            "command": [Path(sys.argv[0]).stem, *sys.argv[1:]],
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "settings": self.settings,
            "rows": [dict(row) for row in self.rows],
            "goals": [asdict(goal) | {"met": goal.met} for goal in self.goals],
            "notes": self.notes,
        }

    def publish(self, json_path: Path | None) -> None:
        """Print the table and the goals; write the JSON if a file is named."""
        console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
        console.print(_table(self.title, self.rows))
        for line in (*(goal.describe() for goal in self.goals), *self.notes):
            console.print(line, highlight=False)
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that all measurements have: `--full` and `--json FILE`."""
    parser = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--full", action="store_true", help="the long setting")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    return parser


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cuda = torch.cuda.is_available()
    return {
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "accelerator": torch.cuda.get_device_name() if cuda else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in rows[0] if rows else ():
        table.add_column(column, justify="left" if _is_text(rows, column) else "right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    return table


def _is_text(rows: Sequence[Row], column: str) -> bool:
    return any(isinstance(row[column], str) for row in rows)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.{SIGNIFICANT_DIGITS}g}" if isinstance(value, float) else str(value)
