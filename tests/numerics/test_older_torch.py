"""What torch 2.9 lacks of 2.13 is not needed: each is taken away, and the model trains the same."""

import pytest
import torch
from test_families import spec_of
from torch.nn import functional
from training_worlds import VOCABULARY

from peer.training import head_loss
from peer.training.model import FlatModel, initial_module

CPU = torch.device("cpu")
GROUPS = ((functional, "grouped_mm"), (torch, "_grouped_mm"))
LACKING = {
    "the loss": ((functional, "linear_cross_entropy"),),
    "products of groups, but for the older name": GROUPS[:1],
    "products of groups": GROUPS,
}


def gradient(family: str, whole_logits: bool) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    model = FlatModel(initial_module(spec_of(family), VOCABULARY), CPU)
    assert (model._head_VD is None) == whole_logits
    model.loss(tokens).backward()
    return model.gradient_P


@pytest.mark.slow
@pytest.mark.parametrize("lacking", LACKING)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("whole_logits", [True, False])
def test_each_can_be_lacking(
    family: str, lacking: str, whole_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole_logits:
        monkeypatch.setattr(head_loss, "WHOLE_LOGITS_VOCABULARY", VOCABULARY - 1)
    expected = gradient(family, whole_logits)
    for place, name in LACKING[lacking]:
        monkeypatch.delattr(place, name, raising=False)
    torch.testing.assert_close(gradient(family, whole_logits), expected, rtol=1e-4, atol=1e-7)
