"""The study of a lying relay: the liar of its pipeline is left out, and nobody else."""

from dataclasses import replace

import pytest
from small_texts import small_texts

from bench.lying_relay import ARM
from bench.quality.feed import Feed
from bench.quality.world import World
from bench.stage_quality.lying import LIAR, LyingPipeline, name_of
from bench.stage_quality.settings import SMOKE
from protocol.microbatch import checks

BATCH, STEPS = 4, 6


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("texts")
    setting = replace(SMOKE, source=small_texts(folder, 60))
    return World.open(setting, 0, folder / "cache")


@pytest.fixture(autouse=True)
def _all_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECKED", 1)


def pipeline_of(world: World, *, lies: bool, checked: bool) -> LyingPipeline:
    pipeline = LyingPipeline(world, ARM, BATCH, lies=lies, checked=checked)
    feed = Feed(world.corpus, 0, BATCH, ARM.columns)
    for _ in range(STEPS):
        pipeline.step(feed.next_blocks(), 1e-3)
    return pipeline


@pytest.mark.slow
def test_the_liar_is_left_out_by_all_and_gets_no_more(world: World) -> None:
    pipeline = pipeline_of(world, lies=True, checked=True)
    assert [relay for relay, _ in pipeline.found.left_out] == [name_of(*LIAR)] * ARM.columns
    liar = pipeline.stages[LIAR[0]][LIAR[1]]
    assert liar.norms[-1] == 0.0  # nothing came to it in the last step


@pytest.mark.slow
def test_without_a_lie_or_without_checks_nobody_is_left_out(world: World) -> None:
    assert not pipeline_of(world, lies=False, checked=True).found.left_out
    found = pipeline_of(world, lies=True, checked=False).found
    assert (found.copies, found.left_out) == (0, [])
