"""What `loco-peer amend` asks of the daemon of its home: changes of the run that is under way.

What an amendment is stands in protocol/run/amendments.py. Here it is found out what of a user's run
spec differs, from which round on it can be in force, and whether that makes sense; then it is
signed, and all are told.

Peers that are linked with us when the run is closed to some are admitted by a ruling each: whoever
is in stays in.
"""

from dataclasses import dataclass
from typing import Any, Final

import trio

from peer.facts import PeerState
from peer.observe.control import Handler
from peer.ports import PeerId
from protocol.errors import LocoError
from protocol.membership.view import TRAINING
from protocol.run.amendments import (
    MODE,
    TOTAL_STEPS,
    AmendedSpec,
    Changes,
    changed,
    changes_between,
    new_peers,
    value_of,
)
from protocol.schedule.rounds import middle

from .peer_parts import PeerParts

LEAD_ROUNDS: Final = 3
"""Rounds between an amendment and its first, unless the user says another: a statement reaches all
within seconds, and peers that gossip can be two rounds apart."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be changed.

    Attributes:
        from_round: the present one where nothing but admission changes, which does so at once.
        peers: to be admitted.
    """

    changes: Changes
    from_round: int
    peers: tuple[PeerId, ...]


class Amending:
    """Answers the control request of `amend`."""

    def __init__(self, parts: PeerParts) -> None:
        self._door = parts.door
        self._passing_on = parts.links.passing_on
        self._facts = parts.facts
        self._roster = parts.roster

    def handlers(self) -> dict[str, Handler]:
        """The handler of each request, by its name."""
        return {"amend": self.amend}

    async def amend(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Sign an amendment and tell all, or say what it would be.

        Raises:
            LocoError, InvalidRunSpec: it cannot be done; the message says why.
        """
        spec = self._under_way()
        self._door.founder()  # a dry run that could not be done in earnest says so
        before, wish = spec.last, self._wish(spec, wanted["values"], wanted["at_round"])
        if not wanted["dry_run"]:
            self._sign(wish)
        steps = spec.founding.sync.round_steps
        return {
            "changes": [[key, value_of(before, key), value] for key, value in wish.changes],
            "admitted": list(wish.peers),
            "round": wish.from_round,
            "step": wish.from_round * steps,
            "present": self._present_round(spec),
            "end": changed(before, wish.changes).total_rounds,
        }

    def _under_way(self) -> AmendedSpec:
        """The run's spec. Raises LocoError: there is no run to amend, now."""
        spec, facts = self._facts.spec, self._facts
        if spec is None or facts.held is None:
            raise LocoError("the run is not known yet; try again when this peer is training")
        if facts.over or facts.state is PeerState.FINISHED:
            raise LocoError("the run has ended and cannot be amended")
        if facts.state is PeerState.RETURNING:
            raise LocoError(
                "this peer has just returned and does not know the run's current step yet;"
                " try again when `loco-peer status` says that it trains"
            )
        return spec

    def _wish(self, spec: AmendedSpec, values: dict[str, Any], at_round: int | None) -> Wish:
        """What differs, if it can be amended.

        Raises:
            LocoError, InvalidRunSpec
        """
        changes = changes_between(spec.last, values)
        peers = new_peers(spec.founding, values)
        if not changes and all(self._door.judge(peer) is None for peer in peers):
            raise LocoError("nothing to amend: the run already has these values")
        changed(spec.last, changes)  # its values can be used
        present = self._present_round(spec)
        scheduled = [key for key, _ in changes if key != MODE]
        if not scheduled:
            if at_round is not None:
                raise LocoError("--at-round: admission changes at once; leave this option out")
            return Wish(changes, present, peers)
        return Wish(changes, _from_round(spec, present, changes, at_round), peers)

    def _present_round(self, spec: AmendedSpec) -> int:
        """The round that the run is in: ours, or that of the middle of the others."""
        others = self._roster.alive(trio.current_time())
        own = self._facts.step
        steps = [member.progress.step for member in others if member.progress.state == TRAINING]
        known = [step for step in steps if step <= spec.longest_steps]
        return int(max(own, middle(known, own))) // spec.founding.sync.round_steps

    def _sign(self, wish: Wish) -> None:
        peers = list(wish.peers)
        if MODE in dict(wish.changes):
            linked = [member.peer_id for member in self._roster.alive(trio.current_time())]
            peers += [peer for peer in linked if self._door.judge(peer) is None]
            peers.append(self._facts.peer_id)
        self._passing_on.tell(self._door.amend(wish.from_round, wish.changes, peers))


def _from_round(spec: AmendedSpec, present: int, changes: Changes, at_round: int | None) -> int:
    """The first round of an amendment.

    Raises:
        LocoError: it makes no sense from the round on that the user has named.
    """
    end = spec.end_round
    from_round = min(present + LEAD_ROUNDS, end) if at_round is None else at_round
    if end <= present:
        raise LocoError("the run is in its last round, and can no longer be amended")
    if from_round <= present:
        raise LocoError(
            f"--at-round: the run is in round {present}; name a later one, so that all peers"
            f" hear of it in time ({present + LEAD_ROUNDS} is the default)"
        )
    if from_round > end:
        raise LocoError(f"--at-round: the run ends with round {end}, before round {from_round}")
    total = changed(spec.last, changes).total_rounds
    if total < from_round:
        steps = spec.founding.sync.round_steps
        raise LocoError(
            f"{TOTAL_STEPS}: with this value the run would end with round {total}, before"
            f" round {from_round}, when it takes effect; it can end at step"
            f" {from_round * steps} at the earliest"
        )
    return from_round
