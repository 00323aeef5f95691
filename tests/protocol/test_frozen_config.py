"""What a founder may have joiners hand to transformers as the configuration of the model."""

import json

import pytest

from protocol.errors import InvalidRunSpec
from protocol.limits import MAX_PARAMETERS
from protocol.run.families import FAMILIES, config_fault, config_of_sizes, known_keys
from protocol.run.run_spec import FrozenSection, ModelSection, RunSpec, parse_bytes

PLAIN = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "eos_token_id": [1, 2],
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
    "tie_word_embeddings": True,
    "transformers_version": "5.23.0",
}


def test_what_llama_models_say_is_taken():
    assert config_fault(json.dumps(PLAIN)) is None
    assert config_fault("{}") is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("auto_map", {"AutoModel": "evil--repo.module"}),
        ("_name_or_path", "/etc/passwd"),
        ("trust_remote_code", True),
        ("quantization_config", {"quant_method": "awq"}),
        ("_attn_implementation", "somebody/kernel"),
        ("attn_implementation", "somebody/kernel"),
        ("model_type", "deepseek_v3"),
        ("architectures", ["Evil"]),
        ("vocab_size", 1 << 40),
        ("vocab_size", True),
        ("vocab_size", "256"),
        ("hidden_size", 1 << 20),
        ("hidden_size", 0),
        ("num_hidden_layers", 10**6),
        ("max_position_embeddings", 1 << 30),
        ("pretraining_tp", 2),
        ("hidden_act", "__import__"),
        ("rope_scaling", {"rope_type": "../x"}),
        ("rope_parameters", {"path": "/etc/passwd"}),
        ("rms_norm_eps", float("nan")),
        ("initializer_range", 1e9),
        ("transformers_version", "x" * 100),
        ("eos_token_id", [0] * 100_000),
    ],
)
def test_anything_else_is_refused_and_the_key_is_named(key, value):
    fault = config_fault(json.dumps({**PLAIN, key: value}))
    assert fault is not None
    assert key in fault


def config_of(family: str) -> dict[str, object]:
    return config_of_sizes(ModelSection(family=family), 256)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_own_keys(family):
    tree = config_of(family)
    assert config_fault(json.dumps(tree)) is None
    for key, value in {
        "auto_map": {"AutoModel": "evil--repo.module"},
        "_name_or_path": "/etc/passwd",
        "quantization_config": {"quant_method": "awq"},
        "architectures": ["Evil"],
        "attn_implementation": "somebody/kernel",
        "experts_implementation": "somebody/kernel",
        "rope_scaling": {"rope_type": "../x"},
        "layer_types": ["somebody/kernel"],
        "hidden_activation": "__import__",
        "num_hidden_layers": 10**6,
    }.items():
        fault = config_fault(json.dumps({**tree, key: value}))
        assert fault is not None
        assert key in fault


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama"}))
@pytest.mark.parametrize("size", ["hidden_size", "vocab_size", "tie_word_embeddings"])
def test_no_size_is_left_to_the_defaults_of_transformers(family, size):
    tree = config_of(family)
    del tree[size]
    assert config_fault(json.dumps(tree)) == f"has no {size}"


def test_experts_that_are_not_counted_are_many():
    tree = config_of("mixtral") | {"hidden_size": 4096, "num_hidden_layers": 100}
    assert config_fault(json.dumps(tree)) is None
    del tree["num_local_experts"]
    assert "parameters" in (config_fault(json.dumps(tree)) or "")


def test_sizes_that_pass_one_by_one_may_not_pass_together():
    large = {**PLAIN, "hidden_size": 1 << 16, "num_hidden_layers": 1024}
    fault = config_fault(json.dumps(large))
    assert fault is not None
    assert "parameters" in fault
    assert config_fault(json.dumps({"num_hidden_layers": 1000})) is not None, "defaults count too"


@pytest.mark.parametrize("text", ["", "[]", "3", "[" * 60_000, '{"vocab_size": }'])
def test_what_is_no_table_is_refused(text):
    assert config_fault(text) is not None


def test_the_founder_leaves_out_what_joiners_would_refuse():
    text = known_keys(json.dumps({**PLAIN, "_name_or_path": "/home/me", "auto_map": {}}))
    assert json.loads(text) == PLAIN


def frozen(config: str, padded: int = 128) -> bytes:
    """The bytes of a run spec with this configuration, signed or not."""
    section = FrozenSection.model_construct(
        config=config, layout_digest="0" * 32, parameters=7, padded_parameters=padded
    )
    return RunSpec().model_copy(update={"frozen": section}).to_bytes()


def test_a_joiner_refuses_the_whole_spec_with_a_sentence():
    assert parse_bytes(frozen(json.dumps(PLAIN))).frozen is not None
    with pytest.raises(InvalidRunSpec, match=r"frozen.config.*auto_map"):
        parse_bytes(frozen(json.dumps({**PLAIN, "auto_map": {}})))
    with pytest.raises(InvalidRunSpec, match="padded_parameters"):
        parse_bytes(frozen("{}", padded=256 * MAX_PARAMETERS))
