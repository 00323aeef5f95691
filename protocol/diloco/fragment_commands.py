"""What comes out of the core of the fragment exchange; the rules are in fragment_core.py.

Commands to write, and to the trainer, are carried out one after another for each fragment, in
order. Those that an event ends name it.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from protocol.fragment.chunk_ledger import ResultRank, Stamp
from protocol.fragment.collection import Admitted
from protocol.outcomes import AuditOutcome, RefusalReason
from protocol.wire.audit_messages import Doubt, Proof
from protocol.wire.fragment_messages import (
    ChunkStamp,
    Contribution,
    FragmentSettled,
    NoResult,
    Result,
)

from .fragment_events import Sent

# --- to other peers -------------------------------------------------------------------------------
NO_CODES: Final = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Send:
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
    """Fetch the values of a chunk from a peer; ended by `Fetched` or `FetchFailed`."""

    fragment: int
    chunk: int
    peer_id: str


# --- arithmetic -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Average:
    """Average the admitted contributions of each chunk, and sign the result; ended by `Averaged`.

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


InOrder = (
    Verify | WriteResults | WriteChunk | UndoSteps | MergeIntoTrainer | HoldTrainer | AmendTrainer
)
"""Commands that are carried out one after another for each fragment."""
FragmentCommand = (
    Send
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
    | Returned
)


# --- from part to part of the core ----------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Settled:
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
class Withdraw:
    """Something that an owner has made is believed no more: undo it."""

    owner: str


Signal = Settled | PartOver | ContributionRefused | Withdraw
"""What parts of the core tell it; it leaves the core as commands."""
