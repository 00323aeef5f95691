"""A stranger, and a member, that lie about fragments: the others' outer copy does not move."""

import numpy as np
import pytest
import trio
from existing import existing
from fragment_tap import Tap, watch
from streaming_worlds import OPTIONS, PLAIN_MEAN, assert_equal, contributors, fragment_spec
from swarm_worlds import simulated, start
from test_audited_swarm import convicted

from peer.codec import code_digest
from peer.network.conversation import Conversation
from peer.network.identity import Identity
from peer.runtime import Network
from protocol.diloco.owners import may_own
from protocol.errors import LocoError
from protocol.outcomes import RefusalReason
from protocol.wire.fragment_messages import ChunkResult, Result, Stamp, mask_of, signed_result
from protocol.wire.versions import FRAGMENT
from simulation.swarm import SimulatedSwarm, identity_of, open_swarm

pytestmark = pytest.mark.slow

SEED = 1
ROUNDS = 12
VICTIM = 1
"""Fragment of three chunks."""
HUGE = 1e20
SPEC = fragment_spec(ROUNDS, "fp32", **PLAIN_MEAN)


def forged(
    tap: Tap, liar: Identity, of: str, cycle: int, chunk: int, stamp: Stamp, names: tuple[str, ...]
) -> tuple[Result, bytes]:
    """A result that the liar signs: huge values, of these contributors, for this state."""
    codes = np.full(tap.outer(of).chunk_values(VICTIM, chunk), HUGE, np.float32).tobytes()
    mask = mask_of(range(len(names)))
    digest = code_digest(tap.outer(of).codec, memoryview(codes))
    of_chunk = ChunkResult(chunk, stamp.steps, stamp.weight, stamp.digest, mask, digest)
    group = existing(tap.swarm[of].facts.held).group.digest
    weights = (1,) * len(names)
    unsigned = Result(
        group,
        VICTIM,
        cycle,
        liar.peer_id,
        1,
        names,
        weights,
        (bytes(16),) * len(names),
        (of_chunk,),
        (chunk,),
        bytes(64),
    )
    return signed_result(unsigned, liar.sign), codes


async def tell(network: Network, peer_id: str, message: Result, codes: bytes) -> None:
    """On a stream of its own; until they end it."""
    try:
        async with Conversation(await network.open_stream(peer_id, FRAGMENT)) as talk:
            await talk.send(message, codes)
            await trio.sleep(1.0)
    except LocoError:
        pass


def largest(swarm: SimulatedSwarm, names: str) -> float:
    """Of all slow weights of these peers."""
    return max(float(np.abs(swarm[name].slow_weights()).max()) for name in names)


def refused(swarm: SimulatedSwarm, names: str, reason: RefusalReason) -> int:
    return sum(swarm[name].facts.refused[reason] for name in names)


@pytest.mark.long
def test_a_result_of_a_stranger_moves_nothing(tmp_path, monkeypatch):
    """It has said hello to nobody, names whomever it likes, and knows every state."""

    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, SPEC, tmp_path, OPTIONS) as swarm:
            tap = watch(swarm, monkeypatch)
            await start(swarm, *"abc")
            await swarm.until(lambda: swarm["a"].facts.round == 4)
            stranger = identity_of(SEED, "stranger")
            names = tuple(f"12D3KooW{number:044}" for number in range(60))
            async with swarm.internet.open_network(stranger.peer_id) as network:
                for _ in range(8):
                    for name in "abc":
                        victim = swarm[name]
                        await network.connect(victim.peer_id, victim.network.addresses)
                        for chunk in range(3):
                            stamp = tap.ledger(name, VICTIM).stamp(chunk)
                            cycle = tap.ledger(name, VICTIM).cycle(chunk) + 1
                            lie = forged(tap, stranger, name, cycle, chunk, stamp, names)
                            await tell(network, victim.peer_id, *lie)
            assert refused(swarm, "abc", RefusalReason.NOT_LINKED) == 8 * 3 * 3
            await swarm.finished()
            assert largest(swarm, "abc") < 1e3
            assert_equal(*(swarm[name] for name in "abc"))
            assert contributors(swarm["a"], after=3).keys() == {3}

    run()


@pytest.mark.long
def test_a_member_moves_no_chunk_that_it_does_not_own(tmp_path, monkeypatch):
    """`e` signs results for all, in the name of all: those that it owns by no view are refused."""

    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, SPEC, tmp_path, OPTIONS) as swarm:
            tap = watch(swarm, monkeypatch)
            names = "abcdef"
            await start(swarm, *names)
            await swarm.until(lambda: swarm["a"].facts.round == 5)
            liar = identity_of(SEED, "e")
            ids = tuple(sorted(swarm[name].peer_id for name in names))
            told = 0
            for _ in range(3):
                for chunk in range(3):
                    ledger = tap.ledger("a", VICTIM)
                    cycle, stamp = ledger.cycle(chunk) + 1, ledger.stamp(chunk)
                    key = f"{existing(swarm['a'].facts.held).group.digest}/{VICTIM}/{cycle}"
                    if chunk in may_own(key, 3, liar.peer_id, ids):
                        continue
                    told += 1
                    lie = forged(tap, liar, "a", cycle, chunk, stamp, ids)
                    for name in "abcdf":
                        await tell(swarm["e"].network, swarm[name].peer_id, *lie)
            assert told
            assert refused(swarm, "abcdf", RefusalReason.NOT_OWNER)
            await swarm.finished(*"abcdf")
            assert largest(swarm, "abcdf") < 1e3
            assert_equal(*(swarm[name] for name in "abcdf"))
            for name in "abcdf":  # for it has signed several results for one cycle
                assert convicted(swarm[name]) == [liar.peer_id]

    run()
