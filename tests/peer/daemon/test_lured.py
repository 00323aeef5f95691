"""A peer that liars lure away keeps what it has trained, and goes on from it."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
import trio
from swarm_worlds import simulated, start, toy_spec
from test_admission import BEAT, greet

from peer.daemon import returning
from peer.daemon.greeting import BEAT_S
from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.process.rejoin import JoinAgain
from protocol.errors import LocoError
from protocol.membership.group import Group
from protocol.schedule.rounds import LOST_LAG_ROUNDS
from simulation.machine import Machine
from simulation.swarm import identity_of, open_swarm

pytestmark = pytest.mark.slow

SEED = 1
INNER_STEPS = 20
CLAIM = 10 * LOST_LAG_ROUNDS
"""The round in which the liars say that they are."""
SELDOM = Machine(checkpoint_every_s=1e6)
"""A checkpoint after the first round, and none for days."""


async def lure(swarm, liar: str) -> None:
    """Say to whoever lives as `a` that we train far ahead; serve nothing; come again and again."""
    async with swarm.internet.open_network(liar) as network:
        while True:
            with suppress(LocoError):
                await beat_far_ahead(swarm, network)
            await trio.sleep(1.0)


async def beat_far_ahead(swarm, network) -> None:
    """Link, and claim to be there, until the link ends."""
    if (run_id := swarm["a"].facts.run_id) is None:
        return
    claim: dict[str, Any] = {"state": "training", "group": Group(run_id).digest, "round": CLAIM}
    claim["step"] = CLAIM * INNER_STEPS
    talk, _ = await greet(swarm, network, addresses=("/ip4/192.0.2.9/tcp/1",), **claim)
    while True:
        await talk.send(msgspec.structs.replace(BEAT, steps_per_s=10.0, **claim))
        await trio.sleep(BEAT_S)


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_a_lone_peer_that_liars_lure_goes_on_from_what_it_had(tmp_path, monkeypatch, method):
    monkeypatch.setattr(returning, "REPLACEMENT_S", 60.0)
    spec = toy_spec(4 * CLAIM, INNER_STEPS, method=method)

    @simulated(SEED, limit_s=1000)
    async def run():
        async with open_swarm(SEED, spec, tmp_path) as swarm, trio.open_nursery() as them:
            await start(swarm, "a", machine_of={"a": SELDOM})
            a = swarm["a"]
            await swarm.until(lambda: a.facts.round == 5)
            for name in ("liar1", "liar2"):
                them.start_soon(lure, swarm, identity_of(SEED, name).peer_id)
            await swarm.until(a.ended.is_set)
            assert isinstance(a.failure, JoinAgain)
            had = a.facts.tokens
            assert had > 0
            [*_, written] = a.events(EventName.CHECKPOINT_WRITTEN)
            assert written["step"] >= 5 * INNER_STEPS, "not that of the first round"

            again = swarm.resume("a")
            await swarm.until(lambda: bool(again.events(EventName.RUN_RESUMED)))
            (resumed,) = again.events(EventName.RUN_RESUMED)
            assert resumed["tokens"] >= had
            await swarm.until(lambda: again.facts.round > resumed["round"] + 5)
            assert again.facts.state is PeerState.TRAINING
            assert again.facts.step < CLAIM * INNER_STEPS
            assert len(again.roster.alive(trio.current_time())) == 2, "the liars are still there"
            assert again.failure is None
            them.cancel_scope.cancel()

    run()
