"""A trainer whose next step needs a piece of the corpus that is not here."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from training_worlds import World, back, build_world, next_order, order, run, tiny_corpus, tiny_spec

from peer.training.corpus.blocks import Corpus
from peer.training.messages import (
    CloseRound,
    Evaluate,
    Evaluated,
    PiecesHere,
    PiecesMissing,
    RoundClosed,
)

pytestmark = pytest.mark.slow


class Lacking:
    """A corpus in pieces of 16 blocks, most of which come later."""

    piece_blocks = 16

    def __init__(self, corpus: Corpus, here: set[int]) -> None:
        self._corpus = corpus
        self.here = here
        self.num_blocks = corpus.num_blocks
        self.read: list[int] = []

    def missing(self, indices: npt.NDArray[np.int64]) -> tuple[int, ...]:
        return tuple(set((indices // self.piece_blocks).tolist()) - self.here)

    def blocks(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        assert not self.missing(indices)
        self.read += indices.tolist()
        return self._corpus.blocks(indices)

    def validation_blocks(self, count: int) -> npt.NDArray[np.int64]:
        return self._corpus.validation_blocks(count)


def lacking_world(here: set[int]) -> tuple[World, Lacking]:
    spec = tiny_spec(codec="fp32", overlap=False)
    world, corpus = build_world(spec), Lacking(tiny_corpus(spec), here)
    return replace(world, corpus=corpus), corpus  # type: ignore[arg-type]


def trained(here: set[int], commands=()):
    world, corpus = lacking_world(here)

    def answer(event):
        if isinstance(event, PiecesMissing):
            corpus.here |= set(event.pieces)
            return [*commands, PiecesHere()]
        if isinstance(event, RoundClosed):
            return [back(event.round), *([next_order(event)] if event.round < 2 else [])]
        return []

    return world, corpus, run(world, order(0), answer=answer)


def test_training_goes_on_when_the_pieces_are_here_and_is_the_same():
    world, corpus, script = trained(set())
    whole, same, plain = trained(set(range(12)))
    assert script.of(PiecesMissing)
    assert not plain.of(PiecesMissing)
    assert corpus.read == same.read
    assert np.array_equal(world.theta, whole.theta)
    places = [[(e.epoch, e.position) for e in each.of(RoundClosed)] for each in (script, plain)]
    assert places[0] == places[1]


def test_other_commands_are_obeyed_meanwhile():
    _, corpus, script = trained(set(), [Evaluate(0)])
    kinds = [type(event) for event in script.events]
    first = kinds.index(PiecesMissing)
    assert Evaluated in kinds[first : kinds.index(RoundClosed)]
    assert len(corpus.read) == len(set(corpus.read)) == 3 * 4 * 4


def test_a_round_that_is_closed_meanwhile_loses_no_block():
    """Its first step waits; it is asked to close, which it does after that step."""
    _, corpus, script = trained(set(), [CloseRound(0)])
    steps = [closed.steps for closed in script.of(RoundClosed)]
    assert steps[0] < 4
    plan_order = trained(set(range(12)))[1].read
    assert corpus.read == plan_order[: len(corpus.read)]
