"""The fragments of one peer, each averaged in pairs by a group of its own.

Everything that a vector has in gossip (peer/averaging/gossip/lane.py) each fragment has for itself:
so each finds its own partner, and while one is looked for or exchanged, others are too. What they
share is the memory of slow weights and momentum, the lock under which these move, and the door.

Streams are bounded for each remote peer (peer/network/handlers.py), and all fragments may have the
same partner, so an exchange of one of many fragments opens fewer stripes.
"""

from collections.abc import Sequence

import trio

from peer.averaging.gossip.lane import Lane, lane_of
from peer.averaging.gossip.outer_state import Float32Vector, OuterState
from peer.averaging.gossip.outer_step import NolocoFactors
from peer.averaging.parts import AveragingParts
from peer.codec import get_codec
from peer.observe.events import NamedEvents
from protocol.fragment.fragments import Fragment, fragment_layout_digest
from protocol.limits import MAX_STRIPES
from protocol.membership.group import Group


class FragmentLanes:
    """The lanes of all fragments, in order. Implements `gossip.final_rounds.Meetings`.

    Args:
        delta_P: outer momentum, in the order of the flat vector.
        factors: of the outer step of each fragment.
    """

    def __init__(
        self,
        parts: AveragingParts,
        fragments: Sequence[Fragment],
        delta_P: Float32Vector,
        factors: NolocoFactors,
        lock: trio.Lock,
    ) -> None:
        self._parts = parts
        self._lock = lock
        self._max_stripes = max(0, MAX_STRIPES // len(fragments) - 1)
        self.lanes: tuple[Lane, ...] = tuple(
            self._lane(fragment, delta_P, factors) for fragment in fragments
        )

    @property
    def disagreements(self) -> int:
        """Meetings left out because the partner sees another roster: of the worst fragment."""
        return max(lane.meetings.disagreements for lane in self.lanes)

    def begin(self, roster: str) -> None:
        """From now on the roster with this digest is ours, for all fragments."""
        for lane in self.lanes:
            lane.meetings.begin(roster)

    def _lane(self, fragment: Fragment, delta_P: Float32Vector, factors: NolocoFactors) -> Lane:
        parts, held = self._parts, self._parts.held
        codec = get_codec(held.codec, part_of=held.shape.padded_parameters)
        return lane_of(
            parts,
            OuterState(parts.slow_P, delta_P, codec, factors, fragment.spans),
            group=Group(held.group.run_id, f"fragment/{fragment.index}").digest,
            layout_digest=fragment_layout_digest(held.shape.layout_digest, fragment),
            size=fragment.size,
            company=parts.company_of(fragment.index),
            events=NamedEvents(parts.events, fragment=fragment.index),
            lock=self._lock,
            max_stripes=self._max_stripes,
        )
