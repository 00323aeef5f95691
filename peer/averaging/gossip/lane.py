"""One vector that is averaged in pairs, put together: the whole model, or a fragment of it."""

from dataclasses import dataclass

import trio

from peer.averaging.parts import AveragingParts
from peer.observe.events import Events
from peer.observe.status import PeerState
from protocol.limits import MAX_STRIPES
from protocol.outcomes import RefusalReason

from .company import Company
from .exchanges import Exchanges
from .final_meetings import FinalMeetings
from .gossip import Gossip
from .outcome import Agreement
from .outer_state import OuterState
from .outer_steps import OuterSteps


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
