"""A conversation over the simulated network: latency, windows and segments change nothing."""

import trio
import trio.testing

from peer.network.conversation import READ_BYTES, Conversation
from peer.runtime import Stream
from protocol.address.peer_id import peer_id_from_public_key
from protocol.wire.messages import Leaving, Vector
from simulation.network import SimulatedInternet

PAYLOAD = bytes(range(256)) * (3 * READ_BYTES // 256) + b"tail"
VECTOR = Vector("cd" * 16, 50, 51200, "int8", 1, "ab" * 16)


async def test_over_the_simulated_network(autojump_clock: trio.testing.MockClock) -> None:
    internet = SimulatedInternet(seed=1)
    ids = [peer_id_from_public_key(bytes([n]) * 32) for n in (1, 2)]
    into = bytearray(len(PAYLOAD))

    async def echo(stream: Stream) -> None:
        async with Conversation(stream) as talk:
            message, _ = await talk.receive(Vector, into=memoryview(into), stall_s=10)
            await talk.send(message, into)
            await talk.receive(Leaving)

    async with internet.open_network(ids[0]) as ours, internet.open_network(ids[1]) as theirs:
        await theirs.serve("/loco/gossip/1", echo)
        await ours.connect(ids[1], theirs.addresses)
        async with Conversation(await ours.open_stream(ids[1], "/loco/gossip/1")) as talk:
            await talk.send(VECTOR, PAYLOAD, stall_s=10)
            assert await talk.receive(Vector, timeout_s=10) == (VECTOR, PAYLOAD)
            await talk.send(Leaving())
            sent_bytes = ours.statistics().sent_bytes["/loco/gossip/1"]
            assert sent_bytes > talk.bytes_received > len(PAYLOAD)
