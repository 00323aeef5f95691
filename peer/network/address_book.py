"""The known addresses of peers, and which of them p2pd was told since it last started."""

from collections import OrderedDict
from collections.abc import Sequence

from peer.ports import Address, PeerId
from protocol.address import multiaddr
from protocol.errors import StreamLost
from protocol.limits import MAX_ADDRESSES_PER_PEER, MAX_MEMBERS


class AddressBook:
    """Binary addresses by peer, the oldest entries give way.

    Args:
        quic: whether to dial over QUIC where a peer offers it.

    Attributes:
        dialled: peers that this p2pd has been connected to.
    """

    def __init__(self, *, quic: bool) -> None:
        self._quic = quic
        self._addresses: OrderedDict[PeerId, tuple[bytes, ...]] = OrderedDict()
        self.dialled: set[PeerId] = set()

    def __contains__(self, peer_id: PeerId) -> bool:
        return peer_id in self._addresses

    def of(self, peer_id: PeerId) -> tuple[bytes, ...]:
        """The addresses of a peer; none where we were told none."""
        return self._addresses.get(peer_id, ())

    def remember(self, peer_id: PeerId, addresses: Sequence[Address]) -> None:
        """Take in the addresses of a peer, in place of those that were known.

        Raises:
            StreamLost: one of them is another peer's.
        """
        usable = []
        for address in addresses[:MAX_ADDRESSES_PER_PEER]:
            bare, named = multiaddr.split_peer_id(address)
            if named not in (None, peer_id):
                raise StreamLost(f"dial: {address} is another peer's address, not {peer_id}'s")
            if self._quic or not is_quic(bare):
                usable.append(multiaddr.to_bytes(bare))
        if usable:
            self._addresses[peer_id] = tuple(usable)
            self._addresses.move_to_end(peer_id)
        while len(self._addresses) > MAX_MEMBERS:
            forgotten, _ = self._addresses.popitem(last=False)
            self.dialled.discard(forgotten)


def is_quic(address: Address) -> bool:
    """Whether an address is dialled over QUIC."""
    return "/quic-v1" in address
