"""One live link to another peer."""

from dataclasses import dataclass, field
from typing import Final

import trio

from peer.facts import Facts
from peer.network.conversation import Conversation
from peer.network.pacing import Pacing
from peer.runtime import PeerId
from protocol.limits import LINK_MESSAGES_PER_S, MAX_FRAGMENTS_FREE
from protocol.membership.book import Allowance
from protocol.membership.view import Progress
from protocol.wire.fields import MAX_SECONDS
from protocol.wire.messages import (
    AliveReply,
    AskAlive,
    AveragedWith,
    Beat,
    Free,
    Leaving,
    LossOfDomain,
    PeerList,
    Statements,
)

Outgoing = Beat | PeerList | Statements
FromLink = Outgoing | AskAlive | AliveReply | Leaving
FROM_LINK: Final = (Beat, PeerList, Statements, AskAlive, AliveReply, Leaving)
LINK_BURST: Final = 4 * LINK_MESSAGES_PER_S
RTT_SHARE: Final = 0.2
"""The weight of the newest sample in the smoothed round-trip time."""


@dataclass(slots=True, eq=False)
class Link:
    """The state of one live link.

    Attributes:
        newest_sent_s: `sent_s` of their newest beat, to be echoed; it came at `newest_heard_s`.
        rtt_s: smoothed round-trip time; None before the first sample.
        named: peers that it told last to be alive.
        told_pair_averages: how many of ours in pairs it has been told of, or were before it.
        messages: read since the last look at their `allowance`.
    """

    peer_id: PeerId
    incarnation: int
    talk: Conversation
    outbox: trio.MemorySendChannel[Outgoing]
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    last_heard_s: float = 0.0
    newest_sent_s: float | None = None
    newest_heard_s: float = 0.0
    rtt_s: float | None = None
    named: frozenset[PeerId] = frozenset()
    told_pair_averages: int = 0
    opened_by_us: bool = False
    messages: float = 0.0
    allowance: Allowance = field(default_factory=lambda: Allowance(LINK_MESSAGES_PER_S, LINK_BURST))

    async def wait_turn(self) -> None:
        pause_s = self.allowance.spend(trio.current_time(), self.messages)
        self.messages = 0.0
        if pause_s:
            await trio.sleep(pause_s)

    def heard_beat(self, beat: Beat, now_s: float) -> Progress:
        self.newest_sent_s, self.newest_heard_s = beat.sent_s, now_s
        if beat.echo_s is not None:
            sample_s = max(0.0, now_s - beat.echo_s - beat.echo_hold_s)
            old_s = sample_s if self.rtt_s is None else self.rtt_s
            self.rtt_s = (1 - RTT_SHARE) * old_s + RTT_SHARE * sample_s
        return Progress(
            state=beat.state,
            round=beat.round,
            fraction=beat.fraction,
            steps_per_s=beat.steps_per_s,
            epoch=beat.epoch,
            position=beat.position,
            step=beat.step,
            free={free.fragment: (free.round, free.step) for free in beat.free},
            ended=beat.ended,
            group=beat.group,
            validation_loss=beat.validation_loss,
            losses={each.domain: each.loss for each in beat.losses},
        )


def beat_to(link: Link, facts: Facts, pacing: Pacing, sequence: int, swarm_time_s: float) -> Beat:
    now_s, loss = trio.current_time(), facts.validation_loss
    free = sorted(facts.free.items())[:MAX_FRAGMENTS_FREE]
    untold = facts.num_pair_averages - link.told_pair_averages
    link.told_pair_averages = facts.num_pair_averages
    newest = tuple(AveragedWith(*each) for each in facts.newest_pair_averages)
    return Beat(
        sequence=sequence,
        state=str(facts.state),
        round=facts.round,
        fraction=facts.fraction,
        steps_per_s=facts.steps_per_s,
        epoch=facts.epoch,
        position=facts.position,
        step=facts.step,
        tokens=facts.tokens,
        sent_s=now_s,
        echo_s=link.newest_sent_s,
        echo_hold_s=now_s - link.newest_heard_s if link.newest_sent_s is not None else 0.0,
        swarm_time_s=swarm_time_s,
        received_bytes=pacing.received_bytes(link.peer_id),
        may_send_bytes_per_s=pacing.may_send_bytes_per_s,
        free=tuple(Free(fragment, own.round, own.step) for fragment, own in free),
        ended=facts.training_averaged,
        group=facts.group,
        validation_loss=loss if loss is not None and loss <= MAX_SECONDS else None,
        met=newest[max(0, len(newest) - untold) :],
        losses=tuple(LossOfDomain(*each) for each in sorted(facts.losses_of_domains.items())),
    )
