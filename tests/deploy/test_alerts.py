"""The alerts that come with loco-peer fire when they should, lead somewhere, and are explained."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from dashboard import ROOT, documented, queries

from peer.observe.problems import CONDITIONS, NOTES

RULES = ROOT / "deploy/prometheus/rules/loco-peer.yml"
WORLDS = Path(__file__).with_name("alert_rules.yml")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="no promtool on PATH (Debian: apt-get install prometheus)",
)


def alerts() -> list[dict[str, object]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def promtool(*command: str | Path) -> None:
    done = subprocess.run(
        ["promtool", *command], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@needs_promtool
def test_alerts_fire_when_they_should_and_are_silent_in_health(tmp_path):
    worlds = tmp_path / "worlds.yml"
    worlds.write_text(WORLDS.read_text().replace("[RULES]", f"['{RULES}']"))
    promtool("check", "rules", RULES)
    promtool("test", "rules", worlds)


@pytest.mark.slow
@needs_promtool
def test_prometheus_can_parse_each_query_of_the_dashboards(tmp_path):
    rules = [{"record": f"q:{n}", "expr": each.runnable()} for n, each in enumerate(queries())]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", file)


def test_each_alert_has_a_test_in_health_and_one_in_need():
    told = re.findall(r"alertname: (\w+)", WORLDS.read_text())
    assert {told.count(str(alert["alert"])) >= 2 for alert in alerts()} == {True}
    assert set(told) == {alert["alert"] for alert in alerts()}


def test_alerts_speak_of_metrics_and_conditions_that_are_there():
    text = RULES.read_text()
    assert set(re.findall(r"\bloco_\w+", text)) <= set(documented())
    notes = {name for names in re.findall(r'name[!=]~"([^"]*)"', text) for name in names.split("|")}
    assert notes == NOTES < set(CONDITIONS)


def test_each_alert_is_in_the_documentation():
    table = (ROOT / "docs/metrics.md").read_text().split("\n## Alerts\n")[1]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == {a["alert"] for a in alerts()}
