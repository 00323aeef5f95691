"""Commands of the core of the fragment exchange, and what it is told besides messages.

What peers and the trainer are told is the very message that they get. Codes and values are views of
memory that the core holds, hands on, and never reads.

Commands to write are carried out one after another, of all fragments, in order; so are those to the
trainer. A command that ends says by which method of the core it is told.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from protocol.trainer_messages import Merge, Yield
from protocol.wire.fragment_messages import (
    ChunkResult,
    ChunkStateReply,
    Contribution,
    Doubt,
    FragmentSettled,
    GetChunkState,
    GetResult,
    GetStamps,
    NoResult,
    Proof,
    Result,
    ResultRank,
    Stamp,
    Stamps,
)

Codes = Mapping[int, memoryview]
"""Codes by chunk."""
Unasked = Contribution | Result | NoResult | FragmentSettled | Doubt
"""What peers send without being asked, about one fragment."""
FragmentQuestion = GetStamps | GetResult | GetChunkState
FragmentAnswer = Stamps | Result | ChunkStateReply
NO_CODES: Final = memoryview(b"")


# --- what the core is told ------------------------------------------------------------------------
class HoldOutcome(Enum):
    """The trainer's answer to `Yield`, for a fragment that is not in flight."""

    YIELDED = "yielded"
    """The trainer does not read it until it is told what has changed."""
    VOID = "void"
    """It has just sent it: the send has come, or comes soon."""
    FREE = "free"
    """There is no trainer that could read it."""


@dataclass(frozen=True, slots=True)
class GroupSeen:
    """How the group looks now.

    Attributes:
        round: ours.
        present: peers that hold an outer copy, we too: they train, or have finished.
        rounds: of the others that train.
        is_over: whether the run has ended here.
        known: peers that hold an outer copy or did so recently.
        relayed: those, perhaps we, that others reach through relays alone.
        lives: of the others, the incarnation of each that we know.
    """

    round: int
    present: frozenset[str]
    rounds: Mapping[str, int]
    is_over: bool = False
    known: frozenset[str] = frozenset()
    relayed: frozenset[str] = frozenset()
    lives: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sent:
    """The trainer has sent a fragment: its codes, chunk after chunk."""

    fragment: int
    cycle: int
    codes: memoryview
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Averages:
    """A result, signed, with the codes of all its chunks, in order and by chunk."""

    result: Result
    codes: memoryview
    parts: Codes


# --- what the cycles of a fragment take, one after another ----------------------------------------
@dataclass(frozen=True, slots=True)
class ResultArrived:
    """A result for one chunk.

    Attributes:
        codes: the chunk's alone.
        sender: the peer that it came from, not always its owner.
        asked: whether it answers a question of ours.
    """

    result: Result
    of_chunk: ChunkResult
    codes: memoryview
    sender: str
    asked: bool = False

    @property
    def chunk(self) -> int:
        return self.of_chunk.chunk

    @property
    def cycle(self) -> int:
        return self.result.cycle

    @property
    def rank(self) -> ResultRank:
        return self.of_chunk.rank


@dataclass(frozen=True, slots=True)
class ChunkFetched:
    """A chunk as another peer has it."""

    fragment: int
    cycle: int
    stamp: Stamp
    values: memoryview

    @property
    def chunk(self) -> int:
        return self.stamp.chunk


@dataclass(frozen=True, slots=True)
class CyclePassed:
    """A peer has finished this cycle: what it owned has come, or never will."""

    peer_id: str
    cycle: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Results of this owner are no longer believed: what can be undone of them is undone."""

    owner: str


Item = Sent | ResultArrived | ChunkFetched | CyclePassed | Withdrawn


# --- commands: to other peers ---------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send this to a peer some time soon, in order."""

    peer_id: str
    message: Result | NoResult | FragmentSettled | Doubt | Proof
    codes: memoryview = NO_CODES


@dataclass(frozen=True, slots=True)
class Contribute:
    """Send an owner, perhaps us, the codes of the chunks of the stamps; none: nothing will come."""

    owner: str
    sent: Sent
    stamps: tuple[Stamp, ...]


@dataclass(frozen=True, slots=True)
class ForgetOthers:
    """Drop what waits to be sent to any but these peers, who are still there."""

    present: AbstractSet[str]


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a peer; each ends in one `answered`.

    A question for a result is asked behind one for stamps, on the same stream. After its answer
    another `answered` tells that the question for stamps has ended.
    """

    peer_id: str
    question: FragmentQuestion


@dataclass(frozen=True, slots=True)
class Audit:
    """Have the owner of a result open a leaf of a chunk, and work it out; ended by `audited`.

    Attributes:
        draw: its remainder by the number of leaves chooses one.
    """

    result: Result
    chunk: int
    draw: int
    codes: memoryview


@dataclass(frozen=True, slots=True)
class Convict:
    """Ban an owner that was proved to have lied, and keep the proof."""

    owner: str
    proof: bytes


# --- arithmetic -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Admitted:
    """The peers, in the order of the sum, that go into a chunk's average: all stand on `base`."""

    base: Stamp
    contributors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Average:
    """Average the admitted contributions of each chunk, sign the result; ended by `averaged`."""

    fragment: int
    cycle: int
    admitted: Mapping[int, Admitted]
    codes: Mapping[int, Mapping[str, memoryview]]
    """Each chunk's, by contributor."""
    contributions: Mapping[str, Contribution]


@dataclass(frozen=True, slots=True)
class Verify:
    """Find the chunks that are not as their last steps, of these cycles, wrote them."""

    fragment: int
    cycles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteResults:
    """Apply results for different chunks; ended by `written`, as the next two.

    Attributes:
        again: chunks whose result is applied to the state before their last step, in place of what
            was applied there.
        until_s: what could not be begun by then is not to be done.
    """

    fragment: int
    results: tuple[ResultArrived, ...]
    again: frozenset[int]
    until_s: float


@dataclass(frozen=True, slots=True)
class WriteChunk:
    """Take over a chunk from another peer, if its values fit its stamp."""

    fragment: int
    fetched: ChunkFetched
    until_s: float


@dataclass(frozen=True, slots=True)
class UndoSteps:
    """Take these chunks back to the states before their last steps, which have these stamps."""

    fragment: int
    stamps: Mapping[int, Stamp]
    until_s: float


# --- to tell of -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SendEnded:
    """How a send ended.

    Attributes:
        contributors: peers in the results, at most; 0 when none came.
        missing: chunks without a result.
        moved: chunks whose result is without us, or that were healed.
        digest: of all chunks' states; the same for all who are where we are.
    """

    fragment: int
    cycle: int
    contributors: int
    missing: int
    moved: int
    digest: str
    seconds: float


WriteOrder = Verify | WriteResults | WriteChunk | UndoSteps
ForTrainer = Merge | Yield
"""`Yield` is ended by `trainer_held`."""
FragmentCommand = (
    SendMessage
    | Contribute
    | ForgetOthers
    | Ask
    | Audit
    | Convict
    | Average
    | WriteOrder
    | ForTrainer
    | SendEnded
)
