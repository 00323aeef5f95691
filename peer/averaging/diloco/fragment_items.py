"""What a fragment's keeper takes and tells, and what it asks of the trainer and of the others.

The keeper stands in fragment_keeper.py; who fetches, sends and serves for it in the files beside.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from peer.ports import PeerId
from protocol.fragment.chunk_ledger import Stamp
from protocol.wire.fragment_messages import ChunkResult
from protocol.wire.messages import Result


@dataclass(frozen=True, slots=True)
class Sent:
    """The trainer has sent the fragment: its codes, chunk after chunk."""

    cycle: int
    codes: memoryview
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A result for one chunk, checked.

    Attributes:
        asked: it is an answer to a question of ours; else it came by itself.
    """

    result: Result
    chunk: ChunkResult
    codes: memoryview
    sender: PeerId
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """A chunk as another peer has it."""

    chunk: int
    cycle: int
    stamp: Stamp
    values: memoryview


@dataclass(frozen=True, slots=True)
class Passed:
    """A peer is through with this cycle: what it owned has come, or never will."""

    peer_id: PeerId
    cycle: int


Item = Sent | Arrived | Fetched | Passed


@dataclass(slots=True)
class Changes:
    """Chunks that changed, by what the trainer has to do about them."""

    stepped: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    redone: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Returned:
    """How a send ended.

    Attributes:
        contributors: peers in the results, at most; 0 when none came.
        missing: chunks without a result.
        moved: chunks whose result is without us, or that were healed.
        digest: of all chunks' states, now; the same for all who are where we are.
    """

    fragment: int
    cycle: int
    contributors: int
    missing: int
    moved: int
    digest: str
    seconds: float


class Held(Enum):
    """What became of the wish to write a fragment that is not in flight."""

    YIELDED = "yielded"
    """The trainer does not read it until `amend`."""
    VOID = "void"
    """It has just sent it: the send is in the inbox, or comes there."""
    FREE = "free"
    """There is no trainer that could read it."""


class TrainerSide(Protocol):
    """What a keeper asks of the trainer."""

    @property
    def can_write(self) -> bool:
        """Whether nobody reads the whole outer copy."""

    async def may_write(self) -> None:
        """Wait until `can_write`."""

    async def merge(self, fragment: int, cycle: int, changes: Changes) -> None:
        """The send is over; this has changed."""

    async def hold(self, fragment: int) -> Held:
        """Make it read nothing of the fragment until `amend`."""

    async def amend(self, fragment: int, changes: Changes) -> None:
        """This has changed; go on."""


class Others(Protocol):
    """What a keeper asks of the other peers."""

    async def turn_to_contribute(self, fragment: int) -> None:
        """Wait until it is this fragment's turn, of those that were sent together."""

    def contribute(self, fragment: int, sent: Sent, *, healing: bool) -> Sequence[PeerId]:
        """Send the codes to their owners, who are returned by chunk."""

    def unheard(self, owners: set[PeerId]) -> None:
        """Nothing came from these owners in time."""

    def settled(self, fragment: int, cycle: int, digest: bytes) -> None:
        """Tell all where we are."""

    def heal(self, fragment: int, chunk: int, sender: PeerId) -> None:
        """Fetch a chunk; it comes into the inbox."""

    def is_healing(self, fragment: int) -> bool:
        """Whether a chunk is being fetched."""
