"""Events and commands: what goes into the core of the fragment exchange, and what comes out.

The rules are in fragment_core.py. Codes and values are views of memory that the core holds, hands
on, and never reads.

Commands to write, and to the trainer, are carried out one after another for each fragment, in
order. Those that an event ends name it.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from protocol.fragment.chunk_ledger import ResultRank, Stamp
from protocol.fragment.collection import Admitted
from protocol.outcomes import AuditOutcome, RefusalReason
from protocol.wire.fragment_messages import (
    ChunkResult,
    ChunkStamp,
    Contribution,
    Doubt,
    FragmentSettled,
    NoResult,
    Proof,
    Result,
)

Parts = Mapping[int, memoryview]
"""Codes by chunk."""
Told = Contribution | Result | NoResult | FragmentSettled | Doubt
"""What peers send without being asked, about one fragment."""


class HoldOutcome(Enum):
    """What became of the wish to write a fragment that is not in flight."""

    YIELDED = "yielded"
    """The trainer does not read it until it is told what has changed."""
    VOID = "void"
    """It has just sent it: the send has come, or comes soon."""
    FREE = "free"
    """There is no trainer that could read it."""


# --- events: the swarm ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class GroupSeen:
    """How the group looks now.

    Attributes:
        round: the one that we are in.
        present: peers that hold an outer copy, ourselves among them: those that train, and those
            that have finished.
        rounds: of the others that train.
        is_over: whether the run has ended here.
        known: peers that hold an outer copy or did so of late, those that are present or not.
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
class MessageReceived:
    """A message, checked, with the codes that it carries; or a contribution of our own."""

    peer_id: str
    message: Told
    codes: Parts


@dataclass(frozen=True, slots=True)
class Proved:
    """Another peer has sent a proof that an owner has lied; it is one."""

    message: Proof
    proof: bytes


# --- the trainer ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sent:
    """The trainer has sent a fragment: its codes, chunk after chunk."""

    fragment: int
    cycle: int
    codes: memoryview
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TrainerHeld:
    """The answer to `HoldTrainer`."""

    fragment: int
    held: HoldOutcome


# --- what was worked out --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Averages:
    """A result, signed, with the codes of all its chunks, in order and by chunk."""

    result: Result
    codes: memoryview
    parts: Parts


@dataclass(frozen=True, slots=True)
class AveragesMade:
    """The end of `Average`; nothing came of it if the values have no average that codes take."""

    fragment: int
    cycle: int
    averages: Averages | None


@dataclass(frozen=True, slots=True)
class Verified:
    """The end of `Verify`: chunks whose memory was spoilt, with the stamp that they have now."""

    fragment: int
    spoilt: Mapping[int, Stamp]


@dataclass(frozen=True, slots=True)
class Written:
    """The end of `WriteResults` or `WriteChunk`.

    Attributes:
        stamps: of what was written; empty when the time was up before, or the values do not fit.
    """

    fragment: int
    stamps: Mapping[int, Stamp]


@dataclass(frozen=True, slots=True)
class Audited:
    """The end of `Audit`; the proof is that of a lie."""

    result: Result
    outcome: AuditOutcome
    proof: bytes = b""


# --- answers of other peers -----------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class StampsAnswered:
    """What another peer says of each chunk: its stamp, and the cycle of its last step."""

    fragment: int
    peer_id: str
    states: tuple[tuple[ChunkStamp, int], ...]


@dataclass(frozen=True, slots=True)
class ResultAnswered:
    """The answer to `AskResult`; no result when the peer has refused."""

    fragment: int
    peer_id: str
    cycle: int
    theirs: ChunkStamp
    result: Result | None
    codes: Parts


@dataclass(frozen=True, slots=True)
class QuestionsEnded:
    """All that this peer was asked about this fragment is answered, or will never be."""

    fragment: int
    peer_id: str


@dataclass(frozen=True, slots=True)
class ChunkFetched:
    """A chunk as another peer has it: the answer to `FetchChunk`."""

    fragment: int
    chunk: int
    cycle: int
    stamp: Stamp
    values: memoryview


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """There is no answer to `FetchChunk`, and none will come."""

    fragment: int
    chunk: int


# --- joining --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class StampsAdopted:
    """A joiner's values have these stamps: each with the cycle of its chunk's last step."""

    fragment: int
    stamps: Mapping[int, tuple[int, Stamp]]


@dataclass(frozen=True, slots=True)
class Began:
    """We begin; of each fragment, the last cycle that went without us, -1 for none."""

    last_sent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FragmentTick:
    """Time has passed."""


FragmentEvent = (
    GroupSeen
    | MessageReceived
    | Sent
    | TrainerHeld
    | AveragesMade
    | Verified
    | Written
    | Audited
    | Proved
    | StampsAnswered
    | ResultAnswered
    | QuestionsEnded
    | ChunkFetched
    | FetchFailed
    | StampsAdopted
    | Began
    | FragmentTick
)


# --- what a keeper takes --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ResultArrived:
    """A result for one chunk.

    Attributes:
        sender: the peer that it came from, not always its owner.
        asked: it is an answer to a question of ours; else it came by itself.
    """

    result: Result
    chunk: ChunkResult
    codes: memoryview
    sender: str
    asked: bool = False


def arrived_parts(result: Result, codes: Parts, sender: str) -> list[ResultArrived]:
    """The parts of a result, by chunk."""
    of_chunks = ((result.chunk(chunk), part) for chunk, part in codes.items())
    return [
        ResultArrived(result, of_chunk, part, sender)
        for of_chunk, part in of_chunks
        if of_chunk is not None
    ]


@dataclass(frozen=True, slots=True)
class CyclePassed:
    """A peer is through with this cycle: what it owned has come, or never will."""

    peer_id: str
    cycle: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """What this owner has made is believed no more: what can be undone of it is."""

    owner: str


Item = Sent | ResultArrived | ChunkFetched | CyclePassed | Withdrawn


# --- commands: to other peers ---------------------------------------------------------------------
NO_CODES: Final = memoryview(b"")


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send this to a peer, some time soon, behind what it was sent before."""

    peer_id: str
    message: Result | NoResult | FragmentSettled | Doubt | Proof
    codes: memoryview = NO_CODES


@dataclass(frozen=True, slots=True)
class Contribute:
    """Send an owner, perhaps ourselves, the codes of its chunks: those that the stamps name.

    Attributes:
        weight: 0 says that nothing will come.
    """

    owner: str
    sent: Sent
    weight: int
    stamps: tuple[ChunkStamp, ...]


@dataclass(frozen=True, slots=True)
class ForgetOthers:
    """Only these peers are there still: let go what waits for any other."""

    present: AbstractSet[str]


@dataclass(frozen=True, slots=True)
class CountRefusal:
    """A contribution of another peer was not taken."""

    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class Audit:
    """Have the owner of a result open a leaf of a chunk, and work it out; ended by `Audited`.

    Attributes:
        draw: chooses the leaf: its remainder by their number.
        codes: the chunk's, as the result has them.
    """

    result: Result
    chunk: int
    draw: int
    codes: memoryview


@dataclass(frozen=True, slots=True)
class CountAudit:
    """An audit has ended."""

    outcome: AuditOutcome


@dataclass(frozen=True, slots=True)
class Convict:
    """An owner was proved to have lied: have nothing to do with it any more, and keep the proof."""

    owner: str
    proof: bytes


@dataclass(frozen=True, slots=True)
class AskStamps:
    """Ask a peer which states its chunks are in.

    The answer is `StampsAnswered`; `AskResult` follows at once; `QuestionsEnded` ends all.
    """

    fragment: int
    peer_id: str


@dataclass(frozen=True, slots=True)
class AskResult:
    """Ask the same peer, after its stamps, for the result that led it to this one.

    The answer is `ResultAnswered`.
    """

    fragment: int
    peer_id: str
    cycle: int
    theirs: ChunkStamp


@dataclass(frozen=True, slots=True)
class FetchChunk:
    """Fetch the values of a chunk from a peer; ended by `ChunkFetched` or `FetchFailed`."""

    fragment: int
    chunk: int
    peer_id: str


# --- arithmetic -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Average:
    """Average the admitted contributions of each chunk, sign the result; ended by `AveragesMade`.

    Attributes:
        codes: of each chunk, by contributor.
        contributions: what came with them, by contributor.
    """

    fragment: int
    cycle: int
    admitted: Mapping[int, Admitted]
    codes: Mapping[int, Mapping[str, memoryview]]
    contributions: Mapping[str, Contribution]


@dataclass(frozen=True, slots=True)
class Verify:
    """See which chunks are no longer what was written; ended by `Verified`.

    Attributes:
        cycles: of each chunk's last step.
    """

    fragment: int
    cycles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ResultToWrite:
    """A result, and the state that it is applied to.

    Attributes:
        again: apply it to the state before the last step, in place of what was applied there.
    """

    chunk: int
    cycle: int
    base: Stamp
    outcome: ResultRank
    codes: memoryview
    again: bool


@dataclass(frozen=True, slots=True)
class WriteResults:
    """Apply results for different chunks; ended by `Written`.

    Attributes:
        until_s: what could not be begun by then is not to be done.
    """

    fragment: int
    results: tuple[ResultToWrite, ...]
    until_s: float


@dataclass(frozen=True, slots=True)
class WriteChunk:
    """Take over a chunk from another peer, if its values fit its stamp; ended by `Written`."""

    fragment: int
    chunk: int
    cycle: int
    stamp: Stamp
    values: memoryview
    until_s: float


@dataclass(frozen=True, slots=True)
class UndoSteps:
    """Take these chunks back to the states before their last steps; ended by `Written`.

    Attributes:
        stamps: of those states, by chunk.
    """

    fragment: int
    stamps: Mapping[int, Stamp]
    until_s: float


# --- to the trainer -------------------------------------------------------------------------------
@dataclass(slots=True)
class Changes:
    """Chunks that changed, by what the trainer has to do about them."""

    stepped: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    redone: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class MergeIntoTrainer:
    """The send is over; this has changed."""

    fragment: int
    cycle: int
    changes: Changes


@dataclass(frozen=True, slots=True)
class HoldTrainer:
    """Make it read nothing of the fragment until `AmendTrainer`; ended by `TrainerHeld`."""

    fragment: int


@dataclass(frozen=True, slots=True)
class AmendTrainer:
    """This has changed; go on."""

    fragment: int
    changes: Changes


# --- to tell of -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SendEnded:
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


InOrder = (
    Verify | WriteResults | WriteChunk | UndoSteps | MergeIntoTrainer | HoldTrainer | AmendTrainer
)
"""Commands that are carried out one after another for each fragment."""
FragmentCommand = (
    SendMessage
    | Contribute
    | ForgetOthers
    | CountRefusal
    | CountAudit
    | Convict
    | Audit
    | AskStamps
    | AskResult
    | FetchChunk
    | Average
    | InOrder
    | SendEnded
)


# --- from part to part of the core ----------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class CycleSettled:
    """A keeper is through with a cycle; the digest is of all its chunks' states."""

    fragment: int
    cycle: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PartOver:
    """The owner will make nothing more for this cycle."""

    fragment: int
    cycle: int


@dataclass(frozen=True, slots=True)
class ContributionRefused:
    """The owner has not taken a contribution."""

    peer_id: str
    contribution: Contribution
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class WithdrawOwner:
    """Something that an owner has made is believed no more: undo it."""

    owner: str


Signal = CycleSettled | PartOver | ContributionRefused | WithdrawOwner
"""What parts of the core tell it; it leaves the core as commands."""
