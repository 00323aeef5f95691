"""A hostile peer among stages, that says all the wire schema allows, and nearly so."""

from collections import Counter

import pytest
import trio
from stage_worlds import SLOT_BYTES, StageWorld

from bench.fuzzing.hostile import Hostile
from bench.fuzzing.shots import Gunner, Magazine
from bench.fuzzing.swarms import known_world
from peer.network.identity import Identity
from protocol.membership.group import Group
from protocol.membership.view import Progress
from protocol.run.layout import part_of_stage
from protocol.wire.versions import STAGE
from simulation.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.slow

SEED = 1
EXAMPLES, POOL = 4, 4
RUN_ID = "ab" * 16
IDENTITY = Identity(bytes([99]) * 32)
ITERATIONS, MICROBATCHES = 12, 4


def world_of(stages):
    honest = tuple(peer.peer_id for peer in stages.peers)
    names = dict.fromkeys(("origin", "path", "failed"), (*honest, IDENTITY.peer_id))
    relays = (*honest[-2:], IDENTITY.peer_id)
    paths = tuple((one, other) for one in relays for other in relays if one != other)
    own = names | {
        "group": tuple(Group(RUN_ID, part_of_stage(stage)).digest for stage in range(3)),
        "path": (*paths, *((relay,) for relay in relays)),
        "stages": ((1, 2), (2, 1), (1,), (2,)),
    }
    return known_world(own, range(4), (bytes(SLOT_BYTES), bytes(SLOT_BYTES - 1)))


def introduce(stages, stage):
    """The hostile peer holds this stage, all others believe."""
    group = Group(RUN_ID, part_of_stage(stage)).digest
    for peer in stages.peers:
        progress = Progress("training", group=group)
        peer.roster.heard(trio.current_time(), IDENTITY.peer_id, 1, progress=progress, rtt_s=0.1)


async def besieged(stage):
    """Fire everything at all peers while they train. How many messages came of what."""
    stages = StageWorld((2, 1, 1), ITERATIONS, MICROBATCHES, "random")
    async with stages.running(), stages.internet.open_network(IDENTITY.peer_id) as network:
        world = world_of(stages)
        magazine = Magazine(world, (STAGE,), POOL, SEED)
        hostile = Hostile(
            network,
            {peer.peer_id: peer.network.addresses for peer in stages.peers},
            magazine=magazine,
            gunner=Gunner(IDENTITY, world, SEED),
        )
        await trio.sleep(0.5)
        if stage is not None:
            introduce(stages, stage)
        await hostile.attack(magazine.volleys(EXAMPLES), linked=False, asked=stage is not None)
        for peer in stages.peers:
            peer.roster.gone(IDENTITY.peer_id, 1)
        with trio.fail_after(3600):
            await stages.wait_done()
    return hostile.fired


@pytest.mark.long
@pytest.mark.parametrize(
    "stage",
    [None, 0, 1],
    ids=["a stranger", "a data peer", "a relay"],
)
def test_fuzzed_messages_end_no_stage_and_all_iterations_end(stage):
    fired = run_in_virtual_time(SEED, lambda: besieged(stage))
    assert isinstance(fired, Counter)
    assert fired.total() > 10 * EXAMPLES
