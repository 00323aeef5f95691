"""The stages that a run trains without, since nobody holds them any more: for status and events."""

import trio

from peer.observe.event_names import EventName
from peer.observe.events import Events
from peer.observe.facts import Facts
from peer.observe.status import PeerState
from protocol.microbatch.data_peer import DataPeerCore


class LeftOut:
    """Watches the core of a data peer."""

    def __init__(self, facts: Facts, events: Events) -> None:
        self._facts = facts
        self._events = events
        self._since_s: dict[int, float] = {}

    def look(self, core: DataPeerCore) -> None:
        """Say what has changed."""
        now_s = trio.current_time()
        for stage in core.left_out:
            if stage not in self._since_s:
                self._since_s[stage] = now_s
                self._events.emit(EventName.STAGE_LEFT_OUT, stage=stage, step=self._facts.step)
        for stage in self._since_s.keys() - set(core.left_out):
            seconds = round(now_s - self._since_s.pop(stage), 1)
            step = self._facts.step
            self._events.emit(EventName.STAGE_TAKEN_IN, stage=stage, step=step, seconds=seconds)
        if self._facts.state is PeerState.TRAINING:
            self._facts.now_doing(_doing(core))


def _doing(core: DataPeerCore) -> str:
    """What a data peer does, in a sentence."""
    missing = core.missing_stages
    if not missing:
        return "training"
    stages = " and ".join(str(stage) for stage in missing)
    if set(missing) <= set(core.left_out):
        return f"training without stage {stages}, which nobody holds"
    return f"waiting for a peer that holds stage {stages}"
