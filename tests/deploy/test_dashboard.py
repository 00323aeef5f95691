"""The dashboards, docs/metrics.md and the exporter speak of the same metrics."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboard import BOARDS, ROOT, Query, documented, panels, queries
from snapshots import full_metrics

from peer.facts import RoundPhase
from protocol.outcomes import SkipReason


def exported() -> dict[str, tuple[str, frozenset[str]]]:
    """Metric name to (type, labels), as a peer exposes it."""
    found = {}
    for family in full_metrics().registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, frozenset(labels))
    return found


def test_documented_metrics_are_the_exported_ones():
    assert documented() == exported()


@pytest.mark.parametrize("query", queries(), ids=lambda q: f"{q.board}: {q.panel}")
def test_query_asks_for_documented_metrics(query: Query):
    known = documented()
    assert query.metrics
    assert query.metrics <= set(known)
    labels = {"instance", "le"}.union(*(known[name][1] for name in query.metrics))
    assert query.labels <= labels


def test_every_metric_is_on_a_dashboard():
    shown = set().union(*(query.metrics for query in queries()))
    assert shown == set(documented())


def test_reasons_and_phases_are_documented():
    table = (ROOT / "docs/running.md").read_text().split("## Why a round was skipped")[1]
    table = table.split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(SkipReason)
    text = (ROOT / "docs/metrics.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| `loco_round_seconds`"))
    assert all(f"`{phase}`" in row for phase in RoundPhase)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_panels_fit_the_grid(board: Path):
    tree, found = json.loads(board.read_text()), panels(board)
    assert tree["uid"] == board.stem
    assert len({panel["id"] for panel in found}) == len(found)
    rows = [panel for panel in found if panel["type"] == "row"]
    for together in (tree["panels"], *(row["panels"] for row in rows)):
        assert_apart(together)
    assert all(row["collapsed"] for row in rows)


def assert_apart(panels: list[dict[str, Any]]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = set(
            itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        )
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_dashboard_uses_the_provisioned_data_source():
    folder = ROOT / "deploy/grafana/provisioning"
    sources = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    text = "".join(board.read_text() for board in BOARDS)
    used = set(re.findall(r'"type": "prometheus",\s*"uid": "([^"]*)"', text))
    assert used == {source["uid"] for source in sources}


def test_compose_mounts_what_grafana_is_told_to_read():
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    grafana = compose["services"]["grafana"]
    mounts = dict(v.split(":")[:2] for v in grafana["volumes"] if v.startswith("./"))
    assert all((ROOT / "deploy" / source).is_dir() for source in mounts)
    providers = ROOT / "deploy/grafana/provisioning/dashboards/loco-peer.yaml"
    path = yaml.safe_load(providers.read_text())["providers"][0]["options"]["path"]
    assert path in mounts.values()
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in [f"{path}/{board.name}" for board in BOARDS]
