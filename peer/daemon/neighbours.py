"""The peers that a home remembers, as seen by a peer that returns: linked, silent, or refusing.

A final refusal is reported, but a single peer must not send us away: while others may admit us, the
peer keeps waiting. If all remembered peers refuse, or some refuse and the others stay silent for as
long as we wait, the user must know it, and the peer must not train alone: the run may have banned
us meanwhile. A peer that was linked once was not refused by all. A temporary refusal (a neighbour
that is full) counts as silence: that neighbour may be training, so this peer does not lead.
"""

from collections.abc import Collection, Mapping
from typing import Final

import trio

from peer.facts import Facts, PeerState
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.ports import PeerId
from protocol.errors import Refused
from protocol.membership.returning import LISTEN_S, UNREACHED_S
from protocol.membership.view import Roster
from protocol.names import short_id

from .joining import is_final

TELL_EVERY_S: Final = 30.0
"""How often the console repeats that none of them can be reached."""
LOOK_S: Final = 0.5


class Neighbours:
    """Whether a returning peer's remembered neighbours can be reached, are silent, or refuse it.

    Args:
        alone: the user wants to continue without them.
        refusals: the last refusal of each peer that refused us.
        failures: why each peer that was tried last could not be reached.
    """

    def __init__(
        self,
        roster: Roster,
        facts: Facts,
        events: EventLog,
        *,
        alone: bool,
        refusals: Mapping[PeerId, Refused],
        failures: Mapping[PeerId, str],
    ) -> None:
        self._roster = roster
        self._facts = facts
        self._events = events
        self._alone = alone
        self._refusals = refusals
        self._failures = failures
        self._remembered = frozenset[PeerId]()
        self._since_s = trio.current_time()
        self._told_s = self._since_s - TELL_EVERY_S
        self._told: dict[PeerId, str] = {}
        self._was_linked = False

    def remember(self, peers: Collection[PeerId]) -> None:
        """Set the remembered peers; waiting for them begins now."""
        self._remembered = frozenset(peers)
        self._since_s = trio.current_time()

    def unreached(self) -> bool:
        """Whether there are any and none has admitted us; the user is told why."""
        now_s = trio.current_time()
        if self._alone or not self._remembered or self._linked():
            return False
        if now_s >= self._told_s + TELL_EVERY_S:
            self._told_s = now_s
            self._tell(self._since_s + UNREACHED_S - now_s)
        return True

    def _linked(self) -> bool:
        """Whether any peer has admitted us since we returned."""
        self._was_linked = self._was_linked or bool(self._roster.alive(trio.current_time()))
        return self._was_linked

    def _tell(self, left_s: float) -> None:
        count, whys = len(self._remembered), [*self._failures.values()]
        why = whys[-1] if whys else "nobody has answered yet"
        self._facts.now_doing(
            f"none of {count} remembered peers can be reached ({why}); continues alone after"
            f" {UNREACHED_S / 60:.0f} minutes, at once with --alone"
        )
        self._events.emit(
            EventName.NEIGHBOURS_AWAITED, neighbours=count, detail=why, left_s=max(0.0, left_s)
        )

    def refused(self) -> Refused | None:
        """The last final refusal; None if any peer has admitted us."""
        if self._alone or self._linked():
            return None
        final = self._final()
        return next(reversed(final.values())) if final else None

    def _final(self) -> dict[PeerId, Refused]:
        return {peer_id: each for peer_id, each in self._refusals.items() if is_final(each)}

    async def watch(self) -> None:
        """Report refusals while this peer is returning. Raises Refused: all refuse."""
        while self._facts.state is PeerState.RETURNING:
            self._tell_refusals()
            refused, waited_s = self.refused(), trio.current_time() - self._since_s
            patience_s = LISTEN_S if self._remembered <= self._final().keys() else UNREACHED_S
            if refused is not None and waited_s >= patience_s:
                raise refused
            await trio.sleep(LOOK_S)

    def _tell_refusals(self) -> None:
        for peer_id, each in self._final().items():
            if self._told.get(peer_id) != each.sentence:
                self._told[peer_id] = each.sentence
                self._facts.now_doing(
                    f"{short_id(peer_id)} refuses this peer ({each.sentence}); ends when all"
                    f" refuse, or none admits it for {UNREACHED_S / 60:.0f} minutes"
                )
                self._events.emit(EventName.REFUSED_BY_PEER, remote=peer_id, detail=each.sentence)
