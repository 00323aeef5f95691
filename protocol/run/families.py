"""Families of decoders: which keys of a config.json a run may have, and what its sizes make.

A family is what transformers calls `model_type`; each has a row in FAMILIES. Sizes of the run
spec's [model] become a config.json here, and parameters are counted, to the last one.

The founder freezes the model's configuration as Hugging Face's config.json, and every joiner hands
it to transformers. A founder may be hostile, so only listed keys get there: sizes, numbers and
names of a decoder, those that its family has. A key that could name code (`auto_map`,
`trust_remote_code`), a file (`_name_or_path`) or another loader (`quantization_config`) is refused
by name. Each size is bounded, and MAX_PARAMETERS bounds the parameters that they make together.

A mixture of experts has several feed-forward networks in each layer (`experts`), of which a token
passes through a few (`experts_per_token`, chosen by a router). All of them take memory and travel;
the operations of a token are those of the few: its active parameters.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from protocol.limits import MAX_PARAMETERS
from protocol.names import nearest

if TYPE_CHECKING:
    from .run_spec import ModelSection

MOST_TOKENS: Final = 4096
"""Values of a list in a configuration."""
MOST_LAYERS: Final = 1024
_Size = Annotated[int, Field(ge=1, le=1 << 20)]
_Width = Annotated[int, Field(ge=1, le=1 << 16)]
_HeadWidth = Annotated[int, Field(ge=1, le=1 << 12)]
_Count = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
_Token = Annotated[int, Field(ge=-1, le=1 << 24)]
_Tokens = _Token | Annotated[list[_Token], Field(max_length=MOST_TOKENS)] | None
_Theta = Annotated[float, Field(ge=1e-3, le=1e12)]
_Real = Annotated[float, Field(ge=0, le=1e6)]
_Part = Annotated[float, Field(ge=0, le=1)]
_Dropout = Annotated[float, Field(ge=0, le=0.9)]
_Factors = Annotated[list[_Real], Field(max_length=MOST_TOKENS)]
_RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
_DType = Literal["float32", "bfloat16", "float16"] | None
_Activation = Literal["silu", "gelu", "relu", "gelu_new", "gelu_pytorch_tanh"]
_LayerType = Literal["full_attention", "sliding_attention"]
_LayerTypes = Annotated[list[_LayerType], Field(max_length=MOST_LAYERS)] | None


class _Config(BaseModel):
    """Defaults are those of transformers; what is left out stays out.

    Sizes of another family than Llama's may not be left out, so that none is counted wrongly.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class _Rope(_Config):
    rope_type: _RopeType = "default"
    type: _RopeType = "default"
    rope_theta: _Theta = 10_000.0
    original_max_position_embeddings: _Size = 2048
    long_factor: _Factors = []
    short_factor: _Factors = []
    truncate: bool = True
    factor: _Real | None = None
    low_freq_factor: _Real | None = None
    high_freq_factor: _Real | None = None
    attention_factor: _Real | None = None
    beta_fast: _Real | None = None
    beta_slow: _Real | None = None
    mscale: _Real | None = None
    mscale_all_dim: _Real | None = None
    partial_rotary_factor: _Part | None = None


class DecoderConfig(_Config):
    """Keys that all families have.

    Attributes:
        architecture: the class in transformers.
        fixed: what a model from sizes says beside them.
        is_mixture: whether its layers have experts.
        has_stages: whether its layers can be dealt out to the stages of a pipeline.
    """

    architecture: ClassVar[str]
    fixed: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    is_mixture: ClassVar[bool] = False
    has_stages: ClassVar[bool] = False
    feed_forward_matrices: ClassVar[int] = 3
    layer_norms: ClassVar[int] = 2

    model_type: str = "llama"
    architectures: Annotated[list[str], Field(max_length=MOST_TOKENS)] | None = None
    hidden_act: _Activation = "silu"
    vocab_size: _Size
    hidden_size: _Width
    intermediate_size: _Size
    num_hidden_layers: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count | None
    head_dim: _HeadWidth | None = None
    max_position_embeddings: _Size
    rope_theta: _Theta = 10_000.0
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    rms_norm_eps: _Part = 1e-6
    initializer_range: Annotated[float, Field(ge=0, le=10)] = 0.02
    attention_dropout: _Dropout = 0.0
    tie_word_embeddings: bool
    use_cache: bool = True
    bos_token_id: _Tokens = None
    eos_token_id: _Tokens = None
    pad_token_id: _Tokens = None
    dtype: _DType = None
    torch_dtype: _DType = None
    transformers_version: Annotated[str, Field(pattern=r"^[ -~]{0,32}$")] = ""

    @field_validator("architectures")
    @classmethod
    def _is_its_own(cls, names: list[str] | None) -> list[str] | None:
        if any(name != cls.architecture for name in names or ()):
            raise PydanticCustomError("architecture", "not of this family")
        return names

    @classmethod
    def of_sizes(cls, model: "ModelSection") -> dict[str, Any]:  # noqa: ARG003 (families use it)
        """Keys of a model from sizes that other families do not have."""
        return {}

    @property
    def head_width(self) -> int:
        return self.head_dim or max(1, self.hidden_size // self.num_attention_heads)

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.head_width

    @property
    def key_width(self) -> int:
        return (self.num_key_value_heads or self.num_attention_heads) * self.head_width

    @property
    def experts(self) -> int:
        return 1

    @property
    def experts_per_token(self) -> int:
        return 1

    @property
    def window(self) -> int | None:
        """Tokens that some layers look back at the most."""
        return getattr(self, "sliding_window", None)

    @property
    def has_head_norms(self) -> bool:
        return self._head_norms > 0

    @property
    def layer_matrices(self) -> int:
        """Values of the matrices of a layer that Muon trains: all but a router."""
        return self._attention + self.experts * self._feed_forward

    @property
    def active_matrices(self) -> int:
        """Values of the matrices that a token is multiplied with, a router's too."""
        return self._attention + self.experts_per_token * self._feed_forward + self._router

    @property
    def layer_parameters(self) -> int:
        norms = self.layer_norms * self.hidden_size
        return self.layer_matrices + self._router + norms + self._head_norms + self._biases

    @property
    def parameters(self) -> int:
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_hidden_layers * self.layer_parameters + embeddings + self._end

    @property
    def _attention(self) -> int:
        return 2 * self.hidden_size * (self.query_width + self.key_width)

    @property
    def inner_width(self) -> int:
        """That of the feed-forward, of each expert."""
        return self.intermediate_size

    @property
    def _feed_forward(self) -> int:
        return self.feed_forward_matrices * self.hidden_size * self.inner_width

    @property
    def _router(self) -> int:
        return self.experts * self.hidden_size if self.is_mixture else 0

    @property
    def _head_norms(self) -> int:
        """Norms of queries and keys."""
        return 0

    @property
    def _biases(self) -> int:
        attention = self.query_width + 2 * self.key_width + self.hidden_size
        feed_forward = 2 * self.intermediate_size + self.hidden_size
        has_attention, has_feed_forward = (
            getattr(self, key, False) for key in ("attention_bias", "mlp_bias")
        )
        return has_attention * attention + has_feed_forward * feed_forward

    @property
    def _end(self) -> int:
        """The last norm."""
        return self.hidden_size


class _WithWindow(DecoderConfig):
    use_sliding_window: bool = False
    sliding_window: _Size | None = None
    max_window_layers: Annotated[int, Field(ge=0, le=MOST_LAYERS)] = 28
    layer_types: _LayerTypes = None

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None


class _WithHeadNorms(DecoderConfig):
    """Queries and keys are divided by their root mean square, each head by itself."""

    head_dim: _HeadWidth

    @property
    def _head_norms(self) -> int:
        return 2 * self.head_width


class _Mixture(DecoderConfig):
    is_mixture = True
    num_local_experts: _Count | None = None
    num_experts: _Count | None = None
    num_experts_per_tok: _Count
    router_aux_loss_coef: _Part = 0.001
    output_router_logits: bool = False
    norm_topk_prob: bool = False

    @classmethod
    def of_sizes(cls, model: "ModelSection") -> dict[str, Any]:
        key = "num_local_experts" if cls is _Mixtral else "num_experts"
        return {
            key: model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "router_aux_loss_coef": model.balance,
        }

    @property
    def experts(self) -> int:
        return self.num_local_experts or self.num_experts or MOST_LAYERS  # at the most

    @property
    def experts_per_token(self) -> int:
        return min(self.experts, self.num_experts_per_tok)


class _LlamaConfig(DecoderConfig):
    architecture = "LlamaForCausalLM"
    fixed = MappingProxyType({"pretraining_tp": 1})
    has_stages = True
    vocab_size: _Size = 32_000
    hidden_size: _Width = 4096
    intermediate_size: _Size = 11_008
    num_hidden_layers: _Count = 32
    num_attention_heads: _Count = 32
    num_key_value_heads: _Count | None = None
    max_position_embeddings: _Size = 2048
    tie_word_embeddings: bool = False
    pretraining_tp: Annotated[int, Field(ge=1, le=1)] = 1
    attention_bias: bool = False
    mlp_bias: bool = False


class _Qwen2(_WithWindow):
    architecture = "Qwen2ForCausalLM"
    has_stages = True

    @property
    def _biases(self) -> int:
        return self.query_width + 2 * self.key_width


class _Qwen3(_WithHeadNorms, _WithWindow):
    architecture = "Qwen3ForCausalLM"
    has_stages = True
    attention_bias: bool = False


class _Mistral(DecoderConfig):
    architecture = "MistralForCausalLM"
    fixed = MappingProxyType({"sliding_window": None})
    has_stages = True
    sliding_window: _Size | None


class _WithWideNorms(DecoderConfig):
    """Queries and keys are divided by their root mean square, all heads together."""

    attention_bias: bool = False

    @property
    def _head_norms(self) -> int:
        return self.query_width + self.key_width


class _Olmo2(_WithWideNorms):
    architecture = "Olmo2ForCausalLM"
    has_stages = True


class _SmolLM3(_WithWindow):
    architecture = "SmolLM3ForCausalLM"
    has_stages = True
    attention_bias: bool = False
    mlp_bias: bool = False
    no_rope_layers: Annotated[list[Literal[0, 1]], Field(max_length=MOST_LAYERS)] | None = None
    no_rope_layer_interval: _Count = 4


class _RopeByLayer(_Config):
    full_attention: _Rope = _Rope()
    sliding_attention: _Rope = _Rope()


class _Gemma3(_WithHeadNorms):
    architecture = "Gemma3ForCausalLM"
    layer_norms = 4
    hidden_activation: _Activation = "gelu_pytorch_tanh"
    attention_bias: bool = False
    query_pre_attn_scalar: _HeadWidth = 256
    sliding_window: _Size | None
    sliding_window_pattern: _Count = 6
    layer_types: _LayerTypes = None
    rope_parameters: _RopeByLayer | None = None  # type: ignore[assignment]
    rope_local_base_freq: _Theta = 10_000.0
    final_logit_softcapping: _Real | None = None
    attn_logit_softcapping: _Real | None = None
    use_bidirectional_attention: Literal[False] | None = False

    @classmethod
    def of_sizes(cls, model: "ModelSection") -> dict[str, Any]:
        pattern, theta = (
            cls.model_fields[key].default
            for key in ("sliding_window_pattern", "rope_local_base_freq")
        )
        windows = ["sliding_attention"] * (pattern - 1) + ["full_attention"]
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": [windows[at % pattern] for at in range(model.num_layers)],
            "query_pre_attn_scalar": model.hidden_size // model.num_heads,
            "rope_parameters": {
                "full_attention": {"rope_theta": model.rope_theta, "rope_type": "default"},
                "sliding_attention": {"rope_theta": theta, "rope_type": "default"},
            },
            "sliding_window": 512,  # as in Gemma 3 of 270M and 1B
        }


class _Phi(DecoderConfig):
    architecture = "PhiForCausalLM"
    fixed = MappingProxyType(
        {"hidden_act": "gelu_new", "embd_pdrop": 0.0, "resid_pdrop": 0.0, "qk_layernorm": False}
    )
    feed_forward_matrices = 2
    hidden_act: _Activation = "gelu_new"
    layer_norm_eps: _Part = 1e-5
    embd_pdrop: _Dropout = 0.0
    resid_pdrop: _Dropout = 0.0
    partial_rotary_factor: _Part = 0.5
    qk_layernorm: Literal[False] = False

    @classmethod
    def of_sizes(cls, model: "ModelSection") -> dict[str, Any]:
        rope = {"partial_rotary_factor": 0.5, "rope_theta": model.rope_theta}
        return {"rope_parameters": {**rope, "rope_type": "default"}}

    @property
    def _biases(self) -> int:
        attention = self.query_width + 2 * self.key_width + self.hidden_size
        return attention + self.intermediate_size + self.hidden_size

    @property
    def _end(self) -> int:
        """The last norm with its bias, and the head's bias."""
        return 2 * self.hidden_size + self.vocab_size


class _Mixtral(_Mixture):
    architecture = "MixtralForCausalLM"
    fixed = MappingProxyType({"sliding_window": None})
    router_jitter_noise: _Part = 0.0
    sliding_window: _Size | None = None


class _Qwen3Moe(_WithHeadNorms, _WithWindow, _Mixture):
    architecture = "Qwen3MoeForCausalLM"
    fixed = MappingProxyType({"norm_topk_prob": True})
    attention_bias: bool = False
    moe_intermediate_size: _Size
    decoder_sparse_step: Literal[1] = 1
    mlp_only_layers: Annotated[list[int], Field(max_length=0)] | None = None

    @classmethod
    def of_sizes(cls, model: "ModelSection") -> dict[str, Any]:
        return {**super().of_sizes(model), "moe_intermediate_size": model.intermediate_size}

    @property
    def inner_width(self) -> int:
        return self.moe_intermediate_size


class _Olmoe(_WithWideNorms, _Mixture):
    architecture = "OlmoeForCausalLM"
    clip_qkv: _Real | None = None

    @property
    def _head_norms(self) -> int:
        heads = self.num_attention_heads
        keys = self.hidden_size // heads * (self.num_key_value_heads or heads)
        return self.hidden_size + keys  # whatever the heads' width


FAMILIES: Final[Mapping[str, type[DecoderConfig]]] = {
    "llama": _LlamaConfig,
    "qwen2": _Qwen2,
    "qwen3": _Qwen3,
    "mistral": _Mistral,
    "olmo2": _Olmo2,
    "smollm3": _SmolLM3,
    "gemma3_text": _Gemma3,
    "phi": _Phi,
    "mixtral": _Mixtral,
    "qwen3_moe": _Qwen3Moe,
    "olmoe": _Olmoe,
}
MIXTURES: Final = tuple(name for name, family in FAMILIES.items() if family.is_mixture)
WITH_STAGES: Final = tuple(name for name, family in FAMILIES.items() if family.has_stages)


def known_family(name: str) -> str:
    """The name again. Raises PydanticCustomError: there is no such family."""
    if name in FAMILIES:
        return name
    said = {"names": ", ".join(FAMILIES), "hint": nearest(name, FAMILIES)}
    raise PydanticCustomError("family", "unknown: use one of {names}{hint}", said)


def config_of_sizes(model: "ModelSection", vocabulary_size: int) -> dict[str, Any]:
    """The config.json of a model that begins from nothing; keys sorted."""
    family = FAMILIES[model.family]
    usual = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": model.hidden_size // model.num_heads,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.context_length,
        "mlp_bias": False,
        "model_type": model.family,
        "num_attention_heads": model.num_heads,
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": False,
        "vocab_size": vocabulary_size,
    }
    tree = {**usual, **family.fixed, **family.of_sizes(model)}
    return {key: value for key, value in sorted(tree.items()) if key in family.model_fields}


def decoder_of_sizes(model: "ModelSection", vocabulary_size: int) -> DecoderConfig:
    """Such a model, to be counted; its bounds are those of the section."""
    tree = config_of_sizes(model, vocabulary_size)
    return FAMILIES[model.family].model_construct(**tree)


def _family_of(tree: Mapping[str, Any]) -> type[DecoderConfig] | None:
    name = tree.get("model_type", "llama")
    return FAMILIES.get(name) if isinstance(name, str) else None


def known_keys(text: str) -> str:
    """A configuration of a known family, without the keys that a run spec may not hold."""
    tree = json.loads(text)
    family = _family_of(tree)
    assert family is not None
    return json.dumps({key: value for key, value in tree.items() if key in family.model_fields})


def decoder_of(text: str) -> DecoderConfig:
    """The model of a valid configuration."""
    family = _family_of(json.loads(text))
    assert family is not None
    return family.model_validate_json(text)


def division_fault(text: str, ranks: int) -> str | None:
    """Why so many processes cannot divide each sequence between them; None when they can."""
    decoder = decoder_of(text)
    if decoder.is_mixture:
        return "a mixture of experts weighs the loads of experts over whole sequences; leave it out"
    if decoder.num_attention_heads % ranks:
        heads = decoder.num_attention_heads
        return f"{heads} heads of attention cannot be divided by {ranks}; give --gpus a divisor"
    if any(json.dumps(kind) in text for kind in ("dynamic", "longrope")):
        return "the model's rotary positions depend on how long a sequence is; leave it out"
    return None


def config_fault(text: str) -> str | None:
    """Why this configuration cannot be used; None when it can."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return "is not JSON"
    return _tree_fault(tree) if isinstance(tree, dict) else "is not a table"


def _tree_fault(tree: dict[str, Any]) -> str | None:
    if (family := _family_of(tree)) is None:
        return f"has a model_type of {json.dumps(tree['model_type'])[:64]}, which is not allowed"
    try:
        count = family.model_validate(tree).parameters
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        if key not in family.model_fields:
            return f"has the key {key[:64]!r}, which a run's model may not have"
        if key not in tree:
            return f"has no {key}"
        return f"has a {key} of {json.dumps(tree[key])[:64]}, which is not allowed"
    if count > MAX_PARAMETERS:
        sizes = "num_hidden_layers, hidden_size, ..."
        return f"makes {count:.3g} parameters ({sizes}); at most {MAX_PARAMETERS:.3g} are allowed"
    return None
