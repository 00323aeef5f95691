"""An owner that signs two results for one cycle is banned by all, without any audit, for good."""

import pytest
import torch
from msgspec.structs import replace
from streaming_worlds import OPTIONS, assert_equal, fragment_spec
from swarm_worlds import simulated, start
from test_audited_swarm import convicted

from peer.averaging.diloco.fragment_messages import Outbox
from peer.codec import code_digest, codes_as_tensor, get_codec
from peer.network.identity import Identity
from peer.observe.event_names import EventName
from peer.runtime import PeerId
from protocol.diloco import audits
from protocol.wire.fragment_messages import Result, signed_result
from simulation.machine import Machine
from simulation.swarm import SimulatedSwarm, identity_of, open_swarm

pytestmark = pytest.mark.slow

SEED = 1
ROUNDS = 12
LIES_FROM = 4
NAMES = "abcde"
HONEST = NAMES[:-1]
CODEC = get_codec("fp32")
KEEPS = Machine(checkpoint_every_s=5.0)


def altered(result: Result, codes: memoryview, owner: Identity) -> tuple[Result, memoryview]:
    """Another result for the same: a little longer, and as well signed."""
    other = bytearray(codes)
    values = codes_as_tensor(memoryview(other)).view(torch.float32)
    values.mul_(1.001)
    (chunk,) = result.chunks
    chunks = (replace(chunk, digest=code_digest(CODEC, memoryview(other))),)
    return signed_result(replace(result, chunks=chunks), owner.sign), memoryview(other)


class Fork:
    """One peer sends another result to `a` than to all others, while it lies."""

    def __init__(self, swarm: SimulatedSwarm, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.told, self.lies = 0, True
        post, owner = Outbox.send_soon, identity_of(SEED, name)

        def forked(outbox: Outbox, peer_id: PeerId, message, payload=b"") -> None:
            to_a = outbox._network.peer_id == owner.peer_id and peer_id == swarm["a"].peer_id
            own = isinstance(message, Result) and message.owner == owner.peer_id
            due = own and message.cycle >= LIES_FROM and len(message.chunks) == 1
            if self.lies and to_a and due:
                message, payload = altered(message, payload, owner)
                self.told += 1
            post(outbox, peer_id, message, payload)

        monkeypatch.setattr(Outbox, "send_soon", forked)


@pytest.mark.long
def test_an_owner_that_tells_two_results_is_banned_and_stays_so_after_all_restart(
    tmp_path, monkeypatch
):
    """Both results would pass an audit that knows but one; here nobody audits at all."""
    monkeypatch.setattr(audits, "AUDITS_PER_RESULT", 0.0)

    @simulated(SEED, limit_s=400)
    async def run():
        async with open_swarm(SEED, fragment_spec(ROUNDS, "fp32"), tmp_path, OPTIONS) as swarm:
            fork = Fork(swarm, monkeypatch, "e")
            await start(swarm, *NAMES, machine_of=dict.fromkeys(NAMES, KEEPS))
            await swarm.until(lambda: all(convicted(swarm[name]) for name in HONEST))
            assert fork.told
            written = lambda: all(swarm[n].events(EventName.CHECKPOINT_WRITTEN) for n in HONEST)
            await swarm.until(written)
            for name in NAMES:
                swarm.kill(name)
            for name in NAMES:
                await swarm[name].ended.wait()
            fork.lies = False
            for name in NAMES:
                swarm.resume(name)
            await swarm.finished(*HONEST)
            liar = swarm["e"].peer_id
            for name in HONEST:
                assert convicted(swarm[name]) == [liar], "the home has kept the proof"
            assert_equal(*(swarm[name] for name in HONEST))

    run()
