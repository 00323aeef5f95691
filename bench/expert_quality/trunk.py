"""Experts that train one trunk together: attention, norms, embeddings and head are of all of them,
feed-forward blocks of each alone.

Each expert steps on its own domain. The trunk is either averaged over all, a plain mean after each
of `rounds`, as replicas of an average do; or it has no copies, and the experts take turns on it,
its moments included: every step of one is seen by the next, so that is how close they can be.

What is trained is one mixture of experts at any moment. It is measured as an ensemble of whole
models, and with its feed-forward blocks side by side behind a gate in each layer, which is trained
for ROUTER_PARTS on the mix while all else stands still (Branch-Train-MiX without a merge).

    trunk            three experts from the seed, averaged: the counterpart of `equal`
    trunk-turns      the same, on one trunk
    trunk-anchored   the generalist goes on beside three late experts, in the trunk and in the
                     ensemble: the counterpart of `anchored`
    trunk-fresh      three experts that have one trunk from the first step on
    trunk-late       as turns, and the experts part after three quarters of the dense model's steps,
                     whose schedule goes on
    NAME-mixture     the blocks behind gates
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from peer.training.model import FlatModel, block_matrices
from peer.training.optimizer import FlatOptimizer

from .arms import BRANCH, EQUAL_PARTS, GENERALIST, LABELS, PARTS, Training, expert
from .domains import MIX

ROUNDS: Final = 8
LATE_BRANCH: Final = 36
ROUTER_PARTS: Final = 2
ROUTER_RATE: Final = 1e-2
MIXTURE: Final = "-mixture"


@dataclass(frozen=True, slots=True)
class Trunk:
    """Experts of one trunk, and how it is measured.

    Attributes:
        seeds: the one whose weights at the branch all begin with, or none.
        rounds: averages of the trunk; 0 is turns.
        goes_on: with the seed's schedule; else each has one of its own.
        is_mixture: one model with gates; else an ensemble.
    """

    name: str
    members: tuple[Training, ...]
    seeds: tuple[Training, ...] = (GENERALIST,)
    rounds: int = 0
    goes_on: bool = False
    is_mixture: bool = False

    @property
    def trained(self) -> list[tuple[Training, int]]:
        """All that is trained for it, and how many parts of it; gates apart."""
        seeds = [(seed, seed.stops_at or BRANCH) for seed in self.seeds]
        return [*seeds, *((member, member.parts) for member in self.members)]


def _trunks() -> Iterator[Trunk]:
    equal = tuple(expert(domain, EQUAL_PARTS) for domain in LABELS)
    beside = (expert(MIX, 12), *(expert(domain, 8) for domain in LABELS))
    fresh = tuple(Training(f"{domain}-16-fresh", domain, PARTS // 3) for domain in LABELS)
    dense = Training("dense-begun", MIX, PARTS, stops_at=LATE_BRANCH)
    late = tuple(expert(domain, (PARTS - LATE_BRANCH) // 3) for domain in LABELS)
    for is_mixture in (False, True):
        end = MIXTURE if is_mixture else ""
        yield Trunk(f"trunk-turns{end}", equal, is_mixture=is_mixture)
        yield Trunk(f"trunk{end}", equal, rounds=ROUNDS, is_mixture=is_mixture)
        yield Trunk(f"trunk-anchored{end}", beside, rounds=ROUNDS, is_mixture=is_mixture)
        yield Trunk(f"trunk-fresh{end}", fresh, (), ROUNDS, is_mixture=is_mixture)
        yield Trunk(f"trunk-late{end}", late, (dense,), goes_on=True, is_mixture=is_mixture)


TRUNKS: Final[Mapping[str, Trunk]] = {each.name: each for each in _trunks()}


@dataclass(frozen=True, slots=True)
class Holder:
    """An expert in training.

    Attributes:
        step: one of its own, at this rate.
        rates: of all its steps.
    """

    model: FlatModel
    optimizer: FlatOptimizer
    step: Callable[[float], object]
    rates: Sequence[float]


def train_together(holders: Sequence[Holder], rounds: int) -> None:
    """All their steps; in the end they have one trunk."""
    if rounds:
        _averaged(holders, rounds)
    else:
        _in_turn(holders)


def _averaged(holders: Sequence[Holder], rounds: int) -> None:
    for one in range(rounds):
        for holder in holders:
            steps = len(holder.rates)
            for rate in holder.rates[steps * one // rounds : steps * (one + 1) // rounds]:
                holder.step(rate)
        for part in shared_parts(holders[0].model):
            mean = torch.stack([holder.model.theta_P[part] for holder in holders]).mean(0)
            for holder in holders:
                holder.model.theta_P[part] = mean


def _in_turn(holders: Sequence[Holder]) -> None:
    """The one steps next that has the smallest part of its steps behind it."""
    turns = sorted(
        ((step + 0.5) / len(holder.rates), at, step)
        for at, holder in enumerate(holders)
        for step in range(len(holder.rates))
    )
    last = holders[0]
    for _, at, step in turns:
        hand_over(last, holders[at])
        last = holders[at]
        last.step(last.rates[step])
    for holder in holders:
        hand_over(last, holder)


def shared_parts(model: FlatModel) -> list[slice]:
    """The slices of the flat vector that the trunk takes."""
    return [
        slice(entry.offset, entry.offset + entry.padded_size)
        for entry in model.layout.entries
        if ".mlp." not in entry.name
    ]


def hand_over(giver: Holder, taker: Holder) -> None:
    """The trunk's weights and moments."""
    if giver is taker or not giver.optimizer.num_steps:
        return
    parts = shared_parts(giver.model)
    for part in parts:
        taker.model.theta_P[part] = giver.model.theta_P[part]
    given, kept, own = giver.optimizer.moments(), taker.optimizer.moments(), _own_moments(giver)

    def fill(name: str, moment: torch.Tensor) -> None:
        source = kept if name in own else given
        moment.copy_(source[name]) if name in source else moment.zero_()

    taker.optimizer.take_over(giver.optimizer.num_steps, fill)


def _own_moments(holder: Holder) -> set[str]:
    """Names of those of the feed-forward blocks, whose matrices are all Muon's."""
    trunk = {part.start for part in shared_parts(holder.model)}
    matrices = block_matrices(holder.model.layout)
    return {
        f"momentum_buffer.{at}" for at, each in enumerate(matrices) if each.place.start not in trunk
    }


class Gated(nn.Module):
    """Feed-forward blocks side by side, weighed by a gate for each token; alike at first."""

    def __init__(self, blocks: Sequence[nn.Module], width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.gate = nn.Linear(width, len(blocks), bias=False)
        nn.init.zeros_(self.gate.weight)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        weights_BTE = torch.softmax(self.gate(hidden_BTD), -1)
        said_BTDE = torch.stack([block(hidden_BTD) for block in self.blocks], -1)
        return (said_BTDE * weights_BTE.unsqueeze(-2)).sum(-1)


def mixture_of(modules: Sequence[Any]) -> tuple[nn.Module, list[nn.Parameter]]:
    """The first one's trunk with the blocks of all, and its gates, which alone train."""
    whole: nn.Module = modules[0].requires_grad_(requires_grad=False)
    gates = []
    for layers in zip(*(each.model.layers for each in modules), strict=True):
        blocks = [layer.mlp.requires_grad_(requires_grad=False) for layer in layers]
        layers[0].mlp = Gated(blocks, blocks[0].gate_proj.in_features)
        gates.append(layers[0].mlp.gate.weight)
    return whole, gates
