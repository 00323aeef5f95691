"""The parts of bench.experts that decide what its figures mean."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import experts
from bench.expert_quality.arms import (
    ARMS,
    BY_GAIN,
    ENSEMBLES,
    GENERALIST,
    LABELS,
    PARTS,
    UNEQUAL_PARTS,
    trainings_of,
)
from bench.expert_quality.domains import MIX, Domain, Texts
from bench.expert_quality.run import Begun, Studio, combined
from bench.expert_quality.settings import SHORT, SMOKE
from bench.expert_quality.trunk import (
    MIXTURE,
    TRUNKS,
    Gated,
    Holder,
    mixture_of,
    shared_parts,
    train_together,
)
from peer.training.model import FlatModel
from protocol.experts.ensemble import RULES, ensemble_log_probs, loss_of
from protocol.run.needs import training_flops

NEW = "new"


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> tuple[Domain, ...]:
    """Files of a few pieces each; in every file of every domain the same licence."""
    root = tmp_path_factory.mktemp("texts")
    for name in (*LABELS, NEW):
        (root / name).mkdir()
        for number in range(24):
            pieces = [f"{name} says {number} and {line} to the world." * 3 for line in range(3)]
            text = "\n\n".join(["the licence of all of them", *pieces])
            (root / name / f"{number}.txt").write_text(text)
    made = [Domain(name, str(root / name), "*.txt", name != NEW) for name in (*LABELS, NEW)]
    return tuple(made)


# --- texts ----------------------------------------------------------------------------------------


def test_no_held_out_piece_is_trained(domains):
    texts = Texts.gather(domains, SMOKE.text_bytes)
    held_out = {piece for text in texts.held_out.values() for piece in text.split(b"\n\n")}
    trained = [piece for text in texts.train.values() for piece in text.split(b"\n\n")]
    assert b"the licence of all of them" in held_out
    assert not held_out & set(trained)
    assert len(set(trained)) == len(trained)
    assert NEW not in texts.train
    assert len({len(text) for text in texts.train.values()}) == 1
    mix = texts.corpus(MIX, 16)
    assert len(mix.train) == sum(map(len, texts.train.values()))


# --- budgets --------------------------------------------------------------------------------------


def flops_of(name: str) -> tuple[float, float]:
    """Of blocks alone, and with the head; seeds of other sizes apart."""
    body, whole = 0.0, 0.0
    for training, parts in trainings_of(ENSEMBLES[name]).items():
        if not training.name.startswith("seed-"):
            spec = SHORT.spec_of(training, 1, parts)
            whole += training_flops(spec)
            tokens = spec.training.total_steps * spec.tokens_per_step
            body += training_flops(spec) - tokens * 6 * 256 * spec.model.hidden_size
    return body, whole


@pytest.mark.parametrize("name", ["anchored", "equal", "steps", "sizes"])
def test_arms_spend_what_the_dense_model_does(name):
    assert flops_of(name) == pytest.approx(flops_of("dense"))


def test_each_model_is_annealed_over_its_own_steps():
    for ensemble in ENSEMBLES.values():
        for member in ensemble.members:
            assert member.stops_at is None
            spec = SHORT.spec_of(member, 1)
            assert spec.training.total_steps == SHORT.steps * member.parts // PARTS
    assert GENERALIST.parts < PARTS


@pytest.mark.parametrize("name", sorted(name for name in TRUNKS if not name.endswith(MIXTURE)))
def test_a_shared_trunk_costs_what_the_dense_model_does(name):
    assert sum(parts for _, parts in TRUNKS[name].trained) == PARTS


# --- shared trunks --------------------------------------------------------------------------------


def begun_of(domains, tmp_path: Path, count: int) -> list[Begun]:
    """Several experts, each of a domain of its own."""
    studio = Studio(replace(SMOKE, domains=domains), 1, tmp_path)
    return [studio._begun(member, None) for member in TRUNKS["trunk-fresh"].members[:count]]


def holder_of(begun: Begun) -> Holder:
    rates = [begun.rate(step) for step in range(8)]
    return Holder(begun.model, begun.stepper.optimizer, begun.step, rates)


@pytest.mark.parametrize("rounds", [0, 4])
def test_holders_end_with_one_trunk_and_blocks_of_their_own(domains, tmp_path: Path, rounds):
    holders = [holder_of(each) for each in begun_of(domains, tmp_path, 2)]
    train_together(holders, rounds)
    model, other = (holder.model for holder in holders)
    trunk = np.zeros(len(model.theta_P), bool)
    for part in shared_parts(model):
        trunk[part] = True
    is_equal = (model.theta_P == other.theta_P).numpy()
    assert is_equal[trunk].all()
    assert not is_equal[~trunk].all()
    assert 0.2 < trunk.mean() < 0.9


def test_turns_on_one_trunk_are_the_steps_of_one_model_where_all_is_shared(
    domains, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and moments go from one to the next, and no step is lost."""
    monkeypatch.setattr("bench.expert_quality.trunk.shared_parts", whole)
    monkeypatch.setattr("bench.expert_quality.trunk._own_moments", lambda _: set())
    holders = [holder_of(each) for each in begun_of(domains, tmp_path, 2)]
    train_together(holders, 0)
    one, other = begun_of(domains, tmp_path, 2)
    for step in range(8):
        for feed in (one.feed, other.feed):
            one.stepper.step(feed.next_blocks()[0], one.rate(step))
    assert torch.equal(holders[0].model.theta_P, one.model.theta_P)


def whole(model: FlatModel) -> list[slice]:
    return [slice(0, len(model.theta_P))]


def test_a_mixture_of_equal_blocks_is_the_model_and_its_gates_alone_train(domains, tmp_path: Path):
    studio = Studio(replace(SMOKE, domains=domains), 1, tmp_path)
    alike = [studio._begun(TRUNKS["trunk-fresh"].members[0], None).module for _ in range(3)]
    tokens_BT = torch.arange(32).view(2, 16)
    before = alike[0](input_ids=tokens_BT).logits
    mixed, gates = mixture_of(alike)
    assert torch.allclose(mixed(input_ids=tokens_BT).logits, before, atol=1e-6)
    assert [each for each in mixed.parameters() if each.requires_grad] == gates
    assert len(gates) == sum(isinstance(each, Gated) for each in mixed.modules())


# --- figures --------------------------------------------------------------------------------------


def test_a_figure_is_that_of_the_protocol_on_stored_log_probs():
    draw = np.random.default_rng(1)
    told = [{name: -draw.random((4, 8), np.float32) for name in "ab"} for _ in range(3)]
    alone, together = combined(told)
    for domain in "ab":
        stored = np.stack([each[domain] for each in told])
        assert alone[domain] == [loss_of(each) for each in stored]
        for rule, how in RULES.items():
            assert together[rule][domain] == loss_of(ensemble_log_probs(stored, how))


@pytest.mark.long
@pytest.mark.slow
def test_the_smallest_study_runs_and_goes_on_where_it_was(
    domains, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(experts, "SMOKE", replace(SMOKE, domains=domains))
    results = tmp_path / "results.jsonl"
    given = ["--smoke", "--results", str(results), "--cache", str(tmp_path)]
    outputs, made = [], []
    for more in (["--arms", "equal"], [], []):
        monkeypatch.setattr(sys, "argv", ["experts", *given, *more])
        experts.main()
        outputs.append(capsys.readouterr().out.split("Experts and one model")[0])
        made.append(results.read_text())
    first, whole, again = outputs
    assert "docs-12-medium, seed 1:" in first
    assert "docs-12-medium, seed 1:" not in whole
    assert "sizes, seed 1:" in whole
    assert len(made[1].splitlines()) == len(ARMS) + len(TRUNKS)
    assert (again, made[2]) == ("", made[1])


@pytest.mark.slow
def test_what_is_told_is_the_loss_of_the_model_and_gain_has_the_shares_of_labels(
    domains, tmp_path: Path
) -> None:
    setting = replace(SMOKE, domains=domains)
    studio = Studio(setting, 1, tmp_path)
    equal = ENSEMBLES["equal"]
    for member in equal.members:
        model = studio.model(member)
        told = -float(model.told[member.domain].mean())
        assert told == pytest.approx(model.curve[-1][1], abs=1e-5)  # the same two blocks
    chosen = studio.by_gain(BY_GAIN, equal)
    assert [member.parts for member in chosen.members] == list(UNEQUAL_PARTS)
    assert {member.domain for member in chosen.members} == set(LABELS)
