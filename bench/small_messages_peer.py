"""One of the two peers of bench/small_messages.py: real p2pd, the daemon's own pace around it."""

import sys
from functools import partial
from pathlib import Path
from typing import Final

import trio

from peer.network.conversation import Conversation
from peer.network.identity import load_or_create
from peer.network.libp2p import open_libp2p_network
from peer.network.pacing import NO_LIMITS, Pacing
from peer.runtime import Network, PeerId, Stream
from protocol.wire.content_messages import Part
from protocol.wire.messages import Beat
from protocol.wire.versions import HELLO

from .children import Answer, answer_parent

BULK: Final = "/bench/bulk/1"
ASK_EVERY_S: Final = 0.1
BULK_BYTES: Final = 1 << 20
WARM_UP_S: Final = 5.0
"""Time until the buffers are full, and the pace is known."""
DIGEST: Final = "0" * 32


def peer_command(folder: str, host: int, address: str, *, paced: bool) -> list[str]:
    """The command by which the parent starts one."""
    details = (folder, f"p{host}", f"/ip4/{address}/tcp/0", str(int(paced)))
    return [sys.executable, "-m", "bench.small_messages_peer", *details]


class SmallMessagesPeer:
    """Answers the measurement's questions. Without a pace `pacing` only counts."""

    def __init__(self, network: Network, pacing: Pacing, *, paced: bool) -> None:
        self._network = network
        self._pacing = pacing
        self._paced = paced

    async def run(self) -> None:
        """Serve until the parent asks no more."""
        await self._network.serve(BULK, self._take)
        await self._network.serve(HELLO, self._answer)
        await answer_parent({"hello": self.hello, "connect": self.connect, "send": self.send})

    async def hello(self, _: Answer) -> Answer:
        return {"peer_id": self._network.peer_id, "addresses": list(self._network.addresses)}

    async def connect(self, question: Answer) -> Answer:
        await self._network.connect(question["peer_id"], question["addresses"])
        return {}

    async def send(self, question: Answer) -> Answer:
        """Send bulk and questions for so long. Returns the answers' times, and the rate of bulk."""
        peer_id, seconds = question["peer_id"], question["seconds"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_bulk, peer_id)
            async with Conversation(await self._network.open_stream(peer_id, HELLO)) as talk:
                await self._ask_for(talk, WARM_UP_S)
                times_s, bytes_per_s = await self._ask_for(talk, seconds)
            nursery.cancel_scope.cancel()
        return {"times_s": times_s, "bytes_per_s": bytes_per_s}

    async def _send_bulk(self, peer_id: PeerId) -> None:
        async with Conversation(await self._network.open_stream(peer_id, BULK)) as talk:
            while True:
                await talk.send(Part(0), bytes(BULK_BYTES))

    async def _ask_for(self, talk: Conversation, seconds: float) -> tuple[list[float], float]:
        """How long each answer took, and how fast bulk arrived meanwhile."""
        times_s: list[float] = []
        beats: list[Beat] = []
        end_s = trio.current_time() + seconds
        while (began_s := trio.current_time()) < end_s or len(beats) < 2:
            await talk.send(self._beat(talk))
            beat, _ = await talk.receive(Beat)
            times_s.append(trio.current_time() - began_s)
            beats.append(beat)
            if self._paced:
                self._pacing.heard(talk.remote_peer_id, beat.sent_s, beat.received_bytes, None)
            await trio.sleep(ASK_EVERY_S)
        first, last = beats[0], beats[-1]
        arrived_bytes = last.received_bytes - first.received_bytes
        return times_s, arrived_bytes / (last.sent_s - first.sent_s)

    # --- the other side ---------------------------------------------------------------------------
    async def _take(self, stream: Stream) -> None:
        into = memoryview(bytearray(BULK_BYTES))
        async with Conversation(stream) as talk:
            while True:
                await talk.receive(Part, into=into)

    async def _answer(self, stream: Stream) -> None:
        async with Conversation(stream) as talk:
            while True:
                await talk.receive(Beat)
                await talk.send(self._beat(talk))

    def _beat(self, talk: Conversation) -> Beat:
        return Beat(
            sequence=0,
            state="training",
            round=0,
            fraction=0.0,
            steps_per_s=0.0,
            epoch=0,
            position=0,
            step=0,
            tokens=0,
            sent_s=trio.current_time(),
            echo_s=None,
            echo_hold_s=0.0,
            swarm_time_s=0.0,
            received_bytes=self._pacing.received_bytes(talk.remote_peer_id),
        )


async def main(folder: Path, name: str, listen: str, *, paced: bool) -> None:
    """Run the peer called `name`, with its key and sockets in `folder`."""
    key = folder / f"{name}.key"
    load_or_create(key)
    async with open_libp2p_network(key, listen=[listen], runtime_dir=folder) as network:
        network.pacing = pacing = Pacing(NO_LIMITS)
        await SmallMessagesPeer(network, pacing, paced=paced).run()


if __name__ == "__main__":
    trio.run(partial(main, Path(sys.argv[1]), *sys.argv[2:4], paced=sys.argv[4] == "1"))
