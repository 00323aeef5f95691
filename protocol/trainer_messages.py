"""Messages of the daemon and its trainer about fragments (peer/training/messages.py)."""

from enum import StrEnum
from typing import Final

from msgspec import Struct


class TrainerMessage(Struct, frozen=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """A message of the daemon and its trainer process, with its name as its kind."""


class Merge(TrainerMessage, frozen=True):
    """The outer step of a fragment that was sent, or yielded, is in phi: follow.

    Chunks in none of the lists are left alone.

    Attributes:
        cycle: of the send, whose flight this ends; None for a fragment that was yielded.
        stepped: chunks whose result holds our codes.
        moved: chunks that were written without them.
        redone: chunks whose step was merged, taken back, and taken with another result.
    """

    fragment: int
    cycle: int | None
    stepped: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    redone: tuple[int, ...] = ()


ONE_CHUNK: Final = (0,)
"""The chunks of a fragment that is averaged in pairs."""


class Try(TrainerMessage, frozen=True):
    """Measure what the outer step of a fragment in flight does to the loss; in pairs alone.

    Attributes:
        blocks: on how many held-out blocks.
    """

    fragment: int
    cycle: int
    blocks: int


class Yield(TrainerMessage, frozen=True):
    """Do not read phi of a fragment until `Merge`."""

    fragment: int


class FragmentSent(TrainerMessage, frozen=True):
    """The codes of a fragment lie in its region.

    Attributes:
        steps, tokens: trained since the fragment's last send.
        digest: blake3 (32 hex digits) of the codes.
        waited_s: how long training stood still before, for a fragment that was yielded.
        step: nominal step of its values.
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


class Tried(TrainerMessage, frozen=True):
    """The fast weights are what they were before `Try`.

    Attributes:
        gain: by how much the loss would fall, nats per token; None where no memory was left.
        seconds: how long training stood still for it.
    """

    fragment: int
    cycle: int
    gain: float | None
    seconds: float


class Yielded(TrainerMessage, frozen=True):
    """phi of this fragment is not read until `Merge`."""

    fragment: int


class TrainerTime(StrEnum):
    """Uses of a trainer's time: one at each moment."""

    TRAIN = "train"
    """Inner steps, and whatever no other use names."""
    ENCODE = "encode"
    """Weights into codes for others."""
    MERGE = "merge"
    """Taking over averages, decoding among it."""
    MEASURE = "measure"
    """Losses of the slow weights, and of averages that are tried."""
    KEEP = "keep"
    """Checkpoints."""
    STALLED = "stalled"
    """Standing still until the daemon has an average or a round."""
    DATA = "data"
    """Standing still until a piece of the corpus is here."""
