"""One of the peers of bench/exchange_speed.py that sum one flat fp32 tensor with torch's gloo."""

import os
import sys
import time
from functools import partial
from typing import Final

import torch
import torch.distributed
import trio

from .children import Answer, answer_parent
from .exchange_speed_data import mean_of_all, model_layout, noise, relative_error

PORT: Final = 29500
"""Port of gloo on the first host; each network has hosts of its own."""
INTERFACE: Final = "eth0"


class GlooPeer:
    """Answers the measurement's questions."""

    def __init__(self, first_address: str, index: int, num_values: int) -> None:
        self._first_address = first_address
        self._index = index
        self._own_P = noise(model_layout(num_values).padded_parameters, index)
        self._sum_P = self._own_P.clone()

    async def hello(self, _: Answer) -> Answer:
        return {}

    async def join(self, question: Answer) -> Answer:
        begin = partial(
            torch.distributed.init_process_group,
            "gloo",
            init_method=f"tcp://{self._first_address}:{PORT}",
            rank=self._index,
            world_size=len(question["hellos"]),
        )
        await trio.to_thread.run_sync(begin)
        return {}

    async def prepare(self, _: Answer) -> Answer:
        self._sum_P.copy_(self._own_P)
        return {}

    async def exchange(self, _: Answer) -> Answer:
        began_s = time.perf_counter()
        await trio.to_thread.run_sync(torch.distributed.all_reduce, self._sum_P)
        return {"began_s": began_s, "ended_s": time.perf_counter()}

    async def check(self, question: Answer) -> Answer:
        num_peers = question["num_peers"]
        mean = mean_of_all(len(self._sum_P), num_peers)
        return {"error": relative_error(self._sum_P / num_peers, mean), "digest": None}


async def main(first_address: str, index: int, num_values: int) -> None:
    """Run one peer."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    peer = GlooPeer(first_address, index, num_values)
    await answer_parent(
        {
            "hello": peer.hello,
            "join": peer.join,
            "prepare": peer.prepare,
            "exchange": peer.exchange,
            "check": peer.check,
        }
    )


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
