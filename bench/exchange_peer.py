"""One of the two peers of bench/exchange.py: real p2pd, real gossip, and bare streams beside them.

Everything moves the same bytes, the int8 codes of one vector, both ways at once:

    gossip   peer/averaging/gossip/gossip.py itself: proposal, answer, exchange; timed from the
    answer on bare     streams of p2pd, or TCP connections of trio (bare.py) echo     1 KB there and
    back, on a conversation or on a bare stream of p2pd
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import blake3
import psutil
import torch
import trio

from peer.averaging.gossip.exchange_session import Averaged, OwnVector
from peer.averaging.gossip.exchanges import Agreement
from peer.averaging.gossip.gossip import GossipServer
from peer.codec import get_codec
from peer.network.conversation import Conversation
from peer.network.identity import load_or_create
from peer.network.libp2p import Libp2pNetwork, open_libp2p_network
from peer.observe.events import EventLog
from peer.runtime import Stream
from peer.runtime.work import RealWork
from protocol.wire.content_messages import Part

from .bare import Buffers, Bytes, TcpBytes, answer_swap, echo, echo_times, swap_all
from .children import Answer, answer_parent
from .company import INNER_STEPS, OneOther, gossip_of

BARE: Final = "/bench/bare/1"
ECHO: Final = "/bench/echo/1"
TALK: Final = "/bench/talk/1"
ECHO_BYTES: Final = 1024
ECHO_ROUNDS: Final = 1000
SEARCH_S: Final = 30.0
EXCHANGE_S: Final = 600.0
DIGEST: Final = "0" * 32


class ExchangePeer:
    """Answers the measurement's questions."""

    def __init__(self, network: Libp2pNetwork, payload_bytes: int, seed: int) -> None:
        self._network = network
        codec = get_codec("int8")
        num_values = payload_bytes // codec.code_bytes(128) * 128
        codes = bytearray(codec.code_bytes(num_values))
        noise_P = torch.randn(num_values, generator=torch.manual_seed(seed))
        codec.encode(noise_P, torch.frombuffer(codes, dtype=torch.uint8))
        self._out = memoryview(codes).toreadonly()
        self._buffers = Buffers(self._out, memoryview(bytearray(len(self._out))))
        self._digest = blake3.blake3(self._out).hexdigest(length=16)
        self._agreement = Agreement(DIGEST, INNER_STEPS, DIGEST, "int8", 1, num_values)
        log = EventLog(lambda _: None, peer=network.peer_id, wall_time_s=lambda: 0.0, stream=None)
        self._company = OneOther()
        self._gossip = gossip_of(
            self._agreement, candidates=self._company, network=network, work=RealWork(), events=log
        )
        self._tcp_port = 0

    async def run(self) -> None:
        """Serve until the parent asks no more."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(GossipServer(self._network, [self._gossip]).run)
            await self._network.serve(BARE, partial(answer_swap, buffers=self._buffers))
            await self._network.serve(ECHO, self._echo)
            await self._network.serve(TALK, self._talk_back)
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            self._tcp_port = listeners[0].socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, self._tcp_swap, listeners)
            await answer_parent(
                {
                    "hello": self.hello,
                    "connect": self.connect,
                    "gossip": self.gossip,
                    "bare": self.bare,
                    "tcp": self.tcp,
                    "echo": self.echo,
                    "talk": self.talk,
                    "work": self.work,
                }
            )
            nursery.cancel_scope.cancel()

    # --- questions --------------------------------------------------------------------------------
    async def hello(self, _: Answer) -> Answer:
        return {
            "peer_id": self._network.peer_id,
            "addresses": list(self._network.addresses),
            "tcp_port": self._tcp_port,
            "payload_bytes": len(self._out),
            "parameters": self._agreement.padded_parameters,
        }

    async def connect(self, question: Answer) -> Answer:
        await self._network.connect(question["peer_id"], question["addresses"])
        return {}

    async def gossip(self, question: Answer) -> Answer:
        round_, before = question["round"], sum(self._network.statistics().sent_bytes.values())
        own = OwnVector(
            round=round_,
            step=round_ * INNER_STEPS,
            final=False,
            steps=1,
            tokens=1,
            digest=self._digest,
            payload=self._out,
        )
        self._company.other = question["peer_id"]
        settled = await self._gossip.average(
            own, fresh_s=0.0, search_s=SEARCH_S, exchange_s=EXCHANGE_S
        )
        if not isinstance(settled.outcome, Averaged):
            raise TypeError(f"the exchange was skipped: {settled.outcome}")
        sent_bytes = sum(self._network.statistics().sent_bytes.values()) - before
        return {"s": settled.exchange_s, "sent_bytes": sent_bytes}

    async def bare(self, question: Answer) -> Answer:
        async with self._streams(question["peer_id"], BARE, question["streams"]) as streams:
            return {"s": await swap_all(streams, self._buffers)}

    async def tcp(self, question: Answer) -> Answer:
        connection = await trio.open_tcp_stream("127.0.0.1", question["port"])
        async with connection:
            return {"s": await swap_all([TcpBytes(connection)], self._buffers)}

    async def echo(self, question: Answer) -> Answer:
        async with self._streams(question["peer_id"], ECHO, 1) as (stream,):
            return {"s": await echo_times(stream, bytes(ECHO_BYTES), ECHO_ROUNDS)}

    async def talk(self, question: Answer) -> Answer:
        times_s, payload = [], bytes(ECHO_BYTES)
        stream = await self._network.open_stream(question["peer_id"], TALK)
        async with Conversation(stream) as talk:
            for index in range(ECHO_ROUNDS):
                began_s = trio.current_time()
                await talk.send(Part(index), payload)
                await talk.receive(Part)
                times_s.append(trio.current_time() - began_s)
        return {"s": times_s}

    async def work(self, _: Answer) -> Answer:
        """CPU seconds of this process and of its p2pd, so far."""
        return {"python_s": _cpu_s(None), "p2pd_s": _cpu_s(self._network.statistics().p2pd_pid)}

    # --- the other side ---------------------------------------------------------------------------
    @asynccontextmanager
    async def _streams(self, peer_id: str, protocol: str, count: int) -> AsyncIterator[list[Bytes]]:
        streams: list[Bytes] = []
        try:
            for _ in range(count):
                streams.append(await self._network.open_stream(peer_id, protocol))  # noqa: PERF401
            yield streams
        finally:
            for stream in streams:
                await stream.aclose()

    async def _tcp_swap(self, connection: trio.SocketStream) -> None:
        async with connection:
            await answer_swap(TcpBytes(connection), self._buffers)

    async def _echo(self, stream: Stream) -> None:
        await echo(stream, ECHO_BYTES, ECHO_ROUNDS)

    async def _talk_back(self, stream: Stream) -> None:
        talk = Conversation(stream)
        for _ in range(ECHO_ROUNDS):
            message, payload = await talk.receive(Part)
            await talk.send(message, payload)


def _cpu_s(pid: int | None) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def main(folder: Path, payload_bytes: int, name: str) -> None:
    """Run the peer called `name`, with its key and sockets in `folder`."""
    key = folder / f"{name}.key"
    load_or_create(key)
    async with open_libp2p_network(key, runtime_dir=folder) as network:
        await ExchangePeer(network, payload_bytes, seed=ord(name[0])).run()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
