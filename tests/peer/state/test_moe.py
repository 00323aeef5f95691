"""Experts of one size as one Mixtral."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ensemble_worlds import export_of, run_with
from transformers import AutoModelForCausalLM, MixtralForCausalLM, Qwen2Config

from peer.state.ensemble_reader import ExpertEnsemble
from peer.state.moe import Domain, NoMixture, compared, merged
from protocol.experts.ensemble import Combination, ensemble_log_probs, loss_of

pytestmark = pytest.mark.slow


def domains_of(names) -> list[Domain]:
    """Each in bytes of its own, so that any gate can tell them apart."""
    rng = np.random.default_rng(7)
    blocks = [rng.integers(40 * n, 40 * n + 6, (6, 17)) for n in range(len(names))]
    return [Domain(name, each[1::2], each[::2]) for name, each in zip(names, blocks, strict=True)]


@pytest.mark.parametrize("tied", [True, False])
def test_equal_experts_give_the_model_that_they_are(tmp_path: Path, tied: bool) -> None:
    sizes = {"tie_embeddings": tied}
    run = run_with(models=dict.fromkeys(("general", "code", "math"), sizes))
    folder = export_of(tmp_path / "out", run, seeds=(5, 5, 5))
    ensemble = ExpertEnsemble(folder)
    mixture = merged(ensemble, domains_of(ensemble.names), tmp_path / "moe")
    assert isinstance(mixture, MixtralForCausalLM)
    assert mixture.config.num_local_experts == 3
    assert mixture.config.num_experts_per_tok == 2
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        one, all_ = ensemble.models[0](tokens).logits, mixture(tokens).logits
    torch.testing.assert_close(all_, one, rtol=1e-4, atol=1e-4)


def test_a_gate_sends_tokens_to_the_expert_of_their_domain(tmp_path: Path) -> None:
    ensemble = ExpertEnsemble(export_of(tmp_path / "out", run_with(top=1), seeds=(5, 5, 5)))
    domains = domains_of(ensemble.names)
    mixture = merged(ensemble, domains, tmp_path / "moe")
    for number, domain in enumerate(domains):
        tokens = torch.from_numpy(domain.measured_BT[:, :-1])
        gates = mixture(tokens, output_router_logits=True).router_logits
        chosen = gates[0].argmax(-1)
        assert (chosen == number).float().mean() > 2 / 3


def test_all_are_measured_with_the_blocks_that_the_gates_have_not_seen(tmp_path: Path) -> None:
    ensemble = ExpertEnsemble(export_of(tmp_path / "out", run_with()))
    domains = domains_of(ensemble.names)
    rows = compared(ensemble, merged(ensemble, domains, tmp_path / "moe"), domains)
    assert [*rows] == ["general", "code", "math", "ensemble", "mixture"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    for place, domain in enumerate(domains):
        tokens = torch.from_numpy(domain.measured_BT)
        told = []
        with torch.no_grad():
            for model in (*ensemble.models, loaded):
                loss = torch.nn.functional.cross_entropy(
                    model(tokens[:, :-1]).logits.flatten(0, 1),
                    tokens[:, 1:].flatten(),
                    reduction="none",
                )
                told.append(-loss.reshape(len(tokens), -1).double().numpy())
        *experts, mixture = told
        together = ensemble_log_probs(np.stack(experts), Combination(1.0, 0.01, 2))
        expected = [*map(loss_of, experts), loss_of(together), loss_of(mixture)]
        assert [row[place] for row in rows.values()] == pytest.approx(expected, abs=1e-5)


def test_sizes_that_differ_are_named(tmp_path: Path) -> None:
    run = run_with(models={"math": {"intermediate_size": 64}})
    ensemble = ExpertEnsemble(export_of(tmp_path / "out", run))
    with pytest.raises(NoMixture, match="general has intermediate_size = 48 and math 64"):
        merged(ensemble, domains_of(ensemble.names), tmp_path / "moe")
    assert not (tmp_path / "moe").exists()


def test_one_expert_and_other_families_make_none(tmp_path: Path) -> None:
    folder = export_of(tmp_path / "out", run_with())
    one = ExpertEnsemble(folder, ["code"])
    with pytest.raises(NoMixture, match="code is the only one that answers"):
        merged(one, domains_of(one.names), tmp_path / "moe")
    ensemble = ExpertEnsemble(folder)
    ensemble.models[1].config = Qwen2Config()
    with pytest.raises(NoMixture, match="code is a 'qwen2' model"):
        merged(ensemble, domains_of(ensemble.names), tmp_path / "moe")
