"""The event logs of whole swarms are what they were: no restructuring changes what peers do.

What changes them on purpose comes with new pins: `python -m tests.pins`. The difference of
event_logs.json then shows which kinds of events have changed, and how many of each there are.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pinned_logs import differences, pins_of, read_pins
from pinned_worlds import WORLDS

ROOT = Path(__file__).parents[2]
LONG = {
    "streaming-diloco-spoiled",
    "microbatches-one-dies",
    "joining-diloco",
    "returning-diloco",
    "returning-streaming-gossip",
}
"""What a restructuring holds itself to; others of its kind run each time."""

pytestmark = pytest.mark.slow


def test_every_world_is_pinned():
    assert read_pins().keys() == WORLDS.keys()


@pytest.mark.parametrize(
    "world",
    [pytest.param(world, marks=pytest.mark.long) if world in LONG else world for world in WORLDS],
)
def test_the_event_logs_are_what_they_were(world):
    found = pins_of(world, range(WORLDS[world][0]))
    assert list(differences(read_pins()[world], found)) == []


# The test above runs its worlds with one thread and a hash seed that is drawn.
@pytest.mark.long
@pytest.mark.parametrize(("hash_seed", "threads"), [("2", "2"), ("1", "1")])
def test_they_depend_neither_on_the_process_nor_on_its_threads(hash_seed, threads):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": threads}
    worlds = ["pairs", "streaming-diloco", "streaming-gossip", "microbatches", "returning-pairs"]
    command = [sys.executable, "-m", "tests.pins", "check", *worlds]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
