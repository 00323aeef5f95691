"""The door of gossip: each stream from outside goes to the vector that it is about.

A peer averages one vector in pairs, or several, each with partners of its own. All use one
conversation, so one place reads the first message of a stream. A proposal names the group that
averages the vector; a stripe, or a question after a broken exchange, names its exchange. What names
none of ours goes to the first vector, which refuses it with the reason.
"""

from collections.abc import Sequence
from typing import Final

import trio

from peer.network.conversation import Conversation
from peer.ports import Network, PeerId, Stream
from protocol.wire.messages import Join, Propose, Settle
from protocol.wire.versions import GOSSIP

from .exchange_io import STALL_S
from .exchanges import Exchanges
from .gossip import Gossip

FIRST_MESSAGE_S: Final = 10.0
"""How long an inbound stream may stay silent before its first message."""


class GossipDoor:
    """Serves the gossip of all vectors of one peer; see the top of the file.

    Args:
        gossips: of each vector; one at least.
    """

    def __init__(self, network: Network, gossips: Sequence[Gossip]) -> None:
        self._network = network
        self._gossips = tuple(gossips)
        self._by_group = {gossip.group: gossip for gossip in gossips}

    async def run(self) -> None:
        """Let all of them look for partners and be asked, until cancelled."""
        async with trio.open_nursery() as nursery:
            for gossip in self._gossips:
                nursery.start_soon(gossip.run)
            await self._network.serve(GOSSIP, self._serve)

    async def _serve(self, stream: Stream) -> None:
        talk, peer_id = Conversation(stream), stream.remote_peer_id
        message, _ = await talk.receive(Propose, Join, Settle, timeout_s=FIRST_MESSAGE_S)
        match message:
            case Propose():
                gossip = self._by_group.get(message.group, self._gossips[0])
                await gossip.proposed(talk, stream, message)
            case Join():
                await self._exchanges(peer_id, message.exchange).join(talk, message)
            case Settle():
                answer = self._exchanges(peer_id, message.exchange).answer(peer_id, message)
                await talk.send(answer, stall_s=STALL_S)

    def _exchanges(self, peer_id: PeerId, name: str) -> Exchanges:
        """Those that know the exchange of this name with that peer; if nobody does, the first."""
        every = [gossip.exchanges for gossip in self._gossips]
        return next((one for one in every if one.remembers(peer_id, name)), every[0])
