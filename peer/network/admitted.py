"""A network that serves admitted peers that behave; it is laid around the one that keeps the pace.

Every conversation that another peer opens, in a protocol of ours, passes this one door; libp2p's
own protocols do not, nor do streams that we open. The hello is where a peer shows its pass, and
where it is told why it is not let in (peer/daemon/links.py), so there only its conduct counts. What
a peer sends against the rules is held against it here, whatever the conversation. A peer that opens
streams faster than any needs to waits for its turn (protocol/membership/paces.py), and fills its
own places meanwhile.
"""

from typing import Protocol

import trio

from peer.ports import Network, PeerId, Stream, StreamHandler
from protocol.errors import RemoteProtocolError
from protocol.limits import (
    INBOUND_STREAMS_BURST_S,
    INBOUND_STREAMS_PER_S,
    INBOUND_STREAMS_PER_S_OF_PREFIX,
)
from protocol.membership.conduct import Fault
from protocol.membership.paces import Paces
from protocol.wire.messages import Refusal
from protocol.wire.versions import HELLO

from .conversation import Conversation
from .wrapped import WrappedNetwork


class Judge(Protocol):
    """Implemented by `peer.daemon.standing.Standing`."""

    def judge(self, peer_id: PeerId) -> Refusal | None:
        """Why a peer is not served; None when it is."""

    def judge_conduct(self, peer_id: PeerId) -> Refusal | None:
        """Why a peer is not even greeted; None when it is."""

    def wait_s(self, peer_id: PeerId) -> float:
        """For how long a stream of this peer waits before it is served."""

    def blame(self, peer_id: PeerId, fault: Fault) -> None:
        """Hold a fault against a peer."""


class AdmittedNetwork(WrappedNetwork):
    """See the top of the file."""

    def __init__(self, network: Network, judge: Judge) -> None:
        super().__init__(network)
        self._judge = judge
        self._paces = Paces(
            INBOUND_STREAMS_PER_S, INBOUND_STREAMS_PER_S_OF_PREFIX, INBOUND_STREAMS_BURST_S
        )

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Serve `protocol` to admitted peers from now on; raises LocalProtocolError."""
        judge = self._judge

        async def handle(stream: Stream) -> None:
            peer_id = stream.remote_peer_id
            if wait_s := self._paces.begin(trio.current_time(), peer_id, stream.remote_address):
                await trio.sleep(wait_s)
            decide = judge.judge_conduct if protocol == HELLO else judge.judge
            refusal = decide(peer_id)
            if refusal is not None:
                await Conversation(stream).refuse(refusal.reason, refusal.sentence)
                return
            if wait_s := judge.wait_s(peer_id):
                await trio.sleep(wait_s)
            try:
                await handler(stream)
            except* RemoteProtocolError:
                judge.blame(peer_id, Fault.BROKEN_RULE)
                raise

        await super().serve(protocol, handle)
