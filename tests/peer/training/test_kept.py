"""What a trainer keeps: anybody can read it, and training goes on from it, bit for bit."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from trainer_worlds import H, Life, real_life, simulated_life, spec_of

from peer.training.corpus.folder import prepare_corpus
from peer.training.messages import Keep, Kept, Load
from peer.training.model import FlatModel, empty_module
from peer.training.optimizer import inner_optimizer
from peer.training.tensor_file import (
    FileUnusable,
    TensorFile,
    keep_weights,
    take_over_weights,
    write_tensors,
)
from protocol.run.run_spec import DataSection, RunSpec
from protocol.trainer_messages import FragmentSent

STEPS = 5


@dataclass
class Trained:
    """A model and its optimizer, stepped by gradients from a seed."""

    name: str = "adamw"
    moments: str = "fp32"
    model: FlatModel = field(
        default_factory=lambda: FlatModel(empty_module(spec_of(), 256), torch.device("cpu"))
    )

    def __post_init__(self) -> None:
        section = spec_of().optimizer.model_copy(
            update={"name": self.name, "moments": self.moments}
        )
        self.optimizer = inner_optimizer(self.model, section, "fp32")

    def step(self, *seeds: int) -> None:
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            self.model.gradient_P.normal_(generator=generator)
            self.optimizer.step(1e-2)


def test_anybody_can_read_the_file(tmp_path):
    vectors = {"a": torch.arange(5.0), "b": torch.randn(7)}
    write_tensors(tmp_path / "f", vectors, {"who": "me"})
    read = load_file(tmp_path / "f")
    assert read.keys() == vectors.keys()
    assert all(torch.equal(read[name], vector) for name, vector in vectors.items())
    assert TensorFile(tmp_path / "f").metadata == {"who": "me"}


@given(data=st.binary(max_size=200))
def test_a_file_that_is_none_is_said_to_be_none(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "f"
    path.write_bytes(data)
    with pytest.raises(FileUnusable, match="cannot be read"):
        TensorFile(path)


@pytest.mark.parametrize(("name", "size", "why"), [("a", 4, "expected F32"), ("c", 5, "has no c")])
def test_a_vector_of_another_length_or_name_is_refused(tmp_path, name, size, why):
    write_tensors(tmp_path / "f", {"a": torch.zeros(5)}, {})
    with pytest.raises(FileUnusable, match=why):
        TensorFile(tmp_path / "f").read_into(name, torch.zeros(size))


def test_only_fp32_is_kept(tmp_path):
    with pytest.raises(ValueError, match="only fp32"):
        write_tensors(tmp_path / "f", {"a": torch.zeros(5, dtype=torch.float16)}, {})


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weights_and_moments_go_on_bit_for_bit(tmp_path, name, moments):
    first, second = Trained(name, moments), Trained(name, moments)
    first.step(1, 2, 3)
    keep_weights(tmp_path / "f", first.model.theta_P, first.optimizer, own_steps=3)
    assert take_over_weights(tmp_path / "f", second.model.theta_P, second.optimizer) == 3
    for trained in (first, second):
        trained.step(4, 5)
    assert torch.equal(first.model.theta_P, second.model.theta_P)
    assert first.optimizer.num_steps == second.optimizer.num_steps == 5


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "vectors"), [("adamw", 2 * 6), ("muon", 2 * 4 + 7)])
def test_all_moments_are_taken_over(tmp_path, name, vectors, moments):
    first, second = Trained(name, moments), Trained(name, moments)
    first.step(1, 2)
    keep_weights(tmp_path / "f", first.model.theta_P, first.optimizer, own_steps=2)
    take_over_weights(tmp_path / "f", second.model.theta_P, second.optimizer)
    assert torch.equal(second.model.theta_P, first.model.theta_P)
    kept, taken = first.optimizer.moments(), second.optimizer.moments()
    assert kept.keys() == taken.keys()
    assert len(kept) == vectors
    assert all(torch.equal(kept[name], taken[name]) for name in kept)


def test_an_optimizer_without_a_step_has_nothing_to_keep(tmp_path):
    first, second = Trained(), Trained()
    keep_weights(tmp_path / "f", first.model.theta_P, first.optimizer, own_steps=0)
    assert TensorFile(tmp_path / "f").names == {"fast"}
    take_over_weights(tmp_path / "f", second.model.theta_P, second.optimizer)
    assert second.optimizer.num_steps == 0
    assert torch.equal(first.model.theta_P, second.model.theta_P)


# --- through the Trainer port ---------------------------------------------------------------------
async def kept(life: Life, path: object) -> Kept:
    await life.trainer.send(Keep(str(path)))
    return await life.until(Kept)


async def settled(life: Life, round_: int) -> str:
    """Train a round that is averaged with nobody; the digest of what was sent."""
    await life.train(round_)
    await life.merge()
    return life.of(FragmentSent)[-1].digest


async def test_it_says_where_it_stands(autojump_clock, tmp_path):
    async with simulated_life(spec_of()) as life:
        await life.load()
        closed = await life.train(0)
        told = await kept(life, tmp_path / "f")
        assert (told.step, told.tokens, told.error) == (closed.step, 0, None)
        assert (told.epoch, told.position) == (closed.epoch, closed.position)
        await life.merge()
        await life.order(1, quota=H)
        told = await kept(life, tmp_path / "f")
        steps = told.tokens // life.spec.tokens_per_step
        assert told.step == H + steps
        assert (told.epoch, told.position) == life.place_after(H + steps)


async def test_a_simulated_trainer_takes_its_weights_over(autojump_clock, tmp_path):
    async with simulated_life(spec_of()) as life:
        await life.load()
        await settled(life, 0)
        await kept(life, tmp_path / "f")
        fast = load_file(tmp_path / "f")["fast"].numpy()
        assert np.abs(fast).max() > 0  # the slow weights are zero
        await life.trainer.send(Load(str(tmp_path / "f")))
        await kept(life, tmp_path / "again")
        assert np.array_equal(load_file(tmp_path / "again")["fast"].numpy(), fast)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
async def test_training_goes_on_bit_for_bit_in_another_process(tmp_path, name):
    """Long with Muon: what it keeps goes the same way, and is bit for bit the same above."""
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("to be or not to be " * 20)
    data = DataSection(source=f"text:{tmp_path}/*.txt", validation_blocks=4)
    corpus = str(prepare_corpus(RunSpec(data=data), tmp_path / "cache").folder)
    section = {**spec_of().optimizer.model_dump(), "name": name}
    spec = RunSpec.model_validate({**spec_of().model_dump(), "optimizer": section})
    async with real_life(spec, corpus) as life:
        await life.load()
        await settled(life, 0)
        await settled(life, 1)
        told = await kept(life, tmp_path / "f")
        assert (told.step, told.error) == (2 * H, None)
        uninterrupted = [await settled(life, 2), await settled(life, 3)]
        missing = await kept(life, tmp_path / "nowhere" / "f")
        assert "No such file" in str(missing.error)
    async with real_life(spec, corpus) as life:
        await life.trainer.send(Load(str(tmp_path / "f")))
        life.place = told.epoch, told.position
        assert [await settled(life, 2), await settled(life, 3)] == uninterrupted
