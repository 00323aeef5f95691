"""p2pd, started as we start it, makes direct connections through routers where that can be done.

Only p2pd runs here, one on each host. Four that can be dialled see the two behind routers, which
takes the place of a swarm: p2pd believes how it is seen when four have said so.
"""

import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from bench.translated_network import Host, Kind, Router, missing, translated_network
from peer.network.identity import load_or_create
from peer.network.p2pd import P2pdClient, P2pdConfig, P2pdFailed, attach
from peer.network.protobuf import delimited
from peer.network.reachability import num_relayed, understood
from peer.network.relay import HOP, HOP_ANSWER, CircuitStatus, HopKind, parse_status
from protocol.address.multiaddr import is_relayed, to_bytes
from protocol.address.peer_id import peer_id_to_bytes

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

PORT = 4001
OBSERVERS = 4
START_S = 30.0
SELF_KNOWLEDGE_S = 22.0
"""p2pd asks the others 15 s after its start whether it can be dialled."""
PUNCH_S = 20.0


@dataclass(frozen=True)
class Node:
    """One p2pd on a host."""

    client: P2pdClient
    peer_id: str
    host: Host

    @property
    def address(self) -> str:
        return f"/ip4/{self.host.address}/tcp/{PORT}"

    async def connect(self, other: "Node", address: str | None = None) -> None:
        where = to_bytes(address or other.address)
        await self.client.connect(peer_id_to_bytes(other.peer_id), [where])

    async def ways_to(self, other: "Node") -> list[str]:
        """The addresses of its connections to another one."""
        peers = await self.client.list_peers()
        wanted = peer_id_to_bytes(other.peer_id)
        return [a for each in peers if each.peer == wanted for a in understood(each.addresses)]

    async def reserve(self, relay: "Node") -> None:
        stream, _ = await self.client.open_stream(peer_id_to_bytes(relay.peer_id), HOP)
        async with stream:
            await stream.send_all(delimited([(1, int(HopKind.RESERVE))]))
            size = (await stream.receive_some(2))[0] & 0x7F  # two bytes of length
            answer = await stream.receive_some(4096)
            assert size
            assert parse_status(answer, *HOP_ANSWER) == CircuitStatus.OK


@asynccontextmanager
async def node(host: Host, name: str, folder: Path) -> AsyncIterator[Node]:
    key, control = folder / f"{name}.key", folder / f"{name}.sock"
    identity = load_or_create(key)
    config = P2pdConfig(
        key,
        control,
        listen=(f"/ip4/0.0.0.0/tcp/{PORT}",),
        announce=(f"/ip4/{host.address}/tcp/{PORT}",),
    )
    command = host.command(config.arguments())
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: ASYNC220 - at once
    try:
        async with AsyncExitStack() as stack:
            client = await _attached(stack, control)
            yield Node(client, identity.peer_id, host)
    finally:
        process.kill()
        process.wait()


async def _attached(stack: AsyncExitStack, control: Path) -> P2pdClient:
    with trio.fail_after(START_S):
        while True:
            try:
                return await stack.enter_async_context(attach(control))
            except P2pdFailed:
                await trio.sleep(0.1)


async def ways_through(kind: Kind, folder: Path) -> list[str]:
    """How a peer behind such a router comes to be connected to one behind a cone."""
    with translated_network(OBSERVERS, [Router(Kind.CONE), Router(kind)]) as network:
        async with AsyncExitStack() as stack:

            async def start(host: Host, name: str) -> Node:
                return await stack.enter_async_context(node(host, name, folder))

            seers = [await start(host, f"seer{i}") for i, host in enumerate(network.public)]
            behind = [await start(hosts[0], f"b{i}") for i, hosts in enumerate(network.inside)]
            for one in behind:
                for seer in seers:
                    await one.connect(seer)
            await trio.sleep(SELF_KNOWLEDGE_S)
            target, dialler = behind
            await target.reserve(seers[0])
            through = f"{seers[0].address}/p2p/{seers[0].peer_id}/p2p-circuit"
            await dialler.connect(target, through)
            assert num_relayed(await dialler.client.list_peers()) == 1
            with trio.move_on_after(PUNCH_S):
                while all(map(is_relayed, await dialler.ways_to(target))):
                    await trio.sleep(0.2)
            return await dialler.ways_to(target)


async def test_cone_to_cone_becomes_direct(tmp_path: Path) -> None:
    assert not all(map(is_relayed, await ways_through(Kind.CONE, tmp_path)))


async def test_symmetric_to_cone_stays_relayed(tmp_path: Path) -> None:
    ways = await ways_through(Kind.SYMMETRIC, tmp_path)
    assert ways
    assert all(map(is_relayed, ways))
