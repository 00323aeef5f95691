"""What a real peer does to be reached by others: it finds out (reaching.py), and relays.

Simulated peers have neither: everybody reaches everybody there.
"""

from functools import partial
from typing import Final

import trio

from peer.network.relay import Relay, reserve
from peer.network.wrapped import AdmittedNetwork
from peer.ports import Network
from protocol.membership.dial_back import Reach

from .peer_parts import PeerParts
from .reaching import Reaching

NOTE_EVERY_S: Final = 2.0


class Outside:
    """Both, for one peer.

    Args:
        network: as the parts' one, without its pace.
        relay_mbps: how fast we carry for others; 0 is not at all.
    """

    def __init__(self, network: Network, parts: PeerParts, relay_mbps: float) -> None:
        facts = self._facts = parts.facts
        self._network = network
        self.relay = Relay(
            AdmittedNetwork(network, parts.standing),
            parts.pacing,
            offers=lambda: facts.reach.reach is not Reach.NO,
            mbps=relay_mbps,
            wall_time_s=parts.directory.swarm_time_s,
        )
        self._reaching = Reaching(
            network=parts.network,
            roster=parts.roster,
            facts=facts,
            events=parts.events,
            reserve=partial(reserve, network),
        )

    async def run(self) -> None:
        """Relay, and find out, until cancelled."""
        await self.relay.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._reaching.run)
            nursery.start_soon(self._note)

    async def _note(self) -> None:
        """Keep what others want to know of the relay."""
        while True:
            now, facts = self.relay.statistics(), self._facts.reach
            facts.reservations, facts.circuits = now.reservations, now.circuits
            facts.carried_bytes = now.carried_bytes
            facts.relayed_peers = self._network.statistics().relayed_peers
            await trio.sleep(NOTE_EVERY_S)
