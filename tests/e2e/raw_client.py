"""A libp2p client that keeps to no rules, thrown at live peers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from peer.network.identity import load_or_create
from peer.network.libp2p import Libp2pNetwork, open_libp2p_network
from protocol.errors import LocoError

ANSWER_S = 15.0
DRIP_EVERY_S = 0.25


@asynccontextmanager
async def raw_client(folder: Path, address: str) -> AsyncIterator[tuple[Libp2pNetwork, str]]:
    """A network with an identity of its own, connected to `address`; and who is there."""
    load_or_create(folder / "raw.key")
    async with open_libp2p_network(folder / "raw.key", runtime_dir=folder) as network:
        peer_id = address.rpartition("/p2p/")[2]
        await network.connect(peer_id, [address])
        yield network, peer_id


async def throw(network: Libp2pNetwork, peer_id: str, protocol: str, data: bytes) -> bytes:
    """Send raw bytes on a stream of its own; everything that comes back until the peer ends it."""
    stream = await network.open_stream(peer_id, protocol)
    answer = b""
    try:
        with trio.move_on_after(ANSWER_S):
            await stream.send_all(data)
            while more := await stream.receive_some():
                answer += more
    except LocoError:
        pass  # it was reset: as good an end as any
    finally:
        with trio.CancelScope(shield=True):
            await stream.aclose()
    return answer


async def cut_short(network: Libp2pNetwork, peer_id: str, protocol: str, data: bytes) -> None:
    """Half of it, and away."""
    stream = await network.open_stream(peer_id, protocol)
    try:
        await stream.send_all(data[: len(data) // 2])
    except LocoError:
        pass
    finally:
        await stream.aclose()


async def drip(network: Libp2pNetwork, peer_id: str, protocol: str, data: bytes) -> None:
    """Byte by byte, until the peer ends it or it is all out."""
    stream = await network.open_stream(peer_id, protocol)
    try:
        for byte in data:
            await stream.send_all(bytes([byte]))
            await trio.sleep(DRIP_EVERY_S)
        await trio.sleep_forever()
    except LocoError:
        pass
    finally:
        with trio.CancelScope(shield=True):
            await stream.aclose()
