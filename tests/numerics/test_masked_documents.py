"""Attention within documents: a block of several is as good as each by itself."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from test_families import spec_of
from torch.nn import functional
from training_worlds import VOCABULARY
from transformers import AutoModelForCausalLM

from peer.training.model import FlatModel, initial_module, model_config, positions_in_documents
from protocol.run.families import FAMILIES

CPU = torch.device("cpu")
END = 3
LENGTHS = (5, 1, 11, 7)
"""Of documents in a block; each but the first begins with the token that ends the one before."""


def test_positions_begin_anew_with_the_token_that_ends_a_document() -> None:
    tokens = torch.tensor([[7, END, 8, 9, END, END], [END, 1, 2, 4, 5, 6]])
    found = positions_in_documents(tokens, END).tolist()
    assert found == [[0, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5]]


def model_of(family: str, end: int | None) -> FlatModel:
    spec = spec_of(family, context_length=24, num_heads=4, hidden_size=32, num_layers=6)
    return FlatModel(initial_module(spec, VOCABULARY), CPU, document_end=end)


def packed() -> torch.Tensor:
    """Two blocks of documents, and their last target."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(END + 1, VOCABULARY, (2, sum(LENGTHS) + 1), generator=generator)
    at = 0
    for length in LENGTHS[:-1]:
        at += length
        tokens[0, at] = END
    tokens[1, 9] = END
    return tokens


def apart(tokens: torch.Tensor) -> list[torch.Tensor]:
    """Each document by itself, with the target behind it."""
    rows = []
    for row in tokens:
        starts = [0, *(torch.nonzero(row[1:-1] == END)[:, 0] + 1).tolist(), len(row) - 1]
        rows += [row[None, a : b + 1] for a, b in pairwise(starts)]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_has_the_loss_and_the_gradient_of_its_documents(family: str) -> None:
    tokens = packed()
    masked, plain, crossing = model_of(family, END), model_of(family, None), model_of(family, None)
    loss = masked.loss(tokens)
    loss.backward()
    rows, targets = apart(tokens), tokens[:, 1:].numel()
    assert [row.shape[1] - 1 for row in rows] == [*LENGTHS, 9, sum(LENGTHS) - 9]
    total = torch.zeros(())
    for row in rows:
        part = plain.loss(row) * (row.shape[1] - 1) / targets
        part.backward()
        total += part.detach()
    assert float(loss.detach()) == pytest.approx(float(total), abs=1e-6)
    if not plain._balance:  # the auxiliary loss is of all tokens of a step
        off = torch.dist(masked.gradient_P, plain.gradient_P)
        assert off < 1e-5 * plain.gradient_P.norm()
    assert abs(float(crossing.loss(tokens).detach()) - float(total)) > 1e-4, "it does matter"


def test_what_is_said_of_each_token_is_masked_too() -> None:
    model, plain = model_of("llama", END), model_of("llama", None)
    with torch.no_grad():
        found = model.log_probs(packed())
        expected = torch.cat([plain.log_probs(row)[0] for row in apart(packed())])
    torch.testing.assert_close(found.flatten(), expected, rtol=0, atol=1e-5)


def test_without_documents_it_is_the_causal_model() -> None:
    tokens = packed().clamp_min(END + 1)
    losses = [model_of("llama", end).loss(tokens).detach() for end in (END, None)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)


def test_our_llama_is_that_of_transformers_there_too() -> None:
    """Which is told of documents by positions as well."""
    model = model_of("llama", END)
    spec = spec_of("llama", context_length=24, num_heads=4, hidden_size=32, num_layers=6)
    theirs: Any = AutoModelForCausalLM.from_config(model_config(spec, VOCABULARY)).eval()
    theirs.load_state_dict(dict(model._module.named_parameters()), strict=False)
    tokens = packed()
    positions = positions_in_documents(tokens[:, :-1], END)
    with torch.no_grad():
        logits = theirs(input_ids=tokens[:, :-1], position_ids=positions).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        torch.testing.assert_close(model.loss(tokens), loss, rtol=0, atol=1e-5)
