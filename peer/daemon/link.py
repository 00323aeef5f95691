"""One live link: what a peer keeps of each other peer that it is linked to."""

from dataclasses import dataclass, field
from typing import Final

import trio

from peer.network.conversation import Conversation
from peer.ports import PeerId
from protocol.messages import AliveReply, AskAlive, Beat, PeerList
from protocol.view import Progress

Outgoing = Beat | PeerList | AskAlive | AliveReply
RTT_SHARE: Final = 0.2
"""Of the newest sample in the smoothed round-trip time."""


@dataclass(slots=True, eq=False)
class Link:
    """See the top of the file.

    Attributes:
        newest_sent_s: `sent_s` of their newest beat, to be echoed; it came at `newest_heard_s`.
        rtt_s: smoothed round-trip time; None before the first sample.
        questions: theirs that we are looking into.
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
    questions: int = 0

    def heard_beat(self, beat: Beat, now_s: float) -> None:
        """A beat of theirs came."""
        self.newest_sent_s, self.newest_heard_s = beat.sent_s, now_s
        if beat.echo_s is not None:
            sample_s = max(0.0, now_s - beat.echo_s - beat.echo_hold_s)
            old_s = sample_s if self.rtt_s is None else self.rtt_s
            self.rtt_s = (1 - RTT_SHARE) * old_s + RTT_SHARE * sample_s


def progress_in(beat: Beat) -> Progress:
    """What a beat tells of its sender's work."""
    return Progress(
        state=beat.state,
        round=beat.round,
        fraction=beat.fraction,
        steps_per_s=beat.steps_per_s,
        epoch=beat.epoch,
        position=beat.position,
        step=beat.step,
        free_round=beat.free_round,
        free_step=beat.free_step,
        ended=beat.ended,
        group=beat.group,
    )
