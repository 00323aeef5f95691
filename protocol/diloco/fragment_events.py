"""What goes into the core of the fragment exchange; the rules are in fragment_core.py.

Codes and values are views of memory that the core holds, hands on, and never reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from protocol.fragment.chunk_ledger import Stamp
from protocol.outcomes import AuditOutcome
from protocol.wire.audit_messages import Doubt, Proof
from protocol.wire.fragment_messages import (
    ChunkResult,
    ChunkStamp,
    Contribution,
    FragmentSettled,
    NoResult,
    Result,
)

Parts = Mapping[int, memoryview]
"""Codes by chunk."""
Told = Contribution | Result | NoResult | FragmentSettled | Doubt
"""What peers send without being asked, about one fragment."""


class Held(Enum):
    """What became of the wish to write a fragment that is not in flight."""

    YIELDED = "yielded"
    """The trainer does not read it until it is told what has changed."""
    VOID = "void"
    """It has just sent it: the send has come, or comes soon."""
    FREE = "free"
    """There is no trainer that could read it."""


# --- the swarm ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PeersSeen:
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
class Received:
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
    held: Held


# --- what was worked out --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Averages:
    """A result, signed, with the codes of all its chunks, in order and by chunk."""

    result: Result
    codes: memoryview
    parts: Parts


@dataclass(frozen=True, slots=True)
class Averaged:
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
class Fetched:
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
class Tick:
    """Time has passed."""


FragmentEvent = (
    PeersSeen
    | Received
    | Sent
    | TrainerHeld
    | Averaged
    | Verified
    | Written
    | Audited
    | Proved
    | StampsAnswered
    | ResultAnswered
    | QuestionsEnded
    | Fetched
    | FetchFailed
    | StampsAdopted
    | Began
    | Tick
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
class Passed:
    """A peer is through with this cycle: what it owned has come, or never will."""

    peer_id: str
    cycle: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """What this owner has made is believed no more: what can be undone of it is."""

    owner: str


Item = Sent | ResultArrived | Fetched | Passed | Withdrawn
