"""Where one search for a partner stands; what happens in it is decided in matchmaking.py."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from .matchmaking_events import Snapshot


class SearchPhase(Enum):
    """Where the search stands."""

    IDLE = auto()
    """Not free: no round is closed, or the last one is settled."""
    ASKING = auto()
    """Our proposal is pending."""
    OPEN = auto()
    """Nobody to ask just now."""
    PAIRED = auto()
    """Partner found; the exchange runs."""


_NONE: Final = Snapshot(-1, 0)


@dataclass(slots=True)
class Search:
    """The search of one round.

    Attributes:
        tried: snapshots of others that were asked in vain.
        pending: the peer that is asked, and its snapshot as far as we know.
        taken: the peer to which we said yes, and its round.
    """

    snapshot: Snapshot = _NONE
    phase: SearchPhase = SearchPhase.IDLE
    tried: set[tuple[str, int]] = field(default_factory=set)
    pending: tuple[str, Snapshot] | None = None
    taken: tuple[str, int] | None = None
    saw_silence: bool = False
    fresh_until_s: float = 0.0
    deadline_s: float = 0.0
    answer_until_s: float = 0.0
