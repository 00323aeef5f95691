"""What this peer knows of the pieces of its corpus."""

from dataclasses import dataclass


@dataclass(slots=True)
class CorpusFacts:
    """The present.

    Attributes:
        pieces: of the whole corpus; 0 before it is known.
        here: of them on this machine.
        only_here: of them on no other machine that we have asked.
        fetched_bytes: that have come from other peers.
        waited_s: time for which training stood still for pieces.
    """

    pieces: int = 0
    here: int = 0
    only_here: int = 0
    fetched_bytes: int = 0
    waited_s: float = 0.0
