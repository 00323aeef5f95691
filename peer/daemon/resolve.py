"""From an address as users write it to a peer id and what to dial.

A multiaddr with `/p2p/` says who is there. For `host:port` the peer id is read from a TLS handshake
with that host: trust on first use; the link itself is then authenticated against that id.
"""

from collections.abc import Sequence

from peer.network.tls_probe import read_peer_id
from peer.options.values import parse_host_port
from peer.ports import Address, PeerId
from protocol.address.multiaddr import split_peer_id


async def resolve_bootstrap(text: str) -> tuple[PeerId, Sequence[Address]]:
    """Peer id and multiaddrs.

    Raises:
        StreamLost: nobody answers there; the message names the step that failed.
    """
    if text.startswith("/"):
        address, peer_id = split_peer_id(text)
        if peer_id is not None:
            return peer_id, (address,)
    where = parse_host_port(text)
    return await read_peer_id(where.host, where.port), (where.multiaddr(),)
