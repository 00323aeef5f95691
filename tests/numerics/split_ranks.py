"""Ranks of real processes that divide sequences: what they compute of tiny models, in a file.

python split_ranks.py RANK COUNT STORE_FD FILE
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from peer.training import head_loss
from peer.training.device import Precision, autocast
from peer.training.model import FlatModel, empty_module, initial_module
from peer.training.ranks.context import SplitContext
from peer.training.ranks.group import ALONE, Ranks
from protocol.run.families import config_of_sizes
from protocol.run.run_spec import FrozenSection, ModelSection, RunSpec
from protocol.run.sections import AdapterSection

CPU = torch.device("cpu")
VOCABULARY, LENGTH, DOCUMENT_END = 40, 13, 0


@dataclass(frozen=True, slots=True)
class Case:
    """A model of six heads; `config` are further keys of its configuration."""

    family: str = "llama"
    kv_heads: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    documents: bool = False
    recomputes: bool = False
    few_logits: bool = False
    adapts: bool = False
    precision: Precision = "fp32"

    @property
    def spec(self) -> RunSpec:
        section = ModelSection(
            family=self.family,
            hidden_size=24,
            intermediate_size=40,
            num_layers=7 if self.family == "gemma3_text" else 2,  # with one that sees all
            num_heads=6,
            num_kv_heads=self.kv_heads,
            context_length=LENGTH,
        )
        text = json.dumps(config_of_sizes(section, VOCABULARY) | self.config)
        frozen = FrozenSection(
            config=text, layout_digest="0" * 32, parameters=1, padded_parameters=128
        )
        if not self.adapts:
            return RunSpec(seed=5, model=section, frozen=frozen)
        base = ModelSection(init_from="a checkpoint", context_length=LENGTH)
        return RunSpec(seed=5, model=base, frozen=frozen, adapter=AdapterSection())


WINDOW = {"sliding_window": 5}
CASES = {
    "llama": Case(),
    "llama, keys of one head": Case(kv_heads=1),
    "llama, keys of all heads": Case(kv_heads=6),
    "llama, documents": Case(documents=True),
    "llama, computed again": Case(recomputes=True),
    "llama, few logits": Case(few_logits=True),
    "llama, adapters": Case(adapts=True),
    "llama, bf16": Case(precision="bf16"),
    "qwen2": Case("qwen2"),
    "qwen3, documents": Case("qwen3", documents=True),
    "mistral": Case("mistral"),
    "mistral, window": Case("mistral", config=WINDOW),
    "olmo2": Case("olmo2"),
    "smollm3": Case("smollm3"),
    "gemma3_text, windows": Case("gemma3_text", config=WINDOW),
    "gemma3_text, windows and documents": Case("gemma3_text", config=WINDOW, documents=True),
    "phi": Case("phi"),
}


def tokens() -> torch.Tensor:
    """Three sequences with documents; of one only the first tokens are targets."""
    drawn = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    drawn[0, [4, 9]] = DOCUMENT_END
    drawn[1, 3:] = ~drawn[1, 3:]
    drawn[2, 6:8] = ~drawn[2, 6:8]
    return drawn


def computed(case: Case, ranks: Ranks = ALONE) -> dict[str, torch.Tensor]:
    """Loss, its gradient, log-probabilities, and how many values the backward pass has kept."""
    spec, divides = case.spec, ranks.divide_sequences
    vars(head_loss)["WHOLE_LOGITS_VOCABULARY"] = 1 if case.few_logits else 1 << 16
    vars(head_loss)["MOST_LOGITS"] = 7 * VOCABULARY
    torch.manual_seed(spec.seed)
    flat = FlatModel(
        empty_module(spec, VOCABULARY, of_transformers=divides),
        CPU,
        document_end=DOCUMENT_END if case.documents else None,
        context=SplitContext(ranks) if divides else None,
    )
    # Large enough for attention to weigh tokens unequally.
    if case.adapts:
        flat.theta_P.normal_(generator=torch.Generator().manual_seed(3))
    else:
        flat.theta_P.copy_(3 * FlatModel(initial_module(spec, VOCABULARY), CPU).theta_P)
    if case.recomputes:
        assert flat.recompute()
    kept = torch.zeros(())

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() != flat.theta_P.untyped_storage().data_ptr():
            kept.add_(tensor.numel())
        return tensor

    keeping = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with autocast(CPU, case.precision), keeping:
        loss = flat.loss(tokens())
    loss.backward()
    with torch.no_grad(), autocast(CPU, case.precision):
        told_BT = flat.log_probs(tokens())
    found = {"loss": loss.detach(), "gradient": flat.gradient_P}
    summed = {name: ranks.sum(each) for name, each in found.items()}
    return summed | {"log_probs": told_BT, "kept": kept}


def main(rank: int, count: int, store_fd: int, path: Path) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.join(rank, count, CPU, store_fd, divide_sequences=True)
    found = {name: computed(case, ranks) for name, case in CASES.items()}
    if rank == 0:
        torch.save(found, path)
    ranks.sum(torch.zeros(1))
    distributed.destroy_process_group()


if __name__ == "__main__":
    numbers, path = map(int, sys.argv[1:4]), Path(sys.argv[4])
    rank, count, store_fd = numbers
    main(rank, count, store_fd, path)
