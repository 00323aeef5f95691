"""What the daemon and its trainer say to each other about fragments (peer/training/messages.py)."""

from dataclasses import dataclass
from typing import Final


# --- commands -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Merge:
    """The outer step of a fragment in flight is in phi: this ends the flight.

    Attributes:
        stepped: chunks whose result holds our codes.
        moved: chunks that were written without them; what is in neither list is left alone.
    """

    fragment: int
    cycle: int
    stepped: tuple[int, ...]
    moved: tuple[int, ...]


ONE_CHUNK: Final = (0,)
"""The chunks of a fragment that is averaged as one: in streaming gossip."""


@dataclass(frozen=True, slots=True)
class Yield:
    """Do not read phi of a fragment until `Amend`."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Amend:
    """A yielded fragment of phi has been written: follow.

    Attributes:
        merged: chunks that were stepped now, and not in `Merge`.
        redone: chunks whose step was taken back, and taken with another result.
        moved: chunks that were written without our codes.
    """

    fragment: int
    merged: tuple[int, ...] = ()
    redone: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()


# --- events ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class FragmentSent:
    """The codes of a fragment lie in its region.

    Attributes:
        steps, tokens: trained since the fragment's last send.
        digest: blake3 (32 hex digits) of the codes.
        seconds: what the coding took.
        waited_s: how long training stood still before, for a fragment that was yielded.
        step: the nominal step at which its values were taken.
    """

    fragment: int
    cycle: int
    steps: int
    tokens: int
    digest: str
    seconds: float
    waited_s: float
    step: float


@dataclass(frozen=True, slots=True)
class FragmentMerged:
    """The fast weights have taken over a fragment's outer step.

    Attributes:
        waited_s: how long training stood still for it; 0 when it came in time.
    """

    fragment: int
    cycle: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Yielded:
    """phi of this fragment is not read until `Amend`."""

    fragment: int
