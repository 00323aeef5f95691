"""The loss of a large vocabulary is that of whole logits, which are never made."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from peer.training import head_loss
from peer.training.device import autocast
from peer.training.model import FlatModel, initial_module, model_config
from peer.training.stages.compute import StageCompute
from peer.training.stages.module import initial_stage
from protocol.run.run_spec import ModelSection, RunSpec

VOCABULARY, TOKENS = 300, 3 * 20


class Largest(TorchDispatchMode):
    """The most values that a tensor had."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.values = max(self.values, out.numel())
        return out


def flat_model(**sizes) -> FlatModel:
    section = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2}
    spec = RunSpec(model=ModelSection(**(section | sizes)))
    return FlatModel(initial_module(spec, VOCABULARY), torch.device("cpu"))


@pytest.fixture
def few_at_once(monkeypatch):
    monkeypatch.setattr(head_loss, "WHOLE_LOGITS_VOCABULARY", VOCABULARY - 1)
    monkeypatch.setattr(head_loss, "MOST_LOGITS", 7 * VOCABULARY)


def trained(one: FlatModel, tokens: torch.Tensor, precision="fp32") -> tuple[float, int]:
    """A loss, and the most values that a tensor had; the gradient is in the model."""
    with Largest() as largest:
        with autocast(one.device, precision):
            loss = one.loss(tokens) * 0.5
        loss.backward()
    return float(loss.detach()), largest.values


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [{}, {"tie_embeddings": False}])
def test_it_is_the_loss_of_whole_logits(request, sizes, precision):
    tokens = torch.randint(VOCABULARY, (3, 21), generator=torch.Generator().manual_seed(1))
    whole = flat_model(**sizes)
    expected, most = trained(whole, tokens, precision)
    assert most == TOKENS * VOCABULARY
    request.getfixturevalue("few_at_once")
    ours = flat_model(**sizes)
    found, most = trained(ours, tokens, precision)
    assert most < TOKENS * VOCABULARY / 2
    exact = 1e-6 if precision == "fp32" else 1e-2
    assert found == pytest.approx(expected, rel=min(exact, 1e-4))
    off = torch.linalg.vector_norm(ours.gradient_P - whole.gradient_P)
    assert off < exact * torch.linalg.vector_norm(whole.gradient_P)
    with torch.no_grad(), Largest() as largest:
        assert float(ours.loss(tokens).detach()) == pytest.approx(2 * expected, rel=1e-2)
    assert largest.values < TOKENS * VOCABULARY / 2


def finished(spec: RunSpec) -> tuple[float, torch.Tensor, torch.Tensor, int]:
    """Loss, the boundary's gradient and the stage's of the end of a path; and as `trained`."""
    stage = initial_stage(model_config(spec, VOCABULARY), spec.seed, 0, 2)
    flat, drawn = FlatModel(stage, torch.device("cpu")), torch.Generator().manual_seed(1)
    compute = StageCompute(stage, flat.device, "fp32")
    compute.embed(0, torch.randint(VOCABULARY, (3, 21), generator=drawn))
    with Largest() as largest:
        loss, passed = compute.finish(0, torch.randn(3, 20, 16, generator=drawn))
        compute.add_weights()
    return loss, passed, flat.gradient_P, largest.values


@pytest.mark.parametrize("tied", [False, True])
def test_the_end_of_a_path_through_stages_has_the_same_gradients(request, tied):
    sizes = ModelSection(hidden_size=16, num_layers=2, num_heads=2, tie_embeddings=tied)
    loss, *expected, most = finished(RunSpec(model=sizes))
    assert most == TOKENS * VOCABULARY
    request.getfixturevalue("few_at_once")
    found_loss, *found, most = finished(RunSpec(model=sizes))
    assert most < TOKENS * VOCABULARY / 2
    assert found_loss == pytest.approx(loss, rel=1e-6)
    for one, other in zip(found, expected, strict=True):
        assert torch.dist(one, other) < 1e-6 * torch.linalg.vector_norm(other)


@pytest.mark.usefixtures("few_at_once")
def test_the_vector_is_the_same_with_the_head_apart():
    whole, ours = flat_model(), flat_model()
    assert torch.equal(ours.theta_P, whole.theta_P)
    tokens = torch.arange(42).view(2, 21)
    before = float(ours.loss(tokens).detach())
    ours.theta_P.mul_(2)
    assert float(ours.loss(tokens).detach()) != before


@pytest.mark.usefixtures("few_at_once")
def test_a_head_that_does_not_learn_gets_no_gradient():
    tokens = torch.arange(42).view(2, 21)
    spec = RunSpec(model=ModelSection(hidden_size=16, num_layers=1, num_heads=2))
    module, learning = (initial_module(spec, VOCABULARY) for _ in range(2))
    module.get_parameter("lm_head.weight").requires_grad_(False)
    frozen, whole = (FlatModel(each, torch.device("cpu")) for each in (module, learning))
    for model_ in (frozen, whole):
        model_.loss(tokens).backward()
    assert "model.embed_tokens.weight" not in [entry.name for entry in frozen.layout.entries]
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, learning.get_parameter(name).grad)
