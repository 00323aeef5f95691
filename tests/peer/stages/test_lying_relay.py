"""A relay sends something else than its stage makes, of the usual size: data peers find it out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
from stage_worlds import SLOT_BYTES, PretendedTrainer, StageWorld

from peer.observe.event_names import EventName
from peer.training.shared import BoundaryRing
from protocol.microbatch import checks
from protocol.microbatch.core import MicrobatchEvent
from protocol.wire.stage_messages import Direction
from simulation.virtual_time import run_in_virtual_time

SIZES, MICROBATCHES, LIAR = (2, 3, 3), 4, (1, 0)
VALUES = SLOT_BYTES // 4


def honestly(made, _direction):
    return made


def replica(stage, place, told=honestly):
    """The trainer of one replica: it adds nearly what the others of its stage do."""

    class Replica(PretendedTrainer):
        ring = BoundaryRing
        fresh = np.ones(VALUES, np.float32).tobytes()
        weights = np.random.default_rng(stage).normal(size=VALUES)
        own = weights + 0.1 * np.random.default_rng([stage, place]).normal(size=VALUES)

        def changed(self, boundary, direction):
            values = np.frombuffer(boundary, np.float32)
            made = values + (0 if direction is Direction.BACKWARD else self.own)
            return told(made, direction).astype(np.float32).tobytes()

        def read(self, boundary):
            return len(boundary)

    return Replica


LIES: dict[str, Callable[[Any], Any]] = {
    "negated": lambda made: -made,
    "permuted": lambda made: made[::-1],
    "noise": lambda made: np.random.default_rng(0).normal(size=VALUES) * np.std(made),
    "zeros": np.zeros_like,
}


def lying(how, directions=(Direction.FORWARD, Direction.SCORE)):
    return replica(
        *LIAR, lambda made, direction: LIES[how](made) if direction in directions else made
    )


async def train(liar, iterations, often, routing):
    """Train, with this trainer of the liar, if there is one. Returns the world."""

    def trainer_of(stage, place):
        return liar if liar and (stage, place) == LIAR else replica(stage, place)

    world = StageWorld(SIZES, iterations, MICROBATCHES, routing, trainer_of=trainer_of)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checks, "CHECKED", often)
        async with world.running():
            with trio.fail_after(1000):
                await world.wait_done()
    return world


def trained(liar=None, iterations=6, often=1, routing="random"):
    return run_in_virtual_time(1, lambda: train(liar, iterations, often, routing))


def told(world):
    """What data peers say differs, all of them."""
    events = [each for peer in world.of_stage(0) for each in peer.told]
    return [fields for name, fields in events if name is EventName.REPLICAS_DIFFER]


def named(world):
    """Who is left out, by how many data peers; each place as (stage, place in its stage)."""
    return [world.places[each["odd"]] for each in told(world) if each["left_out"]]


def assert_counted_once(world):
    """No gradient was added twice, or for a copy."""
    done = sum(peer.facts.microbatches[MicrobatchEvent.DONE] for peer in world.of_stage(0))
    for stage in (1, 2):
        assert sum(sum(peer.trainer.steps) for peer in world.of_stage(stage)) <= done
        added = [peer.facts.microbatches[MicrobatchEvent.DONE] for peer in world.of_stage(stage)]
        assert sum(added) == done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "routing"),
    [
        *(pytest.param(how, "random", marks=pytest.mark.long) for how in list(LIES)[1:]),
        (next(iter(LIES)), "random"),
        pytest.param("negated", "planned", marks=pytest.mark.long),
    ],
)
def test_a_liar_is_left_out_by_every_data_peer_and_nobody_else(how, routing):
    """Within 24 checks by each; all microbatches are checked here."""
    world = trained(lying(how), routing=routing)
    assert named(world) == [LIAR, LIAR]
    assert {world.places[each["odd"]] for each in told(world)} == {LIAR}
    assert_counted_once(world)


@pytest.mark.long
@pytest.mark.slow
def test_one_that_is_honest_in_copies_is_left_out_too():
    world = trained(lying("negated", directions=[Direction.FORWARD]), iterations=12)
    assert named(world) == [LIAR, LIAR]


@pytest.mark.slow
def test_without_checks_nobody_notices():
    world = trained(lying("negated"), often=1 << 60)
    assert not told(world)
    liar, *others = world.of_stage(1)
    assert (
        liar.trainer.passed[Direction.FORWARD]
        > min(p.trainer.passed[Direction.FORWARD] for p in others) / 2
    )


@pytest.mark.slow
def test_among_honest_relays_nothing_is_told():
    world = trained()
    assert not told(world)
    assert all(peer.facts.microbatches[MicrobatchEvent.CHECKED] for peer in world.of_stage(0))
    assert_counted_once(world)
