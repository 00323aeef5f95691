"""Networks for tests: simulated ones, and real p2pd on loopback."""

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from peer.network.identity import Identity, load_or_create
from peer.network.libp2p import Libp2pNetwork, open_libp2p_network
from simulation.network import SimulatedNetwork

AnyNetwork = Libp2pNetwork | SimulatedNetwork
WAIT_S = 10.0


class SeededEntropy:
    """Keys that are the same in every run."""

    def __init__(self, seed: str) -> None:
        self._seed = seed.encode()

    def token_bytes(self, n: int) -> bytes:
        """`n` bytes, the same at every call."""
        return hashlib.shake_256(self._seed).digest(n)


def peer_id_of(name: str) -> str:
    """The peer id of the identity called `name`."""
    return Identity(SeededEntropy(name).token_bytes(32)).peer_id


@dataclass
class Pair:
    """Two networks. `connect` makes `b` dialable from `a`."""

    a: AnyNetwork
    b: AnyNetwork

    async def connect(self) -> None:
        await self.a.connect(self.b.peer_id, self.b.addresses)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Look again and again until `condition` holds; bounded."""
    with trio.fail_after(WAIT_S):
        while not condition():
            await trio.sleep(0.01)


@asynccontextmanager
async def real_network(folder: Path, name: str, **options: Any) -> AsyncIterator[Libp2pNetwork]:
    """A real network with the identity called `name`."""
    load_or_create(folder / f"{name}.key", SeededEntropy(name).token_bytes)
    async with open_libp2p_network(
        folder / f"{name}.key",
        runtime_dir=folder,
        **options,
    ) as network:
        yield network
