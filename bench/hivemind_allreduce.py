"""hivemind's all-reduce with 8-bit codes, run by an interpreter of its own (exchange_speed.py).

    OTHER/bin/python bench/hivemind_allreduce.py ADDRESS INDEX REPEATED SCALE SIZE...

It imports nothing of this project, and answers as `answer_parent` of bench/children.py does. The
group is given, so there is no matchmaking; what is timed is what hivemind's averager does from the
moment on when it has its group: `AllReduceRunner`, and the sum of each tensor and its update. The
model's tensors (SIZE values each) are averaged one by one as they come, with hivemind's own
settings. An incompatible numpy makes hivemind report success without averaging: the result is
compared with the true mean.
"""

import asyncio
import json
import sys
import time
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind looks for the name in `typing`

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.compression import Uniform8BitQuantization
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import achain, as_aiter, azip
from hivemind.utils.multiaddr import Multiaddr

Answer = dict[str, Any]


class AllReduces(ServicerBase):  # type: ignore[misc]
    """Hands what comes to the run that it belongs to, as hivemind's averager does."""

    def __init__(self) -> None:
        self.running: dict[bytes, AllReduceRunner] = {}

    async def rpc_aggregate_part(
        self,
        stream: AsyncIterator[averaging_pb2.AveragingData],
        context: P2PContext,
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        request = await anext(stream)
        runner = self.running[request.group_id]
        async for message in runner.rpc_aggregate_part(achain(as_aiter(request), stream), context):
            yield message


class HivemindPeer:
    """Answers the measurement's questions."""

    def __init__(self, p2p: P2P, index: int, repeated: int, scale: float, sizes: list[int]) -> None:
        self._p2p = p2p
        self._repeated, self._scale, self._sizes = repeated, scale, sizes
        self._own_P = self._noise(index).repeat(-(-sum(sizes) // repeated))[: sum(sizes)]
        self._average_P = self._own_P.clone()
        self._reduces = AllReduces()
        self._peer_ids: list[PeerID] = []
        self._runner: AllReduceRunner | None = None
        self._num_runs = 0

    async def hello(self, _: Answer) -> Answer:
        await self._reduces.add_p2p_handlers(self._p2p)
        addresses = await self._p2p.get_visible_maddrs()
        return {"peer_id": str(self._p2p.peer_id), "addresses": [str(each) for each in addresses]}

    async def join(self, question: Answer) -> Answer:
        for hello in question["hellos"]:
            peer_id = PeerID.from_base58(hello["peer_id"])
            self._peer_ids.append(peer_id)
            if peer_id != self._p2p.peer_id:
                bare = [Multiaddr(each.split("/p2p/")[0]) for each in hello["addresses"]]
                await self._p2p._client.connect(peer_id, bare)
        return {}

    async def prepare(self, _: Answer) -> Answer:
        """Make the run, before any peer sends anything for it."""
        self._average_P.copy_(self._own_P)
        group_id = self._num_runs.to_bytes(20, "big")
        self._num_runs += 1
        self._runner = AllReduceRunner(
            p2p=self._p2p,
            servicer_type=AllReduces,
            prefix=None,
            group_id=group_id,
            tensors=self._average_P.split(self._sizes),
            ordered_peer_ids=self._peer_ids,
            peer_fractions=(1 / len(self._peer_ids),) * len(self._peer_ids),
            compression=Uniform8BitQuantization(),
        )
        self._reduces.running = {group_id: self._runner}
        return {}

    async def exchange(self, _: Answer) -> Answer:
        began_s = time.perf_counter()
        tensors = self._average_P.split(self._sizes)
        async for tensor, update in azip(as_aiter(*tensors), self._runner):
            tensor.add_(update)
        return {"began_s": began_s, "ended_s": time.perf_counter()}

    async def check(self, question: Answer) -> Answer:
        noises = [self._noise(index) for index in range(question["num_peers"])]
        mean = torch.stack(noises).mean(dim=0)
        mean_P = mean.repeat(-(-sum(self._sizes) // self._repeated))[: sum(self._sizes)]
        error = float((self._average_P - mean_P).norm() / mean_P.norm())
        return {"error": error, "digest": None}

    def _noise(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self._repeated, generator=generator).mul_(self._scale)


async def main(address: str, index: int, repeated: int, scale: float, sizes: list[int]) -> None:
    torch.set_num_threads(1)
    p2p = await P2P.create(
        host_maddrs=[f"/ip4/{address}/tcp/0"], auto_nat=False, nat_port_map=False, use_relay=False
    )
    peer = HivemindPeer(p2p, index, repeated, scale, sizes)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        question = json.loads(line)
        try:
            answer = await getattr(peer, question.pop("what"))(question)
        except Exception as error:  # noqa: BLE001 - the parent is told, and decides
            answer = {"failure": repr(error)}
        print(json.dumps(answer), flush=True)
    await p2p.shutdown()


if __name__ == "__main__":
    asyncio.run(
        main(
            sys.argv[1],
            int(sys.argv[2]),
            int(sys.argv[3]),
            float(sys.argv[4]),
            [int(size) for size in sys.argv[5:]],
        )
    )
