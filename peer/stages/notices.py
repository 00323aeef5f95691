"""Small messages between the peers of a pipeline: what each means to the core, and its answer.

A relay works for the data peers that it knows; whether it knows the sender is for exchange.py.
"""

from typing import Final

from peer.ports import PeerId
from protocol.errors import RemoteProtocolError
from protocol.microbatch.core import Command, HaltRelays, ResumeRelay, StageCore, TellLost
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.relay import RelayCore
from protocol.microbatch.trip import Leg, Microbatch, Trip
from protocol.outcomes import RefusalReason
from protocol.wire.messages import Refusal
from protocol.wire.stage_messages import (
    Announcement,
    Halt,
    Halted,
    Lost,
    Noted,
    Offer,
    Passed,
    Resume,
)

Notice = Announcement | Lost | Passed | Halt | Resume
NOTICES: Final = (Announcement, Lost, Passed, Halt, Resume)
Reply = Noted | Halted | Refusal


def origin_of(notice: Notice, sender: PeerId) -> PeerId:
    """The data peer of which a notice to a relay speaks."""
    return notice.origin if isinstance(notice, Passed) else sender


def stage_said(message: Offer | Notice) -> int | None:
    """The stage that its receiver holds, by the path of a message; None where it says none.

    Paths are made before they are travelled: a peer may have gone over to another stage since.
    """
    if not isinstance(message, Offer | Resume):
        return None
    said = message.stages[message.place - 1 : message.place] if message.place else ()
    return said[0] if said else None


def note(
    core: StageCore, notice: Notice, sender: PeerId, peer_id: PeerId, now_s: float
) -> tuple[Reply, list[Command]]:
    """Tell the core. Returns the answer, and what is to be done.

    Args:
        peer_id: ours.

    Raises:
        RemoteProtocolError: its path is none, or goes on without us.
    """
    if isinstance(notice, Passed):
        passed = Microbatch(notice.origin, notice.iteration, notice.index)
        return Noted(0), core.passed(passed, sender, notice.attempt)
    if isinstance(core, RelayCore):
        return _note_at_relay(core, notice, sender, peer_id, now_s)
    if isinstance(core, DataPeerCore) and isinstance(notice, Lost):
        lost = Microbatch(peer_id, notice.iteration, notice.index)
        told = TellLost(lost, (), notice.attempt, notice.failed, notice.refused)
        return Noted(core.iteration), core.lost(told, sender)
    # Said to the relay, or data peer, that we were before we went over to this stage.
    sentence = f"a {type(notice).__name__} is not for this stage"
    return Refusal(RefusalReason.OTHER_GROUP, sentence), []


def _note_at_relay(
    core: RelayCore, notice: Notice, sender: PeerId, peer_id: PeerId, now_s: float
) -> tuple[Reply, list[Command]]:
    if isinstance(notice, Announcement):
        commands = core.announced(sender, notice.iteration, now_s)
        return Noted(core.newest_for(sender)), commands
    microbatch = Microbatch(sender, notice.iteration, notice.index)
    if isinstance(notice, Halt):
        standing, commands = core.halted(microbatch, notice.attempt, now_s)
        if standing is None:
            sentence = "a later attempt is known, or it is never mended"
            return Refusal(RefusalReason.UNAVAILABLE, sentence), commands
        return Halted(standing), commands
    if isinstance(notice, Resume):
        trip = _trip_of(notice, microbatch)
        if not 1 <= trip.place <= len(trip.path) or trip.receiver != peer_id:
            raise RemoteProtocolError("a path goes on without us")
        return Noted(core.newest_for(sender)), core.resumed(trip, returns=notice.returns)
    return Noted(core.newest_for(sender)), core.lost(microbatch, sender, now_s, notice.attempt)


def _trip_of(notice: Resume, microbatch: Microbatch) -> Trip:
    if len(set(notice.path)) != len(notice.path) or len(notice.stages) != len(notice.path):
        raise RemoteProtocolError("a path visits every peer once, and says the stage of each")
    return Trip(
        microbatch,
        Leg.FORWARD,
        notice.path,
        notice.place,
        notice.stages,
        notice.plan,
        notice.attempt,
        notice.until,
    )


def halt_message(command: HaltRelays, group: str) -> Halt:
    """A halt as a relay is told of it."""
    microbatch = command.microbatch
    return Halt(group, microbatch.iteration, microbatch.index, command.attempt)


def resume_message(command: ResumeRelay, group: str) -> Resume:
    """How a microbatch goes on, as a relay is told of it."""
    trip, microbatch = command.trip, command.trip.microbatch
    return Resume(
        group,
        microbatch.iteration,
        microbatch.index,
        trip.path,
        trip.place,
        trip.stages,
        trip.plan,
        trip.attempt,
        trip.until,
        command.returns,
    )
