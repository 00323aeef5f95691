"""The divergence of outputs: against its formula, within its bounds, and without a trace."""

import math

import numpy as np
import pytest
import torch
from existing import existing
from training_worlds import VOCABULARY, build_world, next_order, order, run, tiny_spec

from peer.codec import codes_as_tensor, get_codec
from peer.training.comparison_messages import Compare, Compared
from peer.training.divergence import (
    PROBE_BLOCKS,
    PROBE_TOKENS,
    jensen_shannon,
    output_divergence,
    probe_batch,
)
from peer.training.errors import WrongCommand
from peer.training.messages import Apply, Evaluate, RoundClosed
from peer.training.model import FlatModel, initial_module
from peer.training.shared import PARTNER_REGION
from peer.training.snapshot import Snapshots


def by_the_book(own: np.ndarray, other: np.ndarray) -> float:
    """KL(p || m) / 2 + KL(q || m) / 2 in double precision, term by term."""
    total = 0.0
    for a, b in zip(own.astype(np.float64), other.astype(np.float64), strict=True):
        p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (a, b))
        m = (p + q) / 2
        total += sum((x * np.log(x / m)).sum() / 2 for x in (p, q))
    return total / len(own)


def logits(seed: int, size: tuple[int, ...] = (7, 11), scale: float = 2.0) -> torch.Tensor:
    drawn = np.random.default_rng(seed).normal(0, scale, size)
    return torch.from_numpy(drawn.astype(np.float32))


# --- the formula ----------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_it_is_the_formula(scale):
    own, other = logits(1, scale=scale), logits(2, scale=scale)
    expected = by_the_book(own.numpy(), other.numpy())
    assert jensen_shannon(own, other) == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert jensen_shannon(other, own) == jensen_shannon(own, other)


def test_a_case_by_hand():
    """p = (1/2, 1/2) and q = (1/4, 3/4)."""
    own, other = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, math.log(3)]])
    m = (3 / 8, 5 / 8)
    expected = (
        0.5 * math.log(0.5 / m[0])
        + 0.5 * math.log(0.5 / m[1])
        + 0.25 * math.log(0.25 / m[0])
        + 0.75 * math.log(0.75 / m[1])
    ) / 2
    assert jensen_shannon(own, other) == pytest.approx(expected, rel=1e-5)


def test_equal_distributions_do_not_differ_whatever_their_logits_are():
    own = logits(3)
    assert jensen_shannon(own, own.clone()) == 0
    assert jensen_shannon(own, own + 5) == pytest.approx(0, abs=1e-7)


def test_it_is_at_most_ln_2():
    own, other = torch.full((3, 5), -1e4), torch.full((3, 5), -1e4)
    own[:, 0], other[:, 1] = 1e4, 1e4
    assert jensen_shannon(own, other) == math.log(2)
    for seed in range(20):
        found = jensen_shannon(logits(seed, scale=30), logits(seed + 100, scale=30))
        assert found is not None
        assert 0 <= found <= math.log(2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_none(bad):
    own, other = logits(1), logits(2)
    other[2] = bad
    assert jensen_shannon(own, other) is None
    assert jensen_shannon(other, own) is None


def test_finite_logits_of_any_size_give_a_number():
    own, other = logits(1) * 1e30, logits(2) * 1e37
    assert jensen_shannon(own, other) is not None


def test_the_probe_batch_is_the_first_held_out_tokens():
    blocks = np.arange(6 * 100).reshape(6, 100)
    assert np.array_equal(probe_batch(blocks), blocks[:PROBE_BLOCKS, :PROBE_TOKENS])
    short = np.arange(2 * 9).reshape(2, 9)
    assert np.array_equal(probe_batch(short), short[:, :8])


# --- in a trainer ---------------------------------------------------------------------------------
def compared(world, partner_P: torch.Tensor, *before: Evaluate) -> list[Compared]:
    """Close a round, lay a partner's weights beside it, compare, and train on."""
    codec = get_codec(world.spec.sync.codec)

    def answer(event):
        if isinstance(event, RoundClosed) and event.round == 0:
            codes = codes_as_tensor(world.slots.codes(PARTNER_REGION))
            codec.encode(partner_P, codes)
            return [*before, Compare(0), next_order(event), Apply(0)]
        return []

    return run(world, order(0), answer=answer).of(Compared)


def snapshots_of(world) -> Snapshots:
    """Those of averaging in pairs."""
    snapshots = world.parts.snapshots
    assert isinstance(snapshots, Snapshots)
    return snapshots


def outputs_of(weights: np.ndarray, world) -> torch.Tensor:
    """Of an ordinary module with these weights."""
    module = initial_module(world.spec, VOCABULARY)
    FlatModel(module, torch.device("cpu")).theta_P.copy_(torch.from_numpy(weights))
    tokens = probe_batch(world.parts.corpus.validation_blocks(4))
    with torch.no_grad():
        out = module(input_ids=torch.from_numpy(tokens)).logits.flatten(0, 1)
    result: torch.Tensor = out
    return result


@pytest.mark.slow
def test_a_trainer_compares_what_the_two_snapshots_compute():
    world = build_world(tiny_spec(codec="fp32"))
    partner = world.slow + np.random.default_rng(4).normal(0, 0.3, world.slow.size).astype("f4")
    partner *= world.slow != 0
    (told,) = compared(world, torch.from_numpy(partner))
    expected = by_the_book(
        outputs_of(world.decoded(0), world).numpy(), outputs_of(partner, world).numpy()
    )
    assert told.round == 0
    assert told.divergence == pytest.approx(expected, rel=1e-3)
    assert existing(told.divergence) > 1e-4


@pytest.mark.slow
def test_weights_that_are_apart_may_compute_the_same():
    """Neurons of the feed-forward layers change places: far away, and nothing differs."""
    world = build_world(tiny_spec(codec="fp32", overlap=False))
    own = snapshots_of(world)
    taken = own.take(0)
    partner, layout = world.decoded(taken.slot), world.parts.model.layout
    for entry in layout.entries:
        part = partner[entry.offset : entry.offset + entry.size].reshape(entry.shape)
        if "gate_proj" in entry.name or "up_proj" in entry.name:
            part[:] = part[::-1].copy()
        elif "down_proj" in entry.name:
            part[:] = part[:, ::-1].copy()
    codes = codes_as_tensor(world.slots.codes(PARTNER_REGION))
    get_codec("fp32").encode(torch.from_numpy(partner), codes)
    tokens, stepper = probe_batch(world.parts.corpus.validation_blocks(4)), world.parts.stepper
    found = output_divergence(world.parts.model, own, 0, lambda: stepper.outputs_of(tokens))
    assert found == pytest.approx(0, abs=1e-6)
    assert np.abs(partner - world.decoded(taken.slot)).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.1, 1e30])
def test_it_leaves_no_trace_whatever_the_partner_sent(value):
    """Weights of the largest that a codec takes overflow within the model, and nowhere else."""
    digests = []
    for beside in ("nothing", "a comparison"):
        world = build_world(tiny_spec(codec="fp32"))
        partner = torch.full((world.slow.size,), value)

        def answer(event, world=world, partner=partner, beside=beside):
            if isinstance(event, RoundClosed) and event.round == 0:
                codes = codes_as_tensor(world.slots.codes(PARTNER_REGION))
                get_codec("fp32").encode(partner, codes)
                probe = [Compare(0)] if beside != "nothing" else []
                return [*probe, next_order(event), Apply(0)]
            return []

        script = run(world, order(0), answer=answer)
        digests.append([event.digest for event in script.of(RoundClosed)])
        for told in script.of(Compared):
            assert told.divergence is None or 0 <= told.divergence <= math.log(2)
        assert not world.parts.model.gradient_P.any()
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_without_a_pending_snapshot_there_is_nothing_to_compare():
    for script in ([Compare(0)], [order(0), None, None, None, None, None, Compare(1)]):
        with pytest.raises(WrongCommand, match="pending"):
            run(build_world(tiny_spec()), *script)


@pytest.mark.slow
def test_memory_that_does_not_suffice_ends_no_trainer():
    world = build_world(tiny_spec())
    snapshots = snapshots_of(world)
    snapshots.take(0)
    before = world.theta.copy()

    def outputs():
        raise torch.OutOfMemoryError("not enough")

    assert output_divergence(world.parts.model, snapshots, 0, outputs) is None
    assert np.array_equal(world.theta, before)
