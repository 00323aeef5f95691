"""A run of a study that is stopped half-way goes on, and ends as if it had not been stopped."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.quality.arms import ARMS, Arm
from bench.quality.halfway import Halfway, Stand
from bench.quality.run import train_arm
from bench.quality.tried import TRIED_ARMS
from bench.quality.world import World

pytestmark = pytest.mark.slow


class Stopped(Exception):
    """The machine was wanted for something else."""


class StoppedAtOnce(Halfway):
    """Keeps the run once, and stops it."""

    def save(self, stand: Stand) -> None:
        super().save(stand)
        raise Stopped


@pytest.mark.parametrize(
    "arm",
    [
        ARMS["ddp"],
        replace(ARMS["default"], delay=0.5),
        ARMS["pairs-h2-muon-1"],
        TRIED_ARMS["moments-h2-muon-8"],
    ],
    ids=lambda arm: arm.name,
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(world: World, arm: Arm, tmp_path: Path):
    whole, whole_P = train_arm(world, arm)
    path = tmp_path / "run.safetensors"
    with pytest.raises(Stopped):
        train_arm(world, arm, None, StoppedAtOnce(path))
    stand = Halfway(path).load()
    assert stand is not None
    assert 0 < stand.told["done"] < world.setting.steps
    assert stand.told["result"]["curve"], "it is kept at a point of the curve or after it"
    resumed, resumed_P = train_arm(world, arm, None, Halfway(path))
    assert torch.equal(resumed_P, whole_P)
    assert resumed.losses == whole.losses
    assert [tuple(point) for point in resumed.curve] == whole.curve
    assert [tuple(each) for each in resumed.deviations] == whole.deviations
    assert (resumed.tokens, resumed.bytes_per_parameter) == (
        whole.tokens,
        whole.bytes_per_parameter,
    )


def test_what_another_run_left_is_not_taken(world: World, tmp_path: Path):
    whole, _ = train_arm(world, ARMS["noloco"])
    path = tmp_path / "run.safetensors"
    with pytest.raises(Stopped):
        train_arm(world, ARMS["int8"], None, StoppedAtOnce(path))
    assert train_arm(world, ARMS["noloco"], None, Halfway(path))[0].losses == whole.losses


def test_a_run_whose_exchange_remembers_is_not_kept(world: World, tmp_path: Path):
    train_arm(world, ARMS["int8-diff"], None, Halfway(tmp_path / "run.safetensors"))
    assert not list(tmp_path.iterdir())
