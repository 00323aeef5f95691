"""The share of the data that each member takes, and the blocks that changes of it have cost.

The data plan gives every member blocks in proportion to its weight, and the weight follows from its
speed: a peer of median speed has MEMBER_WEIGHT, and small differences of speed count as none. So
the shares stay until a peer comes, goes, or changes its pace; then what lies between the members'
positions is lost, or trained twice (protocol/schedule/data_plan.py), and is counted here. Each peer
counts for the whole swarm, by what it has heard, so two peers may count differently.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from peer.facts import Facts
from protocol.membership.view import Member, Progress
from protocol.schedule.data_plan import DataPlan, MemberPosition, Members
from protocol.schedule.rounds import whole_steps

MEMBER_WEIGHT: Final = 4
"""Data weight of a peer of median speed; others in proportion, within LARGEST_RATIO: what a peer
says of its speed is not checked."""
MAX_APART_PLACES: Final = 1 << 16
"""A peer that says it is further away, or where nobody can be, is left out of the count."""


class DataFeed(Protocol):
    """Sees to it that pieces of the corpus are here when they are trained on."""

    def plan(self, members: Members, epoch: int, position: int) -> None:
        """A round begins at this position, with these shares of the data."""

    async def bring(self, pieces: Sequence[int]) -> None:
        """Return when all of these pieces are here."""


class DataShares:
    """The shares of one run, as this peer sees them. Writes `facts.lost_blocks`, `repeated_blocks`.

    Args:
        feed: None where all of the corpus is here, or none of it is needed.
    """

    def __init__(self, plan: DataPlan, facts: Facts, feed: DataFeed | None = None) -> None:
        self.plan = plan
        self.feed = feed
        self._facts = facts
        self._members: dict[str, MemberPosition] = {}

    def now(
        self, training: Sequence[Member], trusted: Sequence[Member] = ()
    ) -> tuple[tuple[str, int], ...]:
        """Members and weights for the round that begins now; a change since the last is counted.

        Args:
            training: the others that train.
            trusted: those of them whose speeds say what is usual; all where there are none.
        """
        facts = self._facts
        speeds = [*(m.progress.steps_per_s for m in trusted or training), facts.steps_per_s]

        def position(peer_id: str, at: Facts | Progress) -> MemberPosition:
            weight = whole_steps(MEMBER_WEIGHT, at.steps_per_s, speeds)
            return MemberPosition(peer_id, weight, at.epoch, at.position)

        own = position(facts.peer_id, facts)
        members = {m.peer_id: position(m.peer_id, m.progress) for m in training}
        members[own.peer_id] = own
        self._count(members, own)
        self._members = members
        shares = tuple((m.peer_id, m.weight) for _, m in sorted(members.items()))
        if self.feed is not None:
            self.feed.plan(shares, facts.epoch, facts.position)
        return shares

    def _count(self, members: dict[str, MemberPosition], own: MemberPosition) -> None:
        before = {peer_id: m.weight for peer_id, m in self._members.items()}
        if not before or before == {peer_id: m.weight for peer_id, m in members.items()}:
            return
        # Those who stay are where they are now; those who went, where they were last seen.
        stood = [
            MemberPosition(peer_id, m.weight, at.epoch, at.position)
            for peer_id, m in self._members.items()
            for at in [members.get(peer_id, m)]
        ]
        lost, repeated = self.plan.lost_and_repeated(
            [m for m in stood if self._is_near(m, own)],
            [m for m in members.values() if self._is_near(m, own)],
        )
        self._facts.lost_blocks += lost
        self._facts.repeated_blocks += repeated

    def _is_near(self, member: MemberPosition, own: MemberPosition) -> bool:
        if not self.plan.holds(member.epoch, member.position):
            return False
        epochs = member.epoch - own.epoch
        places = epochs * self.plan.num_places + member.position - own.position
        return abs(places) <= MAX_APART_PLACES
