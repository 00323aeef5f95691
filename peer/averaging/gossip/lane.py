"""One vector that is averaged in pairs, put together: the whole model, or a fragment of it.

Also the door of gossip: each stream from outside goes to the vector that it is about. A peer
averages one vector in pairs, or several, each with partners of its own. All use one conversation,
so one place reads the first message of a stream. A proposal names the group that averages the
vector; a stripe, or a question after a broken exchange, names its exchange. What names none of ours
goes to the first vector, which refuses it with the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from peer.averaging.parts import AveragingParts, Company
from peer.facts import PeerState
from peer.network.conversation import Conversation
from peer.observe.events import Events
from peer.ports import Network, PeerId, Stream
from protocol.limits import MAX_STRIPES
from protocol.outcomes import RefusalReason
from protocol.wire.messages import AskSettled, Join, Propose
from protocol.wire.versions import GOSSIP

from .exchange_io import STALL_S
from .exchanges import Agreement, Exchanges
from .final_averaging import FinalMeetings
from .gossip import Gossip
from .outer_state import OuterState
from .outer_steps import OuterSteps

# --- door -----------------------------------------------------------------------------------------

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
        message, _ = await talk.receive(Propose, Join, AskSettled, timeout_s=FIRST_MESSAGE_S)
        match message:
            case Propose():
                gossip = self._by_group.get(message.group, self._gossips[0])
                await gossip.proposed(talk, stream, message)
            case Join():
                await self._exchanges(peer_id, message.exchange).join(talk, message)
            case AskSettled():
                answer = self._exchanges(peer_id, message.exchange).answer(peer_id, message)
                await talk.send(answer, stall_s=STALL_S)

    def _exchanges(self, peer_id: PeerId, name: str) -> Exchanges:
        """Those that know the exchange of this name with that peer; if nobody does, the first."""
        every = [gossip.exchanges for gossip in self._gossips]
        return next((one for one in every if one.remembers(peer_id, name)), every[0])


# --- lane -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lane:
    """Search for partners, planned meetings and outer steps of one vector."""

    outer: OuterState
    gossip: Gossip
    meetings: FinalMeetings
    steps: OuterSteps


def lane_of(
    parts: AveragingParts,
    outer: OuterState,
    *,
    group: str,
    layout_digest: str,
    size: int,
    company: Company,
    events: Events,
    lock: trio.Lock,
    max_stripes: int = MAX_STRIPES,
) -> Lane:
    """A vector's lane.

    Args:
        outer: its state.
        group: digest of the group that averages it.
        size: values, padding included.
        lock: held while the state moves.
        max_stripes: further streams that one exchange may have.
    """
    agreement = Agreement(
        group=group,
        inner_steps=parts.spec.sync.round_steps,
        layout_digest=layout_digest,
        codec=parts.held.codec,
        vectors=2 if outer.needs_phi_codes else 1,
        padded_parameters=size,
        declined_now=lambda: declined_in(parts.facts.state),
        max_stripes=max_stripes,
    )
    exchanges = Exchanges(agreement, parts.network, parts.work, parts.facts.packing)
    own_id = parts.network.peer_id
    meetings = FinalMeetings(agreement, own_id, company=company, exchanges=exchanges, events=events)
    gossip = Gossip(
        agreement,
        own_id,
        company=company,
        exchanges=exchanges,
        meetings=meetings,
        events=events,
        refused=parts.facts.refused,
    )
    steps = OuterSteps(
        parts.spec,
        facts=parts.facts,
        outer=outer,
        gossip=gossip,
        meetings=meetings,
        work=parts.work,
        events=events,
        observe_round=parts.observe_round,
        lock=lock,
    )
    return Lane(outer, gossip, meetings, steps)


def declined_in(state: PeerState) -> RefusalReason | None:
    """Why a peer takes no proposal in this state; None when it does."""
    if state is PeerState.LEAVING:
        return RefusalReason.LEAVING
    return None if state is PeerState.TRAINING else RefusalReason.NOT_TRAINING
