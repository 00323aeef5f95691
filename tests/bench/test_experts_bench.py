"""The parts of bench.experts that decide what its figures mean."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

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
from bench.expert_quality.run import Studio, combined
from bench.expert_quality.settings import SHORT, SMOKE
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
    assert len(made[1].splitlines()) == len(ARMS)
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
