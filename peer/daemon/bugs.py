"""Bugs that end no daemon stand in its event log: a stream or a request that failed through one."""

from typing import Final

from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.ports import PeerId

MAX_DETAIL_CHARS: Final = 400


def note_failed_stream(
    events: EventLog, peer_id: PeerId, protocol: str, error: BaseException
) -> None:
    """Put a stream that a bug has ended into the event log."""
    events.emit(
        EventName.STREAM_FAILED,
        remote=peer_id,
        protocol=protocol,
        error=type(error).__name__,
        detail=str(error)[:MAX_DETAIL_CHARS],
    )


def note_failed_request(events: EventLog, request: str, error: BaseException) -> None:
    """Put a request at the control socket that a bug has ended into the event log."""
    events.emit(
        EventName.REQUEST_FAILED,
        request=request,
        error=type(error).__name__,
        detail=str(error)[:MAX_DETAIL_CHARS],
    )
