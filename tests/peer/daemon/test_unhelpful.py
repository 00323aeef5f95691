"""A member whose vectors are plausible and lead away: trials refuse it, and hardly anybody else."""

from dataclasses import replace
from typing import Final

import blake3
import numpy as np
import pytest
import torch
from swarm_worlds import simulated, start, toy_spec

from peer.averaging.gossip.gossip import Gossip
from peer.codec import codes_as_tensor, get_codec
from peer.observe.event_names import EventName
from simulation.swarm import SwarmOptions, identity_of, open_swarm
from simulation.trainer import ToyProblem, optimum

pytestmark = pytest.mark.slow

SEED: Final = 1
ROUNDS: Final = 24
INNER_STEPS: Final = 80
NAMES: Final = "abcdef"
HONEST: Final = NAMES[:-1]
FIRST_LIE: Final = 6
"""Round."""
RATE: Final = 0.01
"""What a step forgets: little in an exchange, as a real model, whose averages help then."""
AWAY: Final = 0.2
"""How much further from the optimum it claims to be; honest replicas are 0.1 apart."""
LIAR: Final = identity_of(SEED, NAMES[-1]).peer_id


def led_away(own):
    """The same contribution, further from what all look for."""
    codec, payload = get_codec("int8"), memoryview(bytearray(own.payload))
    codes = codes_as_tensor(payload)
    values = torch.empty(len(payload) * 128 // codec.code_bytes(128))
    codec.decode(codes, values)
    away = values - torch.from_numpy(optimum(SEED, len(values)))
    codec.encode(values.add_(away, alpha=AWAY / float(away.square().mean().sqrt())), codes)
    return replace(own, payload=payload, digest=blake3.blake3(payload).hexdigest(length=16))


def run_with(folder, *, measures: bool):
    """How far honest peers end from the optimum, and their events."""
    found = []

    @simulated(SEED)
    async def run():
        spec = toy_spec(ROUNDS, INNER_STEPS, SEED, final_averaging=False)
        options = SwarmOptions(problem=ToyProblem(rate=RATE, measures=measures))
        async with open_swarm(SEED, spec, folder, options) as swarm:
            await start(swarm, *NAMES)
            await swarm.finished()
            honest = [swarm[name] for name in HONEST]
            ends = [peer.slow_weights() for peer in honest]
            away = [np.sqrt(np.mean(np.square(w - optimum(SEED, w.size)))) for w in ends]
            events = [e for p in honest for e in p.events(*WITH_PARTNER) if e["round"] > FIRST_LIE]
            found.append((float(np.mean(away)), events))
            assert not [e for p in honest for e in p.events(EventName.PEER_IGNORED)]

    run()
    return found[0]


WITH_PARTNER: Final = EventName.ROUND_AVERAGED, EventName.ROUND_SKIPPED


def tallied(events, *, liar: bool) -> tuple[int, int]:
    """Averages that were taken, and that did not help."""
    of = [event for event in events if event["partner"] and (event["partner"] == LIAR) == liar]
    taken = sum(event["event"] == EventName.ROUND_AVERAGED for event in of)
    return taken, sum(event.get("reason") == "unhelpful" for event in of)


@pytest.mark.long
def test_a_member_that_leads_away_is_refused_and_rests(tmp_path, monkeypatch):
    average = Gossip.average

    async def lie(gossip, own, **bounds):
        if gossip._matchmaker._own_id == LIAR and own.round >= FIRST_LIE:
            return replace(await average(gossip, led_away(own), **bounds), own=own)
        return await average(gossip, own, **bounds)

    monkeypatch.setattr(Gossip, "average", lie)
    away, judged = run_with(tmp_path / "with", measures=True)
    taken, refused = tallied(judged, liar=True)
    without, believed = run_with(tmp_path / "without", measures=False)
    assert (tallied(believed, liar=True)[1], tallied(believed, liar=False)[1]) == (0, 0)
    assert refused > taken
    assert taken < tallied(believed, liar=True)[0] / 2
    honest_taken, honest_refused = tallied(judged, liar=False)
    assert honest_refused < 0.1 * honest_taken
    assert away < without
