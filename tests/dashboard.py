"""What the Grafana dashboards ask Prometheus, and what docs/metrics.md promises."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
OF_STAGES = "loco-pipeline"
"""The dashboard that a run without stages leaves empty."""
OF_EXPERTS = "loco_expert_"
"""The metrics that a run without experts does not have."""
_ROW = re.compile(r"^\| `(loco_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)
_SUFFIX = re.compile(r"_(bucket|sum|count)$")


@dataclass(frozen=True, slots=True)
class Query:
    board: str
    panel: str
    legend: str
    expression: str

    def runnable(self, window: str = "1m") -> str:
        """As Grafana would send it with every peer chosen."""
        return self.expression.replace("$__rate_interval", window).replace("$peer", ".+")

    @property
    def metrics(self) -> set[str]:
        return {_SUFFIX.sub("", name) for name in re.findall(r"\bloco_\w+", self.expression)}

    @property
    def labels(self) -> set[str]:
        grouped = re.findall(r"\bby \(([^)]*)\)", self.expression)
        matched = re.findall(r"(\w+)(?:=|=~|!=)\"", self.expression)
        return {label.strip() for group in grouped for label in group.split(",")} | set(matched)


def panels(board: Path) -> list[dict[str, Any]]:
    """Those of collapsed rows among them, and the rows."""
    shown = json.loads(board.read_text())["panels"]
    return [each for panel in shown for each in (panel, *panel.get("panels", ()))]


def queries() -> list[Query]:
    """Every query of all dashboards."""
    return [
        Query(board.stem, panel["title"], target.get("legendFormat", ""), target["expr"])
        for board in BOARDS
        for panel in panels(board)
        for target in panel.get("targets", ())
    ]


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Metric name to (type, labels), as docs/metrics.md has it."""
    text = (ROOT / "docs/metrics.md").read_text()
    return {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in _ROW.findall(text)
    }
