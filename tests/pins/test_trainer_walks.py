"""How far a vector walks through the process of a real trainer, from its send to its merge.

What the trainer does meanwhile counts: steps, where they overlap.
"""

import json
import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from traces import Walk
from trainer_worlds import real_life, spec_of

from peer.training.corpus.folder import prepare_corpus
from protocol.trainer_messages import FragmentMerged

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

TRACED: Final = Path(__file__).with_name("traced_child")
PAIRS: Final = spec_of(overlap=False)
FRAGMENTS: Final = spec_of(method="diloco", diloco={"fragments": "whole", "overlap_steps": 2})
MOST: Final = {
    "a vector in pairs": (
        PAIRS,
        ("FragmentValues.send", "FragmentDeltas.merge"),
        Walk(9, 54, 5, 1),
    ),
    "a fragment": (
        FRAGMENTS,
        ("FragmentSnapshots.send", "FragmentSnapshots.merge"),
        Walk(20, 137, 11, 8),  # 136 where none of the steps is told of: that goes by time
    ),
}
"""A shorter walk lowers its numbers; the commit that raises one says why."""


@asynccontextmanager
async def traced_life(spec, ends, path, corpus, monkeypatch):
    """A real trainer whose process writes each walk to `path`."""
    python_path = (TRACED, *filter(None, [os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, python_path)))
    monkeypatch.setenv("TRACED_FIRST", ends[0])
    monkeypatch.setenv("TRACED_LAST", ends[1])
    monkeypatch.setenv("TRACED_PATH", str(path))
    async with real_life(spec, corpus) as life:
        await life.load()
        yield life


@pytest.mark.parametrize("name", MOST)
async def test_no_walk_through_a_trainer_is_longer_than_it_was(name, tmp_path, monkeypatch):
    spec, ends, most = MOST[name]
    path = tmp_path / "walk"
    corpus = str(prepare_corpus(spec, tmp_path).folder)
    async with traced_life(spec, ends, path, corpus, monkeypatch) as life:
        for round_ in range(3):  # what is called once in a process is not in the last
            await life.train(round_)
            if life.sends_whole:
                await life.merge()
                await life.until(FragmentMerged)
    found = Walk(*json.loads(path.read_text()))
    assert min(found) > 0
    longer = {
        field: number for field, number in found._asdict().items() if number > getattr(most, field)
    }
    assert longer == {}
