"""The peers of the group, as the exchange of fragments sees them: from the view."""

from collections.abc import Iterable

import trio

from peer.observe.facts import Facts
from peer.observe.status import PeerState
from peer.ports import PeerId
from protocol.diloco.fragment_events import GroupSeen
from protocol.diloco.peers import LATE_ROUNDS
from protocol.membership.view import TRAINING, Member, View
from protocol.run.amendments import AmendedSpec


class FragmentCompany:
    """Implements `CycleCompany` (surroundings.py)."""

    def __init__(self, own_id: PeerId, facts: Facts, view: View, spec: AmendedSpec) -> None:
        self._own_id = own_id
        self._facts = facts
        self._view = view
        self._spec = spec

    def seen(self) -> GroupSeen:
        """How the group looks now, without those that are stuck."""
        now_s = trio.current_time()
        alive = self._view.alive(now_s)
        states = (PeerState.TRAINING, PeerState.FINISHED)
        holding = (
            m.peer_id for m in alive if m.progress.state in states and not self._is_stuck(m, now_s)
        )
        relayed = {m.peer_id for m in alive if m.relayed}
        if self._facts.reach.relays:
            relayed.add(self._own_id)
        return GroupSeen(
            round=self._facts.round,
            present=frozenset([self._own_id, *holding]),
            rounds={member.peer_id: member.progress.round for member in self._training(alive)},
            is_over=self._facts.state is PeerState.FINISHED,
            lives={member.peer_id: member.incarnation for member in alive},
            known=frozenset(member.peer_id for member in self._view.members()),
            relayed=frozenset(relayed),
        )

    def is_linked(self, peer_id: PeerId) -> bool:
        """Whether we have a live link with a peer of the group."""
        return self._view.is_linked(peer_id, trio.current_time())

    @property
    def is_alone(self) -> bool:
        """Whether no other peer trains."""
        return not self._training(self._view.alive(trio.current_time()))

    def _is_stuck(self, member: Member, now_s: float) -> bool:
        """Whether a peer stands still while we go on; all may stand still, and wait for lines."""
        trains = member.progress.state == PeerState.TRAINING
        is_late = member.progress.round < self._facts.round - LATE_ROUNDS
        return trains and is_late and not member.goes_on(now_s)

    def _training(self, alive: Iterable[Member]) -> list[Member]:
        """Those that train; but for those that say they are past the end."""
        longest = self._spec.longest_rounds
        training = (member for member in alive if member.progress.state == TRAINING)
        return [member for member in training if member.progress.round <= longest]
