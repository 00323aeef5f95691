"""A member that is everybody's partner, and brings to each what it is sent itself."""

from typing import Any, Final

import pytest
import trio

from peer.averaging.gossip.exchange_session import AverageEnded, OwnVector, Skipped
from peer.averaging.gossip.gossip import Gossip
from peer.network.conversation import Conversation
from peer.runtime import PeerId
from protocol.gossip.exchange import exchange_id
from protocol.outcomes import SkipReason
from protocol.wire.messages import Accept, Propose, Received, Vector

FREE_S: Final = 0.5
"""It tells of a new round so often."""


class Echo:
    """Makes one peer answer each proposal with the proposer's own vector, whenever it is asked."""

    def __init__(self, patch: pytest.MonkeyPatch, peer_id: PeerId) -> None:
        self.averages = 0
        self._peer_id = peer_id
        self._average, self._proposed = Gossip.average, Gossip.proposed
        echo = self

        async def average(gossip: Gossip, own: OwnVector, **bounds: Any) -> AverageEnded:
            if gossip._matchmaker._own_id != peer_id:
                return await echo._average(gossip, own, **bounds)
            gossip._candidates.announce(own.snapshot)
            await trio.sleep(FREE_S)
            return AverageEnded(own, Skipped(SkipReason.NO_PARTNER), FREE_S, 0.0)

        async def proposed(gossip: Gossip, talk: Conversation, stream: Any, ask: Propose) -> None:
            if gossip._matchmaker._own_id == peer_id:
                await echo._answer(gossip, talk, ask)
            else:
                await echo._proposed(gossip, talk, stream, ask)

        patch.setattr(Gossip, "average", average)
        patch.setattr(Gossip, "proposed", proposed)

    async def _answer(self, gossip: Gossip, talk: Conversation, ask: Propose) -> None:
        group = gossip.agreement.group
        name = exchange_id(group, (self._peer_id, 0), (talk.remote_peer_id, ask.round))
        await talk.send(Accept(ask.round, 0, ask.steps, ask.tokens, 0))
        theirs, payload = await talk.receive(
            Vector, max_payload_bytes=gossip.agreement.payload_bytes
        )
        await talk.send(theirs, bytes(payload))
        await talk.send(Received(name, theirs.digest))
        await talk.receive(Received)
        self.averages += 1
