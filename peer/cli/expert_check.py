"""Claims of experts, checked: a block of each domain is computed with the weights of a peer."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from peer.observe.control import ControlFailed
from peer.state.home import Home
from peer.training.corpus.folder import kept_corpus
from peer.training.model import FlatModel, empty_module
from protocol.content.samples import Float32Vector, stamp_of
from protocol.experts.claims import Values, claimed_blocks, differs
from protocol.run.layout import part_of_expert
from protocol.run.run_spec import RunSpec
from protocol.schedule.progress import TaskProgress, Tell

from .evaluate import ExpertSaid
from .export import fetched, taken

Chosen = tuple[int, Values]
"""Which block of a domain was chosen, and what weights say of it."""
ComputeBlock = Callable[[int], Chosen | None]


def check_claims(home: Home, spec: RunSpec, said: Sequence[ExpertSaid], tell: Tell) -> None:
    """Note of each expert whether its peer is believed."""
    for number, each in enumerate(said):
        tell(TaskProgress("checking the experts", number, len(said), "experts"))
        if each.claims and each.believed is None:
            frozen = spec.experts[number].frozen
            assert frozen is not None, "the run was founded"
            part, size = part_of_expert(number), frozen.padded_parameters
            try:
                slow_P = taken(Path(fetched(home, part, size, each.peer_id)["path"]))
            except ControlFailed as error:
                each.check = f"not checked: {error}"
                continue
            compute = weights_on_blocks(home, spec, number, slow_P)
            context = spec.model.context_length
            each.believed, each.check = verdict_on(each, stamp_of(slow_P), compute, context)


def verdict_on(
    said: ExpertSaid, stamp: str, compute: ComputeBlock, context: int
) -> tuple[bool | None, str]:
    """Whether claims are what the weights with this stamp say; None where there is none of them."""
    checked = 0
    for domain, claim in said.claims.items():
        computed = compute(domain) if said.stamps[domain] == stamp else None
        if computed is None:
            continue
        block, values = computed
        checked += 1
        if differs(claim.reshape(-1, context)[block], values):
            return False, "left out: its weights say another thing than it claims"
    if not checked:
        return None, "not checked: its weights have moved on since it measured"
    return True, f"checked on a block of each of {checked} domains"


def weights_on_blocks(home: Home, run: RunSpec, number: int, slow_P: Float32Vector) -> ComputeBlock:
    """Computes, with an expert's weights, a block of a domain that nobody can foresee."""
    models, drawn = run.models, np.random.default_rng()
    model: FlatModel | None = None

    def compute(domain: int) -> Chosen | None:
        nonlocal model
        corpus = kept_corpus(home.cache_dir, models[domain].data.manifest or "")
        if corpus is None:
            return None
        made_of = corpus.manifest
        if model is None:
            module = empty_module(models[number], made_of.vocabulary_size)
            end = run.data.document_end
            model = FlatModel(module, torch.device("cpu"), document_end=end)
            model.theta_P.copy_(torch.from_numpy(slow_P))
        blocks = claimed_blocks(made_of.held_out_blocks, made_of.context_length)
        chosen, length = int(drawn.integers(blocks)), made_of.context_length + 1
        at = chosen * length
        tokens = np.fromfile(corpus.held_out, made_of.dtype)[at : at + length].astype(np.int64)
        with torch.no_grad():
            return chosen, model.log_probs(torch.from_numpy(tokens[None]))[0].numpy()

    return compute
