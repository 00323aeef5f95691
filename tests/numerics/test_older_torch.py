"""What torch 2.9 lacks of 2.13 is not needed: each is taken away, and the model trains the same."""

from typing import Any

import pytest
import torch
from test_families import spec_of
from torch.nn import functional
from training_worlds import VOCABULARY

from peer.training import model as model_module
from peer.training.model import FlatModel, initial_module

CPU = torch.device("cpu")
LATER = {"linear_cross_entropy": functional, "grouped_mm": functional, "_grouped_mm": torch}
"""Functions, and where they stand; torch 2.9 has the last, and CPUs did not know it."""


def gradient(family: str, whole_logits: bool) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    model = FlatModel(initial_module(spec_of(family), VOCABULARY), CPU)
    assert (model._head_VD is None) == whole_logits
    model.loss(tokens).backward()
    return model.gradient_P


@pytest.mark.slow
@pytest.mark.parametrize("lacks", LATER)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("whole_logits", [True, False])
def test_each_can_be_lacking(
    family: str, lacks: str, whole_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole_logits:
        monkeypatch.setattr(model_module, "WHOLE_LOGITS_VOCABULARY", VOCABULARY - 1)
    expected = gradient(family, whole_logits)
    place: Any = LATER[lacks]
    monkeypatch.delattr(place, lacks, raising=False)
    torch.testing.assert_close(gradient(family, whole_logits), expected, rtol=1e-4, atol=1e-7)
