"""One of the two peers of bench/memory_soak.py: real p2pd, real gossip, small vectors.

Both run the daemon's own code. One of them spoils rounds on purpose, in turn:

    breaks     its streams close in the middle of its vector
    refuses    it is not free, and says so to whoever asks
    lies       the digest that it announces is not that of its vector

so that the other sees a partner lost in an exchange, a round without partner, and a bad vector.
"""

import gc
import sys
from pathlib import Path
from typing import Any, Final, cast

import blake3
import numpy as np
import psutil
import torch
import trio

from peer.averaging.gossip.exchange_session import Averaged, OwnVector
from peer.averaging.gossip.exchanges import Agreement
from peer.averaging.gossip.gossip import GossipServer
from peer.averaging.gossip.outer_step import NolocoFactors, OuterState
from peer.codec import get_codec
from peer.network.identity import load_or_create
from peer.network.libp2p import Libp2pNetwork, open_libp2p_network
from peer.observe.events import EventLog, LineFile
from peer.runtime import Network, PeerId, Stream, StreamHandler
from peer.runtime.work import RealWork
from protocol.errors import StreamLost

from .children import Answer, answer_parent
from .company import INNER_STEPS, OneOther, gossip_of

PARAMETERS: Final = 64 * 128
DIGEST: Final = "0" * 32
SEARCH_S: Final = 10.0
REFUSED_SEARCH_S: Final = 0.05
"""Time that a peer waits for a partner that said that it is busy."""
EXCHANGE_S: Final = 30.0


class BreakingNetwork:
    """A network whose streams break after so many bytes while `breaks` is set."""

    def __init__(self, network: Libp2pNetwork, after_bytes: int) -> None:
        self._network = network
        self._after_bytes = after_bytes
        self.breaks = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    async def open_stream(self, peer_id: PeerId, protocol: str) -> Stream:
        """Open a stream that breaks, if it is to."""
        stream = await self._network.open_stream(peer_id, protocol)
        self._break_later(stream)
        return stream

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Serve with streams that break, if they are to."""

        async def handle(stream: Stream) -> None:
            self._break_later(stream)
            await handler(stream)

        await self._network.serve(protocol, handle)

    def _break_later(self, stream: Any) -> None:
        if not self.breaks:
            return
        send_all, left_bytes = stream.send_all, self._after_bytes

        async def breaking(data: bytes | bytearray | memoryview) -> None:
            nonlocal left_bytes
            await send_all(memoryview(data)[:left_bytes])
            if len(data) > left_bytes:
                stream.lose("broken on purpose")
                raise StreamLost("broken on purpose")
            left_bytes -= len(data)

        stream.send_all = breaking


class SoakPeer:
    """Answers the measurement's questions."""

    def __init__(self, network: Libp2pNetwork, events: EventLog, seed: int) -> None:
        codec = get_codec("int8")
        self._p2pd_pid = network.statistics().p2pd_pid
        self._codes = bytearray(codec.code_bytes(PARAMETERS))
        theta_P = torch.randn(PARAMETERS, generator=torch.manual_seed(seed))
        codec.encode(theta_P, torch.frombuffer(self._codes, dtype=torch.uint8))
        self._digest = blake3.blake3(self._codes).hexdigest(length=16)
        self._breaking = BreakingNetwork(network, len(self._codes) // 2)
        self._network = cast(Network, self._breaking)
        self._company = OneOther()
        self._gossip = gossip_of(
            Agreement(DIGEST, INNER_STEPS, DIGEST, "int8", 1, PARAMETERS),
            candidates=self._company,
            network=self._network,
            work=RealWork(),
            events=events,
        )
        phi_P, delta_P = np.zeros((2, PARAMETERS), np.float32)
        self._outer = OuterState(phi_P, delta_P, codec, NolocoFactors(0.5, 0.7, 0.7))

    async def run(self) -> None:
        """Serve until the parent asks no more."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(GossipServer(self._network, [self._gossip]).run)
            await answer_parent(
                {
                    "hello": self.hello,
                    "connect": self.connect,
                    "round": self.round,
                    "memory": self.memory,
                }
            )
            nursery.cancel_scope.cancel()

    async def hello(self, _: Answer) -> Answer:
        return {"peer_id": self._network.peer_id, "addresses": list(self._network.addresses)}

    async def connect(self, question: Answer) -> Answer:
        await self._network.connect(question["peer_id"], question["addresses"])
        return {}

    async def round(self, question: Answer) -> Answer:
        """One round; `spoils` says how we spoil it, if we do; `refused` that the other will."""
        round_, spoils = question["round"], question.get("spoils")
        if spoils == "refuses":
            return {"outcome": spoils}
        self._breaking.breaks = spoils == "breaks"
        digest = "f" * 32 if spoils == "lies" else self._digest
        own = OwnVector(
            round=round_,
            step=round_ * INNER_STEPS,
            final=False,
            steps=1,
            tokens=1,
            digest=digest,
            payload=memoryview(self._codes),
        )
        self._company.other = question["peer_id"]
        search_s = REFUSED_SEARCH_S if question.get("refused") else SEARCH_S
        settled = await self._gossip.average(
            own, fresh_s=0.0, search_s=search_s, exchange_s=EXCHANGE_S
        )
        outcome = settled.outcome
        averaged = isinstance(outcome, Averaged)
        self._outer.step(
            round_, own.payload, outcome.payload if isinstance(outcome, Averaged) else None
        )
        self._breaking.breaks = False
        return {"outcome": "averaged" if averaged else str(getattr(outcome, "reason", ""))}

    async def memory(self, _: Answer) -> Answer:
        """Bytes of this process and of its p2pd; and how many objects the collector knows."""
        gc.collect()
        ours, p2pd = (psutil.Process(pid).memory_full_info() for pid in (None, self._p2pd_pid))
        return {
            "uss_bytes": ours.uss,
            "rss_bytes": ours.rss,
            "p2pd_rss_bytes": p2pd.rss,
            "objects": len(gc.get_objects()),
        }


async def main(folder: Path, name: str) -> None:
    """Run the peer called `name`, with its key, log and sockets in `folder`."""
    key = folder / f"{name}.key"
    load_or_create(key)
    log = LineFile(folder / f"{name}.jsonl")
    async with open_libp2p_network(key, runtime_dir=folder) as network:
        events = EventLog(
            log.write_line, peer=network.peer_id, wall_time_s=lambda: 0.0, stream=None
        )
        await SoakPeer(network, events, seed=ord(name[0])).run()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), sys.argv[2])
