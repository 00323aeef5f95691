"""Streaming DiLoCo against straight-line code; without fragments and overlap it is plain DiLoCo."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bench.quality.fragment_swarm import FragmentSwarm
from bench.quality.replicas import LoopedReplicas
from bench.quality.settings import STREAMING_SMOKE
from peer.training.model import FlatModel, initial_module
from protocol.fragment.fragments import cut_fragments
from protocol.run.sections import DilocoSection

M = 3
SPEC = STREAMING_SMOKE.spec(0)
VOCABULARY = 64
RATE, MOMENTUM = np.float32(0.4), np.float32(0.9)
PLAIN = DilocoSection(fragments="whole", overlap_steps=0, merge=0.0)


def _trained() -> LoopedReplicas:
    return LoopedReplicas(SPEC, M, VOCABULARY, torch.device("cpu"), "fp32", 2)


def _tokens(steps: int) -> npt.NDArray[Any]:
    return np.random.default_rng(0).integers(0, VOCABULARY, (steps, M, 2, 17))


def _models() -> list[FlatModel]:
    return [FlatModel(initial_module(SPEC, VOCABULARY), torch.device("cpu")) for _ in range(M)]


def _pretend_to_train(models: list[FlatModel], step: int) -> None:
    """A move of each replica that depends on nothing, so that no rounding error grows."""
    for replica, model in enumerate(models):
        random = np.random.default_rng((step, replica))
        move_P = random.standard_normal(model.theta_P.numel(), dtype=np.float32)
        model.theta_P += 0.01 * torch.from_numpy(move_P)


def _nesterov(
    phi: npt.NDArray[Any],
    v: npt.NDArray[Any],
    thetas: list[npt.NDArray[Any]],
    rate: np.float32 = RATE,
    momentum: np.float32 = MOMENTUM,
) -> None:
    """One outer step in place, of whole vectors or of views of them."""
    mean = np.zeros_like(phi)
    for theta in thetas:
        mean += np.float32(1 / len(thetas)) * (phi - theta)
    v[:] = momentum * v + mean
    phi[:] = phi - rate * (mean + momentum * v)


def _plain_diloco(
    steps: int, inner_steps: int, last_cycle: int | None = None
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """DiLoCo as its paper has it, but for the last cycle: phi, and the momentum."""
    replicas = _trained()
    thetas = [theta_P.numpy() for theta_P in replicas.thetas]
    phi, v = thetas[0].copy(), np.zeros_like(thetas[0])
    for step, blocks_NBT in enumerate(_tokens(steps), 1):
        replicas.step(blocks_NBT, 1e-2)
        if step % inner_steps == 0:
            last = step == inner_steps * (last_cycle or 0)
            _nesterov(phi, v, thetas, *([np.float32(1), np.float32(0)] if last else []))
            for theta in thetas:
                theta[:] = phi
    return phi, v


@pytest.mark.slow
@pytest.mark.parametrize("last_cycle", [None, 3])
def test_whole_at_once_and_in_fp32_it_is_plain_diloco_to_the_last_bit(last_cycle):
    replicas = _trained()
    swarm = FragmentSwarm(replicas.models, PLAIN, 4, "fp32", last_cycle=last_cycle)
    for step, blocks_NBT in enumerate(_tokens(12), 1):
        replicas.step(blocks_NBT, 1e-2)
        swarm.after_step(step)
    phi, v = _plain_diloco(12, 4, last_cycle)
    assert swarm.phi_P.numpy().tobytes() == phi.tobytes()
    assert swarm.v_P.numpy().tobytes() == v.tobytes()
    for theta_P in replicas.thetas:
        assert torch.equal(theta_P, swarm.phi_P)
    assert float((swarm.phi_P - _models()[0].theta_P).abs().max()) > 0.01


def _streaming(diloco: DilocoSection, steps: int, inner_steps: int) -> list[npt.NDArray[Any]]:
    """Algorithm 2 of the paper, in fp32: phi, then each theta."""
    models, tau, a = _models(), diloco.overlap_steps, np.float32(diloco.merge)
    thetas = [model.theta_P.numpy() for model in models]
    phi, v = thetas[0].copy(), np.zeros_like(thetas[0])
    cuts = cut_fragments(models[0].layout, diloco.fragments, diloco.blocks_per_fragment)
    sent: dict[int, list[npt.NDArray[Any]]] = {}
    for step in range(1, steps + 1):
        _pretend_to_train(models, step)
        for p, fragment in enumerate(cuts):
            since = step - p * inner_steps // len(cuts)
            places = np.r_[tuple(slice(*span) for span in fragment.spans)]
            if since >= 0 and since % inner_steps == 0:
                sent[p] = [theta[places].copy() for theta in thetas]
            if p in sent and (since - tau) % inner_steps == 0:
                phi_p, v_p = phi[places], v[places]
                _nesterov(phi_p, v_p, sent[p])
                phi[places], v[places] = phi_p, v_p
                for theta in thetas:
                    theta[places] = a * theta[places] + (1 - a) * phi_p
    return [phi, *thetas]


@pytest.mark.parametrize("merge", [0.0, 0.5])
@pytest.mark.parametrize(("tau", "pattern"), [(0, "sequential"), (3, "strided"), (7, "strided")])
def test_fragments_follow_the_papers_algorithm(merge, tau, pattern):
    diloco = DilocoSection(fragments=pattern, blocks_per_fragment=2, overlap_steps=tau, merge=merge)
    models = _models()
    swarm = FragmentSwarm(models, diloco, 12, "fp32")
    for step in range(1, 41):
        _pretend_to_train(models, step)
        swarm.after_step(step)
    found = [swarm.phi_P, *(model.theta_P for model in models)]
    for ours, theirs in zip(found, _streaming(diloco, 40, 12), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("code", ["fp32", "int8"])
def test_a_run_ends_with_the_mean_of_all_weights(code):
    models, diloco = _models(), DilocoSection(blocks_per_fragment=2, overlap_steps=5, merge=1.0)
    swarm = FragmentSwarm(models, diloco, 12, code, last_cycle=3)
    for step in range(1, 37):
        _pretend_to_train(models, step)
        swarm.after_step(step)
    swarm.average_all(3)
    mean = np.mean([model.theta_P.numpy() for model in models], axis=0)
    coarse = 0.0 if code == "fp32" else 0.01 * 36**0.5 * 4 / 127
    np.testing.assert_allclose(swarm.phi_P.numpy(), mean, rtol=0, atol=1e-6 + coarse)


def test_what_is_on_its_way_at_the_end_is_taken_in():
    models, diloco = _models(), DilocoSection(blocks_per_fragment=2, overlap_steps=5)
    swarm = FragmentSwarm(models, diloco, 12, "fp32")
    for step in range(1, 13):
        _pretend_to_train(models, step)
        swarm.after_step(step)
    before = swarm.phi_P.clone()
    swarm.settle()
    moved = [
        any(not torch.equal(swarm.phi_P[a:b], before[a:b]) for a, b in fragment.spans)
        for fragment in swarm.fragments
    ]
    assert moved == [True, False, True]  # sent after 12, 4 and 8 steps
