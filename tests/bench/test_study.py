"""What all studies of quality share: runs that are kept, found again and made once."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from existing import existing
from small_texts import small_texts

import bench
from bench.lies.arms import ARMS as HOSTILE_ARMS
from bench.lies.run import HostileResult
from bench.lies.settings import HOSTILE
from bench.quality import settings, streaming_arms
from bench.quality.arms import ARMS
from bench.quality.checkpoints import Checkpoints
from bench.quality.run import Result, train_arm
from bench.quality.runs import paired, told
from bench.quality.settings import SHORT, SMOKE, SMOKE_LATE
from bench.quality.store import Store
from bench.quality.streaming import StreamingResult
from bench.quality.study import Study, study_options
from bench.quality.tried import TRIED_ARMS
from bench.quality.world import World
from bench.stage_quality import arms as stage_arms
from bench.stage_quality import settings as stage_settings
from bench.stage_quality.run import StageResult
from bench.stage_quality.settings import LONG, QUICK

RESULTS = Path(bench.__file__).parent / "results"
STUDIES: dict[str, tuple[Any, ...]] = {
    "noloco_quality": (
        ARMS,
        Result,
        [SHORT, settings.LONG, settings.FULL, *settings.LATE_OF.values()],
    ),
    "optimizers": (
        ARMS | TRIED_ARMS,
        Result,
        [SHORT, settings.LONG, settings.LONGER, settings.LARGER, *settings.LATE_OF.values()],
    ),
    "diloco_quality": (
        streaming_arms.STREAMING_ARMS,
        StreamingResult,
        [settings.STREAMING_SHORT, settings.STREAMING_FULL],
    ),
    "hostile": (HOSTILE_ARMS, HostileResult, [HOSTILE]),
    "pipeline_learning": (stage_arms.ARMS, StageResult, [QUICK, stage_settings.FULL, LONG]),
}


@pytest.mark.parametrize("name", STUDIES)
def test_every_stored_result_counts(name):
    arms, kind, known = STUDIES[name]
    of_name = {setting.name: setting for setting in known}
    path = RESULTS / f"{name}.jsonl"
    stored = [json.loads(line)["name"] for line in path.read_text().splitlines()]
    assert stored
    assert len(stored) == len(set(stored))
    for run in stored:
        setting, _, of_setting = run.partition("/")
        arm, _, seed = of_setting.rpartition("-")
        store = Store(path, of_name[setting], kind)
        assert store.load(arms[arm], int(seed)) is not None, run


def _result(loss: float, seed: int = 0) -> Result:
    return Result(told(ARMS["noloco"]), asdict(SMOKE), seed, 1, [loss], tokens=5)


def test_a_line_without_a_later_field_is_read(tmp_path):
    path, arm = tmp_path / "runs.jsonl", ARMS["noloco"]
    store = Store(path, SMOKE, Result)
    store.save(arm, _result(1.0))
    tree = json.loads(path.read_text())
    del tree["tokens"]
    path.write_text(json.dumps(tree))
    found = existing(store.load(arm, 0))
    assert (found.tokens, found.loss) == (0, 1.0)


def test_the_last_whole_line_of_a_run_counts(tmp_path):
    path, arm = tmp_path / "runs.jsonl", ARMS["noloco"]
    store = Store(path, SMOKE, Result)
    for loss, seed in ((1.0, 0), (2.0, 1), (3.0, 0)):
        store.save(arm, _result(loss, seed))
    assert [existing(store.load(arm, seed)).loss for seed in (0, 1)] == [3.0, 2.0]
    with path.open("a") as file:
        file.write(path.read_text().splitlines()[0][:-20])
    assert existing(store.load(arm, 0)).loss == 3.0
    store.save(arm, _result(4.0, 1))
    assert [existing(store.load(arm, seed)).loss for seed in (0, 1)] == [3.0, 4.0]
    assert len(path.read_text().splitlines()) == 5


def test_differences_are_of_seeds_that_both_have():
    losses = {"a": {0: 1.0, 1: 2.0, 2: 9.0}, "b": {1: 1.5, 2: 9.5, 3: 0.0}}
    runs = {
        name: {seed: StreamingResult({}, {}, seed, 1, loss=loss) for seed, loss in found.items()}
        for name, found in losses.items()
    }
    assert paired("a", runs, "b") == [0.5, -0.5]
    assert paired("a", runs, "c") == []


def test_the_options_know_the_arms(tmp_path, capsys):
    parser = study_options("A study.", streaming_arms.STREAMING_ARMS, tmp_path)
    assert parser.parse_args(["--arms", "plain,m2", "--seeds", "3"]).arms == ["plain", "m2"]
    assert parser.parse_args([]).arms is None
    with pytest.raises(SystemExit):
        parser.parse_args(["--arms", "plain,m3"])
    assert "no such arm: m3" in capsys.readouterr().err


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "texts"
    return small_texts(folder, 40)


def test_a_run_is_made_once_and_only_if_asked(tmp_path, source):
    made = []

    def train(world, arm):
        made.append((arm.name, world.spec.seed))
        return Result(told(arm), asdict(world.setting), world.spec.seed, 1, [2.0])

    arms = [ARMS["noloco"], ARMS["ddp"]]
    store = Store(tmp_path / "results.jsonl", replace(SMOKE, source=source), Result)
    study = Study(store, tmp_path / "cache", train)
    assert study.gather(arms, [0, 1], made_only=True) == {"noloco": {}, "ddp": {}}
    assert not made
    study.gather(arms[:1], [0], made_only=False)
    runs = study.gather(arms, [0, 1], made_only=False)
    assert sorted(made) == [("ddp", 0), ("ddp", 1), ("noloco", 0), ("noloco", 1)]
    assert {name: sorted(of_seed) for name, of_seed in runs.items()} == {
        "noloco": [0, 1],
        "ddp": [0, 1],
    }


@pytest.mark.slow
def test_late_arms_begin_with_what_ddp_has_trained(tmp_path, source):
    base = replace(SMOKE, source=source)
    late = replace(SMOKE_LATE, source=source)
    checkpoints = Checkpoints(base, tmp_path)
    world = World.open(base, 0, tmp_path)
    trained_P = train_arm(world, ARMS["ddp"])[1]
    assert torch.equal(checkpoints.of_seed(0), trained_P)
    late_result = checkpoints.train(World.open(late, 0, tmp_path), ARMS["noloco"])
    early_result = checkpoints.train(world, ARMS["noloco"])
    assert late_result.curve[0][1] < early_result.curve[0][1]
    assert torch.equal(checkpoints.of_seed(0), trained_P)
