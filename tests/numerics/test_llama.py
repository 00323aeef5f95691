"""Our decoder is that of transformers, bit for bit: first weights, logits and gradients."""

import pytest
import torch
from transformers import LlamaForCausalLM

from peer.training.llama import Llama, is_supported
from peer.training.model import config_of, initial_module, model_config
from protocol.run.run_spec import ModelSection, RunSpec

VOCABULARY = 256


def spec_of(**sizes) -> RunSpec:
    section = {"hidden_size": 32, "intermediate_size": 96, "num_layers": 2, "num_heads": 4}
    return RunSpec(model=ModelSection(**(section | sizes)))


@pytest.mark.parametrize(
    "sizes", [{}, {"num_kv_heads": 2}, {"tie_embeddings": False}, {"rope_theta": 5e5}]
)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_first_weights_logits_and_gradients_are_those_of_transformers(sizes, precision):
    spec = spec_of(**sizes)
    ours = initial_module(spec, VOCABULARY)
    assert isinstance(ours, Llama)
    torch.manual_seed(spec.seed)
    theirs = LlamaForCausalLM(model_config(spec, VOCABULARY)).float()
    expected = dict(theirs.named_parameters())
    found = dict(ours.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    tokens = torch.randint(VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))
    for module in (ours, theirs):
        with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
            logits = module(input_ids=tokens).logits
        logits.float().square().mean().backward()
    with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
        assert torch.equal(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits)
    for name, value in found.items():
        ours_grad, theirs_grad = value.grad, expected[name].grad
        assert ours_grad is not None
        assert theirs_grad is not None
        assert torch.equal(ours_grad, theirs_grad), name


@pytest.mark.parametrize(
    "asked",
    [
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"pad_token_id": 0},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"attention_dropout": 0.1},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
        {"initializer_range": 0},
    ],
)
def test_what_is_not_here_is_left_to_transformers(asked):
    config = config_of(spec_of(), VOCABULARY)
    assert is_supported(config)
    assert not is_supported({**config, **asked})


@pytest.mark.parametrize("size", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_a_size_that_is_left_out_is_transformers_to_fill_in(size):
    config = dict(config_of(spec_of(), VOCABULARY))
    del config[size]
    assert not is_supported(config)
