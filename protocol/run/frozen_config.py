"""What the model's configuration in a run spec may say: a list of keys, each with its bounds.

The founder freezes the configuration of the model as Hugging Face's config.json, and every joiner
hands it to transformers. A founder may be hostile, so nothing gets there but what is listed here:
sizes, numbers and names of a Llama decoder. A key that could name code (`auto_map`,
`trust_remote_code`), a file (`_name_or_path`) or another loader (`quantization_config`) is not on
the list, and what is not on it is refused by name. Sizes are bounded one by one, and the parameters
that they make together by MAX_PARAMETERS.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from protocol.limits import MAX_PARAMETERS

Check = Callable[[Any], bool]
MAX_TOKEN_ID: Final = 1 << 24
MAX_LISTED: Final = 4096


def _whole(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _real(low: float, high: float) -> Check:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _one_of(*values: Any) -> Check:
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def _short_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 32 and value.isascii() and value.isprintable()


def _many(check: Check) -> Check:
    return lambda value: (
        isinstance(value, list) and len(value) <= MAX_LISTED and all(map(check, value))
    )


def _any_of(*checks: Check) -> Check:
    return lambda value: any(check(value) for check in checks)


_FLAG: Final = _one_of(True, False)
_NOTHING: Final = _one_of(None)
_SIZE: Final = _whole(1, 1 << 20)
_TOKEN: Final = _whole(-1, MAX_TOKEN_ID)
_FACTOR: Final = _any_of(_NOTHING, _real(0, 1e6))
_ROPE: Final[Mapping[str, Check]] = {
    "rope_type": _one_of("default", "linear", "dynamic", "yarn", "longrope", "llama3"),
    "type": _one_of("default", "linear", "dynamic", "yarn", "longrope", "llama3"),
    "rope_theta": _real(1e-3, 1e12),
    "original_max_position_embeddings": _SIZE,
    "long_factor": _many(_real(0, 1e6)),
    "short_factor": _many(_real(0, 1e6)),
    "truncate": _FLAG,
    **dict.fromkeys(
        ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast",
         "beta_slow", "mscale", "mscale_all_dim", "partial_rotary_factor"),
        _FACTOR,
    ),
}  # fmt: skip


def _rope(value: Any) -> bool:
    return isinstance(value, dict) and all(
        key in _ROPE and _ROPE[key](each) for key, each in value.items()
    )


_TOKENS: Final = _any_of(_NOTHING, _TOKEN, _many(_TOKEN))
_DTYPE: Final = _one_of(None, "float32", "bfloat16", "float16")
_KEYS: Final[Mapping[str, Check]] = {
    "model_type": _one_of("llama"),
    "architectures": _any_of(_NOTHING, _many(_one_of("LlamaForCausalLM"))),
    "hidden_act": _one_of("silu", "gelu", "relu"),
    "vocab_size": _SIZE,
    "hidden_size": _whole(1, 1 << 16),
    "intermediate_size": _SIZE,
    "num_hidden_layers": _whole(1, 1024),
    "num_attention_heads": _whole(1, 1024),
    "num_key_value_heads": _any_of(_NOTHING, _whole(1, 1024)),
    "head_dim": _any_of(_NOTHING, _whole(1, 1 << 12)),
    "max_position_embeddings": _SIZE,
    "pretraining_tp": _one_of(1),
    "rope_theta": _real(1e-3, 1e12),
    "rope_parameters": _any_of(_NOTHING, _rope),
    "rope_scaling": _any_of(_NOTHING, _rope),
    "rms_norm_eps": _real(0, 1),
    "initializer_range": _real(0, 10),
    "attention_dropout": _real(0, 0.9),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_cache"), _FLAG),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKENS),
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    "transformers_version": _short_text,
}
_LLAMA: Final = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
"""What transformers takes where a size is left out."""


def known_keys(text: str) -> str:
    """The configuration without the keys that a run spec may not hold."""
    return json.dumps({key: value for key, value in json.loads(text).items() if key in _KEYS})


def config_fault(text: str) -> str | None:
    """Why this configuration cannot be used, with the key; None when it can."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return "is not JSON"
    if not isinstance(tree, dict):
        return "is not a table"
    for key, value in tree.items():
        if key not in _KEYS:
            return f"has the key {key[:64]!r}, which a run's model may not have"
        if not _KEYS[key](value):
            return f"has a {key} of {json.dumps(value)[:64]}, which is not allowed"
    if (count := _parameters(tree)) > MAX_PARAMETERS:
        sizes = "num_hidden_layers, hidden_size, ..."
        return f"makes {count:.3g} parameters ({sizes}); at most {MAX_PARAMETERS:.3g} are allowed"
    return None


def _parameters(tree: Mapping[str, Any]) -> int:
    """Parameters of a Llama decoder of these sizes, without norms and biases."""
    sizes = {**_LLAMA, **tree}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head = tree.get("head_dim") or max(1, hidden // heads)
    kv_heads = tree.get("num_key_value_heads") or heads
    attention = 2 * hidden * head * (heads + kv_heads)
    layer: int = attention + 3 * hidden * sizes["intermediate_size"]
    embeddings = 1 if tree.get("tie_word_embeddings") else 2
    return int(sizes["num_hidden_layers"] * layer + embeddings * sizes["vocab_size"] * hidden)
