"""From an address as users write it to a peer id and what to dial.

A multiaddr with `/p2p/` says who is there. For `host:port` the peer id is read from a TLS handshake
with that host: trust on first use; the link itself is then authenticated against that id.
"""

from collections.abc import Sequence

from peer.addresses import parse_host_port
from peer.network.tls_probe import read_peer_id
from peer.ports import Address, PeerId


async def resolve_bootstrap(text: str) -> tuple[PeerId, Sequence[Address]]:
    """Peer id and multiaddrs.

    Raises:
        StreamLost: nobody answers there; the message names the step that failed.
    """
    address, _, peer_id = text.partition("/p2p/")
    if "/p2p-circuit" in text:
        return text.rpartition("/p2p/")[2], (text,)
    if peer_id:
        return peer_id, (address,)
    where = parse_host_port(text)
    return await read_peer_id(where.host, where.port), (where.multiaddr(),)
