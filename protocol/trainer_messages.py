"""What the daemon and its trainer say to each other about fragments (peer/training/messages.py).

In whatever way peers average them: in pairs, or all together.
"""

from typing import Final

from msgspec import Struct


class TrainerMessage(Struct, frozen=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """What daemon and trainer process say to each other, with its name as its kind."""


# --- commands -------------------------------------------------------------------------------------
class Merge(TrainerMessage, frozen=True):
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
"""The chunks of a fragment that is averaged as one: in pairs."""


class Yield(TrainerMessage, frozen=True):
    """Do not read phi of a fragment until `Amend`."""

    fragment: int


class Amend(TrainerMessage, frozen=True):
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
class FragmentSent(TrainerMessage, frozen=True):
    """The codes of a fragment lie in its region.

    Attributes:
        steps, tokens: trained since the fragment's last send.
        digest: blake3 (32 hex digits) of the codes.
        waited_s: how long training stood still before, for a fragment that was yielded.
        step: the nominal step at which its values were taken.
    """

    fragment: int
    cycle: int
    steps: int
    tokens: int
    digest: str
    waited_s: float
    step: float


class FragmentMerged(TrainerMessage, frozen=True):
    """The fast weights have taken over a fragment's outer step.

    Attributes:
        waited_s: how long training stood still for it: in pairs for send and merge; else 0 when it
        came in time.
    """

    fragment: int
    cycle: int
    waited_s: float


class Yielded(TrainerMessage, frozen=True):
    """phi of this fragment is not read until `Amend`."""

    fragment: int
