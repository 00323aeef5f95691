"""How far a state has come that is being fetched: for `status`, and for the event log."""

from typing import Final

import trio

from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.state.gathering import Gathering

TELL_EVERY_S: Final = 10.0


class FetchProgress:
    """Follows one gathering, from its making on."""

    def __init__(self, gathering: Gathering, facts: Facts, events: EventLog) -> None:
        self._gathering = gathering
        self._facts = facts
        self._events = events
        self._began_s = self._told_s = trio.current_time()

    def moved(self) -> None:
        """A chunk came: say how far it is, and how long the rest will take at this pace."""
        gathering, now_s = self._gathering, trio.current_time()
        sources, elapsed_s = gathering.num_sources, now_s - self._began_s
        left_s = gathering.missing_bytes / max(1, gathering.fetched_bytes) * elapsed_s
        peers = "1 peer" if sources == 1 else f"{sources} peers"
        self._facts.now_doing(
            f"fetching the state: {gathering.share:.0%} from {peers}, {left_s:.0f} s left"
        )
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            self._events.emit(
                EventName.STATE_PROGRESSED,
                share=round(gathering.share, 4),
                remotes=gathering.remotes,
                bytes=gathering.fetched_bytes,
                left_s=round(left_s, 1),
            )

    def ended(self, round_: int) -> None:
        """All of it is here, and is believed."""
        gathering = self._gathering
        self._events.emit(
            EventName.STATE_RECEIVED,
            round=round_,
            remotes=gathering.remotes,
            bytes=gathering.fetched_bytes,
            kept_bytes=gathering.kept_bytes,
            seconds=trio.current_time() - self._began_s,
        )
