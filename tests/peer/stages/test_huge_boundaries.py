"""A liar in a path sends huge boundaries: no honest trainer sees one, nothing of others is lost."""

import numpy as np
import pytest
import trio
from stage_worlds import SLOT_BYTES, PretendedTrainer, StageWorld

from peer.training.shared import BoundaryRing
from protocol.microbatch.core import MicrobatchEvent
from protocol.microbatch.sizes import FACTOR
from protocol.wire.stage_messages import Direction
from simulation.virtual_time import run_in_virtual_time

SIZES, ITERATIONS, MICROBATCHES = (2, 2, 2), 6, 4
HONEST_AT_FIRST = 8
LIAR = (1, 0)
USUAL = 8.0


class SizedTrainer(PretendedTrainer):
    """Its boundaries are fp32 values, to each of which a relay adds one; keeps the largest seen."""

    ring = BoundaryRing
    fresh = np.zeros(SLOT_BYTES // 4, np.float32).tobytes()
    largest = 0.0

    def changed(self, boundary, _direction):
        values = np.frombuffer(boundary, np.float32)
        self.largest = max(self.largest, float(values.max()))
        return (values + 1).tobytes()

    def read(self, boundary):
        return set(np.frombuffer(boundary, np.float32).tolist())


def liar(direction, size):
    """A trainer that is honest at first, and then sends values of this size in this direction."""

    class Liar(SizedTrainer):
        sent = 0

        def changed(self, boundary, its_direction):
            honest = super().changed(boundary, its_direction)
            self.sent += its_direction == direction
            if its_direction != direction or self.sent <= HONEST_AT_FIRST:
                return honest
            return np.full(SLOT_BYTES // 4, size, np.float32).tobytes()

    return Liar


async def train(trainer_of):
    """Train, with these trainers. Returns the peers, the liar last if there is one."""
    world = StageWorld(SIZES, ITERATIONS, MICROBATCHES, "random", trainer_of=trainer_of)
    async with world.running():
        with trio.fail_after(300):
            await world.wait_done()
        return sorted(world.peers, key=lambda peer: world.places[peer.peer_id] == LIAR)


def assert_all_home(peers):
    for peer in peers:
        if peer.stage == 0:
            counts = peer.facts.microbatches
            assert (
                counts[MicrobatchEvent.DONE]
                == counts[MicrobatchEvent.BEGUN]
                == ITERATIONS * MICROBATCHES
            )
            assert peer.trainer.came_back == [{4.0}] * counts[MicrobatchEvent.DONE]


def refused(peers):
    return sum(peer.facts.microbatches[MicrobatchEvent.REFUSED] for peer in peers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    [2.0 * USUAL * FACTOR, pytest.param(1e30, marks=pytest.mark.long)],
    ids=["unusual", "impossible"],
)
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_what_a_liar_sends_reaches_no_trainer_and_all_come_home(direction, size):
    def trainer_of(stage, i):
        return liar(direction, size) if (stage, i) == LIAR else SizedTrainer

    *honest, _ = run_in_virtual_time(1, lambda: train(trainer_of))
    assert_all_home(honest)
    assert max(peer.trainer.largest for peer in honest) <= USUAL
    assert refused(honest) > 0


@pytest.mark.slow
def test_among_honest_peers_nothing_is_refused():
    peers = run_in_virtual_time(1, lambda: train(lambda stage, i: SizedTrainer))
    assert_all_home(peers)
    assert not refused(peers)
