"""What the daemon and its trainer say to each other about fragments (peer/training/messages.py).

In whatever way peers average them: in pairs, or all together.
"""

from typing import Final

from msgspec import Struct


class TrainerMessage(Struct, frozen=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """What daemon and trainer process say to each other, with its name as its kind."""


# --- commands -------------------------------------------------------------------------------------
class Merge(TrainerMessage, frozen=True):
    """The outer step of a fragment that was sent, or yielded, is in phi: follow.

    What is in none of the lists is left alone.

    Attributes:
        cycle: of the send, whose flight this ends; None for a fragment that was yielded.
        stepped: chunks whose result holds our codes.
        moved: chunks that were written without them.
        redone: chunks that had been merged; their step was taken back, and taken with another
            result.
    """

    fragment: int
    cycle: int | None
    stepped: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    redone: tuple[int, ...] = ()


ONE_CHUNK: Final = (0,)
"""The chunks of a fragment that is averaged as one: in pairs."""


class Yield(TrainerMessage, frozen=True):
    """Do not read phi of a fragment until `Merge`."""

    fragment: int


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
    """phi of this fragment is not read until `Merge`."""

    fragment: int
