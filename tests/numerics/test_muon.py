"""Muon on views of the flat vector, against the plain lines that it stands for, bit for bit."""

import math

import pytest
import torch
from training_worlds import VOCABULARY, tiny_spec

from peer.training.device import Precision
from peer.training.model import FlatModel, block_matrices, empty_module, initial_module
from peer.training.optimizer import AdamW, Muon, inner_optimizer
from protocol.run.sections import MuonSection, OptimizerSection

CPU = torch.device("cpu")
ITERATION = (3.4445, -4.7750, 2.0315)
RATE, MUON_RATE = 2e-3, 2e-2


def spec_with(**muon):
    optimizer = OptimizerSection(name="muon", learning_rate=RATE, muon=MuonSection(**muon))
    return tiny_spec().model_copy(update={"optimizer": optimizer})


DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def orthogonal(matrix, precision):
    """Singular values of about 1, by five iterations on the shorter side."""
    a, b, c = ITERATION
    x = matrix.to(DTYPES[precision])
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def scale(shape, adjust_lr):
    if adjust_lr == "original":
        return math.sqrt(max(1, shape[0] / shape[1]))
    return 0.2 * math.sqrt(max(shape))


class Plain:
    """A module stepped tensor by tensor, each with storage of its own."""

    def __init__(self, spec, precision):
        self.precision = precision
        section = spec.optimizer
        self.section, self.muon = section, section.muon
        self.weights = {
            n: p.detach() for n, p in initial_module(spec, VOCABULARY).named_parameters()
        }
        self.momenta = {n: torch.zeros_like(w) for n, w in self.weights.items() if is_muons(n, w)}
        rest = [torch.nn.Parameter(w) for n, w in self.weights.items() if n not in self.momenta]
        self.rest = dict(zip([n for n in self.weights if n not in self.momenta], rest, strict=True))
        decays = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": section.weight_decay},
            {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(decays, lr=RATE, betas=section.betas, fused=True)

    def step(self, gradients, rate):
        muon_rate = rate * (self.muon.learning_rate / RATE)
        for name, buffer in self.momenta.items():
            gradient, weight = gradients[name], self.weights[name]
            buffer.lerp_(gradient, 1 - self.muon.momentum)
            update = orthogonal(gradient.lerp(buffer, self.muon.momentum), self.precision)
            weight.mul_(1 - muon_rate * self.section.weight_decay)
            weight.add_(update, alpha=-muon_rate * scale(weight.shape, self.muon.adjust_lr))
        for name, parameter in self.rest.items():
            parameter.grad = gradients[name]
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()


def is_muons(name, weight):
    return ".layers." in name and weight.dim() == 2


def gradients_of(model, seed):
    """Random gradients, longer than the clipping norm, written into the flat vector."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for entry in model.layout.entries:
        part = model.gradient_P[entry.offset : entry.offset + entry.size]
        part.normal_(generator=generator)
        found[entry.name] = part.view(entry.shape)
    return found


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_it_equals_the_plain_lines_bit_for_bit(adjust_lr, precision):
    torch.set_num_threads(1)
    spec = spec_with(learning_rate=MUON_RATE, adjust_lr=adjust_lr)
    plain, model = Plain(spec, precision), FlatModel(initial_module(spec, VOCABULARY), CPU)
    optimizer = inner_optimizer(model, spec.optimizer, precision)
    for seed, rate in enumerate((RATE / 2, RATE, RATE, RATE / 3)):
        views = gradients_of(model, seed)
        norm = torch.linalg.vector_norm(model.gradient_P)
        factor = (spec.optimizer.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        clipped = {name: view * factor for name, view in views.items()}
        assert optimizer.step(rate) == norm
        plain.step(clipped, rate)
        assert not model.gradient_P.any()
    for entry in model.layout.entries:
        found = model.theta_P[entry.offset : entry.offset + entry.size].view(entry.shape)
        assert torch.equal(found, plain.weights[entry.name]), entry.name
    assert len(plain.momenta) == 2 * 7


def test_a_checkpoint_of_a_gpu_goes_on_on_a_cpu():
    """The moments of both iterations are the same; their steps differ by bf16's rounding."""
    spec, ends, moments = spec_with(), [], []
    for precision in DTYPES:
        model = FlatModel(initial_module(spec, VOCABULARY), CPU)
        optimizer = inner_optimizer(model, spec.optimizer, precision)
        for seed in range(3):
            gradients_of(model, seed)
            optimizer.step(RATE)
        ends.append(model.theta_P)
        moments.append(optimizer.moments())
    assert moments[0].keys() == moments[1].keys()
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])
    assert not torch.equal(*ends)
    start = FlatModel(initial_module(spec, VOCABULARY), CPU).theta_P
    assert (ends[0] - ends[1]).norm() < 0.05 * (ends[0] - start).norm()


@pytest.mark.parametrize("precision", DTYPES)
def test_it_iterates_in_the_precision_of_the_forward_pass(precision):
    model = FlatModel(empty_module(tiny_spec(), VOCABULARY), CPU)
    _, muon = inner_optimizer(model, spec_with().optimizer, precision)._parts
    assert isinstance(muon.optimizer, Muon)
    assert muon.optimizer.precision == precision


@pytest.mark.parametrize("most_together", [1 << 24, 600])
def test_matrices_of_one_shape_go_together_on_a_gpu(monkeypatch, most_together):
    """As on a CPU, but for rounding, whether all or a few at a time."""
    spec, ends = spec_with(), []
    for together in (0, most_together):
        model = FlatModel(initial_module(spec, VOCABULARY), CPU)
        optimizer = inner_optimizer(model, spec.optimizer, "fp32")
        muon = optimizer._parts[1].optimizer
        assert isinstance(muon, Muon)
        monkeypatch.setattr(muon, "_most_together", together)
        batches = [len(each) for each in muon._batches()]
        assert sum(batches) == 14
        assert (max(batches) > 1) == (together > 0)
        for seed in range(3):
            gradients_of(model, seed)
            optimizer.step(RATE)
        ends.append(model.theta_P)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


def test_the_matrices_of_the_blocks_are_views_and_all_else_is_adamws():
    spec = spec_with()
    model = FlatModel(empty_module(spec, VOCABULARY), CPU)
    storage = model.theta_P.untyped_storage().data_ptr()
    matrices = [model.leaf(*part) for part in block_matrices(model.layout)]
    assert [leaf.untyped_storage().data_ptr() for leaf in matrices] == [storage] * 14
    groups = model.groups(without_block_matrices=True)
    rest = [model.leaf(*part) for parts, _ in groups for part in parts]
    covered = sum(leaf.numel() for leaf in (*matrices, *rest))
    assert model.layout.parameters <= covered <= model.layout.padded_parameters
    names = {e.offset: e.name for e in model.layout.entries}
    firsts = {int(leaf.storage_offset()) for leaf in rest}
    assert "model.embed_tokens.weight" in {names[first] for first in firsts}
    assert not any("proj" in names[first] for first in firsts)


def test_its_rate_is_adamws_unless_it_has_one():
    spec = spec_with()
    model = FlatModel(empty_module(spec, VOCABULARY), CPU)
    ratios = [part.rate_ratio for part in inner_optimizer(model, spec.optimizer, "fp32")._parts]
    assert ratios == [1.0, 1.0]
    own = spec_with(learning_rate=MUON_RATE).optimizer
    _, muon = inner_optimizer(model, own, "fp32")._parts
    assert muon.rate_ratio == pytest.approx(MUON_RATE / RATE)


def test_the_run_spec_chooses():
    model = FlatModel(empty_module(tiny_spec(), VOCABULARY), CPU)
    for section, chosen in (
        (tiny_spec().optimizer, [AdamW]),
        (spec_with().optimizer, [AdamW, Muon]),
    ):
        parts = inner_optimizer(model, section, "fp32")._parts
        assert [type(part.optimizer) for part in parts] == chosen


@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_forgetting_makes_a_new_one(momentum):
    spec = spec_with(momentum=momentum)
    vectors = []
    for steps_before in (0, 3):
        model = FlatModel(initial_module(spec, VOCABULARY), CPU)
        start = model.theta_P.clone()
        optimizer = inner_optimizer(model, spec.optimizer, "fp32")
        for seed in range(steps_before):
            gradients_of(model, seed)
            optimizer.step(RATE)
        model.theta_P.copy_(start)
        optimizer.reset()
        assert (optimizer.num_steps, optimizer.moments()) == (0, {})
        gradients_of(model, 9)
        optimizer.step(RATE)
        vectors.append(model.theta_P.clone())
    assert torch.equal(*vectors)


@pytest.mark.parametrize("fitting", [1, 3])
def test_where_memory_ends_as_moments_are_made_the_next_step_makes_all(monkeypatch, fitting):
    """A trainer goes on with fewer sequences then."""
    model = FlatModel(empty_module(tiny_spec(), VOCABULARY), CPU)
    optimizer = inner_optimizer(model, spec_with().optimizer, "fp32")
    made, zeros_like = [], torch.zeros_like

    def in_little_memory(*given, **named):
        made.append(given)
        if len(made) > fitting:
            raise torch.OutOfMemoryError
        return zeros_like(*given, **named)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "zeros_like", in_little_memory)
        optimizer.step(RATE)
    optimizer.step(RATE)
    assert optimizer.num_steps == 1
    assert all(len(each.optimizer.state) == len(each.leaves) for each in optimizer._parts)
