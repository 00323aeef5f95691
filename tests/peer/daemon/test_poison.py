"""A member that brings poison to its exchanges in pairs: it is skipped, let rest, and told of."""

from dataclasses import replace

import blake3
import numpy as np
import pytest
import torch
from swarm_worlds import simulated, start, tally, toy_spec

from peer.averaging.gossip.gossip import Gossip
from peer.codec import codes_as_tensor, get_codec
from simulation.swarm import identity_of, open_swarm

pytestmark = pytest.mark.slow

SEED = 1
ROUNDS = 16
NAMES = "abcd"
FIRST_LIE = 4
"""Round."""
LIAR = identity_of(SEED, "d").peer_id


def poisoned(own, factor: float):
    """The same contribution with all values this many times as large."""
    codec, payload = get_codec("int8"), memoryview(bytearray(own.payload))
    codes = codes_as_tensor(payload)
    values = torch.empty(len(payload) * 128 // codec.code_bytes(128))
    codec.decode(codes, values)
    codec.encode(values.mul_(factor), codes)
    return replace(own, payload=payload, digest=blake3.blake3(payload).hexdigest(length=16))


@pytest.mark.parametrize(
    "factor",
    [-1.0, *(pytest.param(f, marks=pytest.mark.long) for f in (100.0, 1e30))],
    ids=["sign flip", "hundredfold", "huge"],
)
def test_a_poisonous_partner_is_skipped_as_implausible(tmp_path, monkeypatch, factor):
    average, lies = Gossip.average, []

    async def lie(gossip, own, **bounds):
        if gossip._matchmaker._own_id == LIAR and own.round >= FIRST_LIE:
            lies.append(own.round)
            settled = await average(gossip, poisoned(own, factor), **bounds)
            return replace(settled, own=own)  # it steps by what it has
        return await average(gossip, own, **bounds)

    monkeypatch.setattr(Gossip, "average", lie)

    @simulated(SEED)
    async def run():
        spec = toy_spec(ROUNDS, final_averaging=False)
        async with open_swarm(SEED, spec, tmp_path) as swarm:
            await start(swarm, *NAMES)
            await swarm.finished()
            honest = [swarm[name] for name in NAMES[:-1]]
            sizes = [float(np.sqrt(np.mean(np.square(peer.slow_weights())))) for peer in honest]
            assert max(sizes) < 3 * min(sizes)
            ends = tally(*honest)
            assert ends["implausible"] >= 1
            assert ends["averaged"] > ends["implausible"]

    run()
    assert lies
