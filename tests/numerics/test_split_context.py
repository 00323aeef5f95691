"""Processes that divide each sequence between them compute what one computes of the whole."""

import os
import subprocess
import sys

import pytest
import split_ranks
import torch
from split_ranks import CASES, CPU, LENGTH, VOCABULARY, computed

from peer.training import model as model_module
from peer.training.fragments import written_for_a_while
from peer.training.model import FlatModel, empty_module
from peer.training.optimizer import inner_optimizer
from peer.training.ranks.context import SplitContext
from peer.training.ranks.group import Ranks
from peer.training.shared import code_memory
from peer.training.step import Stepper

pytestmark = [pytest.mark.slow, pytest.mark.long]
LIMIT_S = 300


@pytest.fixture(scope="module", params=[2, 3])
def divided(request, tmp_path_factory):
    """What so many ranks have computed of each case; 3 do not divide the length, nor 2 a head."""
    path, store_fd = tmp_path_factory.mktemp("divided") / "found", code_memory()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                split_ranks.__file__,
                *map(str, (rank, request.param, store_fd, path)),
            ],
            pass_fds=(store_fd,),
            env=environment,
        )
        for rank in range(request.param)
    ]
    try:
        assert [rank.wait(LIMIT_S) for rank in ranks] == [0] * request.param
    finally:
        for rank in ranks:
            rank.kill()
        os.close(store_fd)
    return {**torch.load(path), "ranks": request.param}


@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_log_probabilities_are_those_of_one_process(divided, name):
    case, found = CASES[name], divided[name]
    one, bound = computed(case), 1e-5 if case.precision == "fp32" else 2e-2
    assert found["log_probs"].shape == (3, LENGTH)
    assert one["gradient"].norm() > 0.1
    for what in ("loss", "gradient", "log_probs"):
        difference = torch.linalg.vector_norm(found[what] - one[what])
        assert difference <= bound * torch.linalg.vector_norm(one[what]), what


def test_a_rank_keeps_its_share_of_what_one_process_keeps(divided):
    """Of 13 tokens the first rank has 7 or 5; of a model of transformers in both."""
    name, share = "mistral", -(-LENGTH // divided["ranks"]) / LENGTH
    assert divided[name]["kept"] <= 1.1 * share * computed(CASES[name])["kept"]


SPEC = CASES["llama"].spec


def test_if_one_rank_computes_layers_again_all_do(monkeypatch):
    """Else one would wait in a layer for others that have gone on."""
    model, ranks = FlatModel(empty_module(SPEC, VOCABULARY), CPU), Ranks(0, 2)
    stepper = Stepper(model, inner_optimizer(model, SPEC.optimizer, "fp32"), "fp32", 4, ranks)
    for others, recomputes in ((1, False), (0, True)):
        said = iter((2, others))
        monkeypatch.setattr(ranks, "least", lambda _, said=said: next(said))
        stepper.agree()
        assert (stepper.micro_batch, model.recomputes) == (2, recomputes)


def test_ranks_that_have_measured_other_weights_get_their_own_again(monkeypatch):
    """Else the others would train on from those that were measured."""
    monkeypatch.delattr(FlatModel, "log_probs")  # a sum of losses needs none of all tokens
    ranks = Ranks(0, 2, divide_sequences=True)
    module = empty_module(SPEC, VOCABULARY, of_transformers=True)
    model = FlatModel(module, CPU, context=SplitContext(ranks))
    stepper = Stepper(model, inner_optimizer(model, SPEC.optimizer, "fp32"), "fp32", 4, ranks)
    with ranks.apart():
        with written_for_a_while(model):
            stepper.loss_of(split_ranks.tokens().numpy())
        assert model.moved
        stepper.loss_of(split_ranks.tokens().numpy())
        assert not model.moved, "all have rank 0's now"


def test_auto_compiles_no_model_whose_sequences_are_divided(monkeypatch):
    monkeypatch.setattr(model_module, "GPU", "cpu")
    monkeypatch.setattr(torch, "compile", lambda module: module.forward)
    whole = FlatModel(empty_module(SPEC, VOCABULARY), CPU, compile="auto")
    assert whole.is_compiled
    module = empty_module(SPEC, VOCABULARY, of_transformers=True)
    context = SplitContext(Ranks(0, 2, divide_sequences=True))
    divided = FlatModel(module, CPU, compile="auto", context=context)
    assert not divided.is_compiled
    assert divided.notes == [
        "the model is not compiled: that was never tried on GPUs that divide sequences"
    ]
