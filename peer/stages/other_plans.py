"""Counts what comes by another plan than the others' microbatches of late, at a relay."""

from collections.abc import Collection

from peer.observe.facts import Facts
from peer.ports import PeerId
from protocol.microbatch.trip import Trip


class OtherPlans:
    """See the top of the file."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._newest_of: dict[PeerId, str] = {}

    def look(self, trip: Trip, data_peers: Collection[PeerId]) -> None:
        """A microbatch comes, while these data peers are there."""
        for gone in self._newest_of.keys() - set(data_peers):
            del self._newest_of[gone]
        if trip.plan is not None:
            self._newest_of[trip.microbatch.origin] = trip.plan
            self._facts.pipeline.other_plans += any(
                plan != trip.plan for plan in self._newest_of.values()
            )
