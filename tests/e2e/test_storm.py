"""Kills, hang-ups, power loss and full disks from a seed: no model is lost.

Part of what `python -m bench.storm` shows with more events: the newest whole checkpoint of all
homes never falls, and the run ends with its model, and keeps it when it is started again.
"""

import json

import pytest

from bench.real_peers import HERE
from bench.storm import goals_of
from bench.storms.machines import missing
from bench.storms.storm import Setting, storm

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

SETTING = Setting(events=12, after_end=3, total_steps=60)
SEED = 1


def test_the_newest_checkpoint_never_falls_and_the_run_ends_with_its_model(tmp_path):
    lines = list[str]()
    found = storm(SETTING, SEED, HERE, tmp_path, lambda line: lines.append(json.dumps(line)))
    missed = [goal.describe() for goal in goals_of(found.summary, SETTING) if not goal.met]
    assert missed == [], "\n".join(lines)
