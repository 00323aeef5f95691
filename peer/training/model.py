"""The model, and its parameters as one flat vector.

Idea: all that averaging does with a model (snapshot, coding, the move of the slow weights) is one
operation on one vector. So each parameter is a view of a part of `theta_P`, and its gradient a view
of the same part of `gradient_P`. Autograd adds into gradients that exist, so the views hold.

Shapes: P padded parameters, B sequences, T tokens of a sequence, D width, V vocabulary.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from peer.runtime.child_frames import MAX_FAILURE_CHARS
from protocol.errors import InvalidRunSpec
from protocol.fragment.fragments import BLOCK_OF
from protocol.run.families import FAMILIES, config_of_sizes, known_keys
from protocol.run.layout import Layout, LayoutEntry
from protocol.run.run_spec import RunSpec

from .device import has_compiler, is_out_of_memory
from .head_loss import head_loss, log_probs, takes_few_logits
from .llama import Config, Llama, is_supported
from .ranks.context import NO_TARGET, SplitContext
from .ranks.group import Ranks
from .recomputed import recompute_layers

ROUTER: Final = ".mlp.gate.weight"
"""End of the name of a matrix that Muon leaves to AdamW: its rows are experts, not directions."""
FUSED_PAIR: Final = ".gate_up_proj"
"""End of the name of two matrices of each expert, one above the other."""


GPU: Final = "cuda"
"""The type of devices on which compiling was measured to pay (docs/results/gpu.md)."""


def model_config(spec: RunSpec, vocabulary_size: int) -> Any:
    """`config_of` as the family's PretrainedConfig. Raises as `config_of` does."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tree = dict(config_of(spec, vocabulary_size))
    family = tree.get("model_type", "llama")
    if (installed := version("transformers")).startswith("4."):
        tree = _as_before_5(tree, installed)
    return CONFIG_MAPPING[family].from_dict(tree, attn_implementation="sdpa")


def _as_before_5(tree: dict[str, Any], installed: str) -> dict[str, Any]:
    """The keys by which transformers 4 knows rotary positions. Raises ValueError: a mixture."""
    family = FAMILIES[tree.get("model_type", "llama")]
    if family.is_mixture:
        raise ValueError(
            f"{tree['model_type']} needs transformers 5: {installed}, which is installed here, lays"
            " experts out otherwise, so their weights could not be averaged; pip install"
            " 'transformers>=5'"
        )
    rope = tree.pop("rope_parameters", None) or {}
    if "sliding_attention" in rope:
        tree["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = dict(rope)
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            tree[key] = rope.pop(key)
    return {**tree, "rope_scaling": rope} if rope.get("rope_type", "default") != "default" else tree


def config_of(spec: RunSpec, vocabulary_size: int) -> Config:
    """The config.json of a run's model: the frozen one, else by checkpoint or sizes.

    Raises OSError where a checkpoint cannot be read.
    """
    if spec.frozen is not None:
        frozen: dict[str, Any] = json.loads(spec.frozen.config)
        return frozen
    if spec.model.init_from is not None:
        return _of_checkpoint(spec.model.init_from)
    return config_of_sizes(spec.model, vocabulary_size)


def _of_checkpoint(source: str) -> Config:
    """The config.json of a checkpoint whose family and size were looked at (init_from.py)."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    config.use_cache = False
    config.dtype = torch.float32
    # Other families leave no size to the defaults (families.py).
    text = config.to_json_string(use_diff=config.model_type == "llama")
    found: dict[str, Any] = json.loads(known_keys(text))
    return found


def initial_module(spec: RunSpec, vocabulary_size: int) -> nn.Module:
    """The model as the founder starts it, on the CPU in fp32: from seed or checkpoint."""
    if spec.adapter is not None:
        return adapted_checkpoint(spec, vocabulary_size)
    if spec.frozen is None and spec.model.init_from is not None:
        return _loaded(spec, vocabulary_size)
    torch.manual_seed(spec.seed)
    return _module(spec, vocabulary_size)


def adapted_checkpoint(spec: RunSpec, vocabulary_size: int) -> nn.Module:
    """The run's checkpoint with its adapters in it, as every peer of the run has it.

    Raises InvalidRunSpec: there is no such checkpoint here, or another one.
    """
    from .adapter import adapted, check_base

    try:
        base = _loaded(spec, vocabulary_size)
    except OSError as error:
        why = str(error).strip().partition("\n")[0]
        raise InvalidRunSpec(
            f"model.init_from: {spec.model.init_from} cannot be loaded here, and every peer of a"
            f" run with adapters loads it by itself: {why}"
        ) from error
    module = adapted(base, spec)
    check_base(module, spec)
    return module


def _loaded(spec: RunSpec, vocabulary_size: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    source, config = spec.model.init_from, model_config(spec, vocabulary_size)
    assert source is not None, "who loads a checkpoint has named it"
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(
        source, config=config, dtype=torch.float32, use_safetensors=True
    )
    return loaded


def empty_module(
    spec: RunSpec, vocabulary_size: int, *, of_transformers: bool = False
) -> nn.Module:
    """The model with any weights, for callers that get them from elsewhere."""
    module = _module(spec, vocabulary_size, of_transformers=of_transformers)
    if spec.adapter is None:
        return module
    from .adapter import adapted

    return adapted(module, spec)


def _module(spec: RunSpec, vocabulary_size: int, *, of_transformers: bool = False) -> nn.Module:
    config = config_of(spec, vocabulary_size)
    if is_supported(config) and not of_transformers:
        return Llama(config)
    from transformers import AutoModelForCausalLM

    module: nn.Module = AutoModelForCausalLM.from_config(model_config(spec, vocabulary_size))
    for part in module.modules():
        if isinstance(getattr(part, "gate_up_proj", None), nn.Parameter):
            part.__class__ = type(type(part).__name__, (_InPrecision, type(part)), {})
    return module.float().eval()  # without dropout


class _InPrecision(nn.Module):
    """Fused experts in autocast's precision, which leaves the product of groups in fp32."""

    gate_up_proj: torch.Tensor

    def forward(self, hidden_BD: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        kind, dtype = hidden_BD.device.type, self.gate_up_proj.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        if dtype == self.gate_up_proj.dtype:
            out: torch.Tensor = super().forward(hidden_BD, *routing)
            return out
        weights = {name: weight.to(dtype) for name, weight in self.named_parameters()}
        made: torch.Tensor = functional_call(self, weights, (hidden_BD.to(dtype), *routing))
        return made


def model_shapes(spec: RunSpec, vocabulary_size: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter that is trained, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        module = empty_module(spec, vocabulary_size)
    return {name: tuple(parameter.shape) for name, parameter in trained_parameters(module).items()}


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


class FlatPart(NamedTuple):
    """A part of the flat vector that an optimizer moves as one, in the shape that it has there."""

    place: slice
    shape: tuple[int, ...] = (-1,)


class FlatModel:
    """A module whose trained parameters are views of one vector.

    Implements `fragments.FastWeights`.

    Args:
        document_end: the token at which attention begins anew; None where it sees whole blocks.
        context: divides each sequence between ranks.

    Attributes:
        moved: whether anything but a step has written to the weights since the last one.
        notes: as those of `FastWeights`.
        recomputes: whether layers are computed again in the backward pass.
        spans: what each rank has of the weights; none where each has all (sharded.py).
    """

    spans: Sequence[slice] = ()

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        *,
        compile: bool | Literal["auto"] = False,
        document_end: int | None = None,
        context: SplitContext | None = None,
    ) -> None:
        self.device = device
        self.layout = layout_of(module)
        self.moved = False
        self._module = module
        self._place()
        self._document_end = document_end
        self._context = context
        if context is not None:
            context.divide(module)
        config = getattr(module, "config", None)
        self._balance = float(getattr(config, "router_aux_loss_coef", 0.0))  # of a mixture's loss
        self._head_VD = _head_apart(module)
        self._forward: Callable[..., Any] = module
        self._may_forgo = compile == "auto"
        self.recomputes = False
        self.notes = list[str]()
        wanted = device.type == GPU if compile == "auto" else compile
        if wanted and self._may_forgo and not has_compiler():
            self._forgo("there is no C compiler here: install gcc, or set CC")
        elif wanted and self._may_forgo and context is not None:
            self._forgo("that was never tried on GPUs that divide sequences")
        elif wanted:
            self._forward = torch.compile(module)

    def _place(self) -> None:
        """Make the vectors, and the parameters views of them."""
        self._module.to(self.device)
        self.theta_P = torch.zeros(self.layout.padded_parameters, device=self.device)
        self.gradient_P = torch.zeros_like(self.theta_P)
        parameters = trained_parameters(self._module)
        for entry in self.layout.entries:
            parameter, part = parameters[entry.name], slice(entry.offset, entry.offset + entry.size)
            view = self.theta_P[part].view(entry.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self.gradient_P[part].view(entry.shape)

    @property
    def is_compiled(self) -> bool:
        return self._forward is not self._module

    def forgo_compiling(self, error: Exception) -> bool:
        """Compute plainly since it failed compiled; False where there is no choice."""
        if not (self.is_compiled and self._may_forgo):
            return False
        why = (str(error).strip() or type(error).__name__).partition("\n")[0]
        self._forgo(f"it failed: {why[:MAX_FAILURE_CHARS]}")
        return True

    def _forgo(self, why: str) -> None:
        self._forward = self._module
        self.notes.append(f"the model is not compiled: {why}")

    def recompute(self) -> bool:
        """Save memory: compute layers again for their gradient. False where they are already."""
        if not recompute_layers(self._module):
            return False
        self.recomputes = True
        self.notes.append(
            "layers are computed again in the backward pass, which takes a third more work:"
            " otherwise the memory holds too few sequences at once"
        )
        return True

    def _out(self, **given: Any) -> Any:
        """The output of the module, which computes plainly from now on where it fails compiled.

        A measurement, and each new shape of one, is compiled when it first comes. The backward pass
        is of the first step alone, for all steps have its shapes (step.py).
        """
        try:
            return self._forward(**given)
        except Exception as error:
            if is_out_of_memory(error) or not self.forgo_compiling(error):
                raise
        return self._forward(**given)

    def loss(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the targets, nats per token; int64 [B, T+1] tokens to a scalar.

        Of ranks that divide sequences each has its own summand of the mean.
        Its gradient is also that of a mixture's auxiliary loss, which its value leaves out: so
        losses of all families and weights of that loss compare.
        """
        balances = self._balance > 0 and torch.is_grad_enabled()
        told = {"output_router_logits": True} if balances else {}
        given, targets_BT = _inputs_and_targets(tokens_BT, self._document_end)
        count = (targets_BT >= 0).sum()
        if self._context is not None:
            given, targets_BT = self._context.own(given, targets_BT)
        out = self._out(**given, **told)
        out_NV, targets_N = out.logits.flatten(0, 1), targets_BT.reshape(-1)
        if self._head_VD is not None:
            loss = head_loss(out_NV, self._head_VD, targets_N, count)
        else:
            loss = functional.cross_entropy(out_NV.float(), targets_N, reduction="sum") / count
        if balances:
            loss = loss + self._balance * (out.aux_loss - out.aux_loss.detach())
        return loss

    def log_probs(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the targets; int64 [B, T+1] tokens to fp32 [B, T]; 0 of others."""
        given, targets_BT = _inputs_and_targets(tokens_BT, self._document_end)
        length = targets_BT.shape[1]
        if self._context is not None:
            given, targets_BT = self._context.own(given, targets_BT)
        out_NV = self._out(**given).logits.flatten(0, 1)
        found = log_probs(out_NV, self._head_VD, targets_BT.reshape(-1)).view_as(targets_BT)
        return found if self._context is None else self._context.whole(found, length)

    def groups(self, *, without_block_matrices: bool = False) -> list[tuple[list[FlatPart], bool]]:
        """Parts of the vector, matrices and the rest, each with whether it decays.

        Neighbours of one kind are one part.
        """
        matrices, rest = list[FlatPart](), list[FlatPart]()

        def kind(entry: LayoutEntry) -> tuple[bool, bool]:
            return len(entry.shape) >= 2, without_block_matrices and _is_block_matrix(entry)

        for (decays, is_left_out), run in groupby(self.layout.entries, key=kind):
            entries = list(run)
            part = slice(entries[0].offset, entries[-1].offset + entries[-1].padded_size)
            if not is_left_out:
                (matrices if decays else rest).append(FlatPart(part))
        return [(parts, decays) for parts, decays in ((matrices, True), (rest, False)) if parts]

    def leaf(self, part: slice, shape: tuple[int, ...] = (-1,)) -> nn.Parameter:
        """A part of the vector as a parameter, with its gradient."""
        leaf = nn.Parameter(self.theta_P[part].view(shape))
        leaf.grad = self.gradient_P[part].view(shape)
        return leaf

    # --- of several ranks, all call these together ------------------------------------------------
    def reduce(self, ranks: Ranks, spans: Sequence[slice]) -> torch.Tensor:
        """Sum the gradients; returns those of the rank's own span."""
        ranks.reduce(self.gradient_P, spans)
        return self.gradient_P[spans[ranks.rank]]

    def share(self, ranks: Ranks, spans: Sequence[slice]) -> None:
        """Each rank has moved its span. The gradient is zero again."""
        ranks.share(self.theta_P, spans)
        self.gradient_P.zero_()

    def take_moved(self, ranks: Ranks) -> None:
        """Have the weights that rank 0 has, where these were moved."""
        if self.moved:
            ranks.spread(self.theta_P)
            self.moved = False


def layout_of(module: nn.Module) -> Layout:
    shapes = {name: tuple(p.shape) for name, p in trained_parameters(module).items()}
    return Layout.from_shapes(shapes)


def block_matrices(layout: Layout) -> list[FlatPart]:
    """The matrices of the blocks, each expert's too."""
    return [
        FlatPart(slice(start, start + shape[0] * shape[1]), shape)
        for entry in layout.entries
        if _is_block_matrix(entry)
        for start, shape in _matrices_of(entry)
    ]


def _inputs_and_targets(
    tokens_BT: torch.Tensor, document_end: int | None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """[B, T] each. Tokens that are given, and no targets, are negative (corpus/blocks.py)."""
    given_BT = tokens_BT < 0
    targets_BT = tokens_BT.masked_fill(given_BT, NO_TARGET)
    inputs = {"input_ids": torch.where(given_BT, ~tokens_BT, tokens_BT)[:, :-1]}
    if document_end is not None:  # by positions that begin anew all decoders see documents
        inputs["position_ids"] = positions_in_documents(inputs["input_ids"], document_end)
    return inputs, targets_BT[:, 1:]


def positions_in_documents(inputs_BT: torch.Tensor, end: int) -> torch.Tensor:
    """Each token's place in its document; the token that ends one is the first of the next.

    So a document's first word follows from nothing but that token, as in generating.
    """
    places_T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
    starts_BT = torch.where(inputs_BT == end, places_T, 0).cummax(dim=1).values
    return places_T - starts_BT


def _head_apart(module: nn.Module) -> torch.Tensor | None:
    """Take a head of many tokens off, so that hidden values come out; None where it stays."""
    if hasattr(module, "loss"):
        return None  # a stage, whose loss is its own
    head = dict(module.named_children()).get("lm_head")
    if not isinstance(head, nn.Linear) or "bias" in dict(head.named_parameters()):
        return None
    if not takes_few_logits(head.out_features):
        return None
    config = getattr(module, "config", None)
    if getattr(config, "final_logit_softcapping", None):
        return None  # more is done to its logits than a product
    module.add_module("lm_head", nn.Identity())
    return head.weight


def _is_block_matrix(entry: LayoutEntry) -> bool:
    is_in_block = BLOCK_OF.search(entry.name) is not None
    return len(entry.shape) >= 2 and is_in_block and not entry.name.endswith(ROUTER)


def _matrices_of(entry: LayoutEntry) -> Iterator[tuple[int, tuple[int, int]]]:
    """Where each matrix of a tensor begins in the flat vector, and its shape."""
    *experts, rows, columns = entry.shape
    halves = 2 if entry.name.endswith(FUSED_PAIR) else 1
    for at in range(math.prod(experts) * halves):
        yield entry.offset + at * (rows // halves) * columns, (rows // halves, columns)
