"""The trainer's loop on a GPU, beside that on a CPU; left out where there is no GPU."""

import numpy as np
import pytest
import torch
from training_worlds import CPU, PAUSE, build_world, next_order, order, run, tiny_spec

from peer.training.messages import Evaluate, Evaluated, RoundClosed
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.step import Stepper, fit_micro_batch, measure_steps_per_s
from protocol.run.run_spec import RunSpec
from protocol.run.sections import OptimizerSection
from protocol.trainer_messages import ONE_CHUNK, Merge

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")
ROUNDS = 6
WIDE = RunSpec.model_validate(
    {
        "model": {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "context_length": 256},
        "training": {"batch_size": 64},
    }
)
WIDE_VOCABULARY = 32 * 1024
ROOM_BYTES = 1 << 30
"""The logits of one of its sequences alone are 32 MiB in fp32."""


def trained(optimizer, device, precision="fp32"):
    """The world after some rounds whose averages moved the slow weights, and the losses."""
    spec = tiny_spec(codec="fp32")
    spec = spec.model_copy(update={"optimizer": OptimizerSection(name=optimizer, warmup_steps=2)})
    world = build_world(spec, device=device, precision=precision)

    def answer(event):
        if not isinstance(event, RoundClosed) or event.round == ROUNDS:
            return []
        moves = np.random.default_rng(event.round).normal(0, 0.01, world.slow.size)
        world.slow[:] = world.decoded() + moves.astype("f4")
        merge = Merge(0, event.round, ONE_CHUNK, ())
        return [next_order(event), PAUSE, merge, Evaluate(event.round)]

    return world, run(world, order(0), answer=answer)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gpu_trains_as_a_cpu_does(optimizer):
    (on_cpu, cpu), (on_gpu, gpu) = trained(optimizer, CPU), trained(optimizer, GPU)
    np.testing.assert_allclose(on_gpu.theta, on_cpu.theta, rtol=0, atol=1e-4)
    for kind in (RoundClosed, Evaluated):
        losses = [[event.loss for event in script.of(kind)] for script in (cpu, gpu)]
        assert len(losses[0]) >= ROUNDS
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_in_bf16_it_trains_nearly_the_same(optimizer):
    _, exact = trained(optimizer, CPU)
    _, rounded = trained(optimizer, GPU, "bf16")
    losses = [[event.loss for event in script.of(RoundClosed)] for script in (exact, rounded)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)


def test_a_full_gpu_halves_the_micro_batch():
    """Torch's own allocator refuses, as when the memory is another process's."""
    total = torch.cuda.get_device_properties(0).total_memory
    blocks_BT = np.zeros((64, 257), np.int64)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(ROOM_BYTES / total)
    try:
        model = FlatModel(initial_module(WIDE, WIDE_VOCABULARY), GPU)
        optimizer = inner_optimizer(model, WIDE.optimizer, "bf16")
        stepper = Stepper(model, optimizer, "bf16", 64)
        fit_micro_batch(stepper, blocks_BT)
        assert 1 <= stepper.micro_batch < 32
        assert measure_steps_per_s(stepper, blocks_BT) > 0
        assert torch.isfinite(model.theta_P).all()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # inductor's
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # this is in fp32
def test_compiled_it_has_the_same_loss_and_gradient():
    losses, gradients = [], []
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 32, (4, 9))).to(GPU)
    for compiled in (False, True):
        model = FlatModel(initial_module(tiny_spec(), 32), GPU, compile=compiled)
        loss = model.loss(tokens)
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.gradient_P.cpu().numpy())
    assert gradients[0].any()
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=0, atol=1e-5)
