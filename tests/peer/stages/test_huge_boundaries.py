"""A liar in a path sends huge boundaries: no honest trainer sees one, nothing of others is lost."""

import numpy as np
import pytest
import trio
from stage_worlds import SLOT_BYTES, PretendedTrainer, StageWorld

from peer.codec import get_codec
from peer.training.stages.messages import BACKWARD, FORWARD
from protocol.microbatch.counts import Counted
from protocol.microbatch.sizes import FACTOR

SIZES, ITERATIONS, MICROBATCHES = (2, 2, 2), 4, 4
LIAR = (1, 0)
USUAL = 8.0


class SizedTrainer(PretendedTrainer):
    """Its boundaries are fp32 values, to each of which a relay adds one; keeps the largest seen."""

    codec = get_codec("fp32")
    fresh = np.zeros(SLOT_BYTES // 4, np.float32).tobytes()
    largest = 0.0

    def changed(self, boundary, _leg):
        values = np.frombuffer(boundary, np.float32)
        self.largest = max(self.largest, float(values.max()))
        return (values + 1).tobytes()

    def read(self, boundary):
        return set(np.frombuffer(boundary, np.float32).tolist())


def liar(leg, size):
    """A trainer that is honest at first, and then sends values of this size on this leg."""

    class Liar(SizedTrainer):
        sent = 0

        def changed(self, boundary, its_leg):
            honest = super().changed(boundary, its_leg)
            self.sent += its_leg == leg
            if its_leg != leg or self.sent <= 2:
                return honest
            return np.full(SLOT_BYTES // 4, size, np.float32).tobytes()

    return Liar


@pytest.mark.slow
@pytest.mark.parametrize("size", [2.0 * USUAL * FACTOR, 1e30], ids=["unusual", "impossible"])
@pytest.mark.parametrize("leg", [FORWARD, BACKWARD])
async def test_what_a_liar_sends_reaches_no_trainer_and_all_come_home(leg, size, autojump_clock):
    def trainer_of(stage, i):
        return liar(leg, size) if (stage, i) == LIAR else SizedTrainer

    world = StageWorld(SIZES, ITERATIONS, MICROBATCHES, "random", trainer_of=trainer_of)
    async with world.running():
        with trio.fail_after(300):
            await world.wait_done()
        honest = [peer for peer in world.peers if world.places[peer.peer_id] != LIAR]
        assert max(peer.trainer.largest for peer in honest) <= USUAL
        for peer in world.of_stage(0):
            counts = peer.facts.microbatches
            assert counts[Counted.DONE] == counts[Counted.BEGUN] == ITERATIONS * MICROBATCHES
            assert peer.trainer.came_back == [{4.0}] * counts[Counted.DONE]
        assert sum(peer.facts.microbatches[Counted.REFUSED] for peer in honest) > 0


@pytest.mark.slow
async def test_among_honest_peers_nothing_is_refused(autojump_clock):
    world = StageWorld(SIZES, trainer_of=lambda stage, i: SizedTrainer)
    async with world.running():
        await world.wait_done()
        assert not sum(peer.facts.microbatches[Counted.REFUSED] for peer in world.peers)
        assert all(peer.trainer.came_back == [{4.0}] * 12 for peer in world.of_stage(0))
