"""What a fragment lacks, and which peers are asked for it.

Two questions. *Which states are your chunks in?* is asked of a peer that ended a cycle with another
digest than ours: what it has better than we is then fetched, as the result that we lack if that can
be applied here (one byte a value), else as the chunk itself (eight). *Send me this chunk* is also
asked when a header shows at once that we differ. What comes goes to the fragment's keeper; a
question that fails is not repeated: the next cycle's headers show what is still wrong.

Of two states with equal histories the next result decides (protocol/fragment/chunk_ledger.py, rule
1). When the run is over there is none, and the lower digest wins.

At most one question about a chunk, and one about the states of a peer's chunks, is under way.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from protocol.fragment.chunk_ledger import ChunkLedger, Stamp, Verdict

from .fragment_commands import AskResult, AskStamps, FetchChunk
from .fragment_events import Fetched, ResultAnswered, ResultArrived, StampsAnswered
from .peers import Peers


@dataclass(frozen=True, slots=True)
class HealingStatistics:
    """Counts since the start.

    Attributes:
        diverged: chunks found to differ from a better state of another peer.
        healed: those that were fetched.
        healed_s: what that took, all together.
    """

    diverged: int
    healed: int
    healed_s: float

    def __add__(self, other: "HealingStatistics") -> "HealingStatistics":
        return HealingStatistics(
            self.diverged + other.diverged,
            self.healed + other.healed,
            self.healed_s + other.healed_s,
        )


class Healing:
    """The questions about one fragment. See the top of the file."""

    def __init__(self, fragment: int, ledger: ChunkLedger, peers: Peers) -> None:
        self._fragment = fragment
        self._ledger = ledger
        self._peers = peers
        self._fetching_since_s: dict[int, float] = {}
        self._asking: set[str] = set()
        self._diverged = self._healed = 0
        self._healed_s = 0.0

    def __repr__(self) -> str:
        return f"<Healing of {sorted(self._fetching_since_s)}, asking {len(self._asking)}>"

    @property
    def is_fetching(self) -> bool:
        """Whether a chunk is being fetched."""
        return bool(self._fetching_since_s)

    def statistics(self) -> HealingStatistics:
        """Counts since the start."""
        return HealingStatistics(self._diverged, self._healed, self._healed_s)

    # --- asking -----------------------------------------------------------------------------------
    def fetch(self, now_s: float, chunk: int, peer_id: str) -> Iterator[FetchChunk]:
        """Fetch a chunk from a peer that has a better state of it."""
        if chunk not in self._fetching_since_s:
            self._fetching_since_s[chunk] = now_s
            self._diverged += 1
            yield FetchChunk(self._fragment, chunk, peer_id)

    def compare(self, peer_id: str) -> Iterator[AskStamps]:
        """Ask a peer that ended the same cycle as we, elsewhere."""
        ours = self._peers.settled(self._fragment, self._peers.own_id)
        theirs = self._peers.settled(self._fragment, peer_id)
        if ours is None or theirs is None or peer_id in self._asking:
            return
        if ours[0] == theirs[0] and ours[1] != theirs[1]:
            self._asking.add(peer_id)
            yield AskStamps(self._fragment, peer_id)

    # --- answers ----------------------------------------------------------------------------------
    def stamps_answered(self, answer: StampsAnswered) -> Iterator[AskResult]:
        """Ask on about every chunk that the peer may have better than we."""
        for theirs, cycle in answer.states:
            ours = self._ledger.stamp(theirs.chunk)
            if theirs.stamp != ours and not ours.is_ahead_of(theirs.stamp):
                yield AskResult(self._fragment, answer.peer_id, max(cycle, 0), theirs)

    def applicable(self, answer: ResultAnswered) -> ResultArrived | None:
        """The result that was asked for, if it can be applied to the state that we have."""
        chunk, result = answer.theirs.chunk, answer.result
        if result is None or (result.fragment, result.cycle) != (self._fragment, answer.cycle):
            return None
        of_chunk = result.chunk(chunk)
        if of_chunk is None or chunk not in answer.codes:
            return None
        outcome = result.outcome(of_chunk)
        verdict = self._ledger.judge(chunk, result.cycle, of_chunk.base_stamp, outcome)
        if verdict not in (Verdict.STEP, Verdict.REDO):
            return None
        return ResultArrived(result, of_chunk, answer.codes[chunk], answer.peer_id, asked=True)

    def no_result_helps(self, now_s: float, answer: ResultAnswered) -> Iterator[FetchChunk]:
        """Fetch the chunk itself, if theirs is better."""
        if self._is_better(answer.theirs.stamp, self._ledger.stamp(answer.theirs.chunk)):
            yield from self.fetch(now_s, answer.theirs.chunk, answer.peer_id)

    def questions_ended(self, peer_id: str) -> None:
        """Note that a peer has been asked."""
        self._asking.discard(peer_id)

    def fetched(self, now_s: float, fetched: Fetched) -> None:
        """Note that a chunk is here."""
        began_s = self._fetching_since_s.pop(fetched.chunk)
        self._healed += 1
        self._healed_s += now_s - began_s

    def fetch_failed(self, chunk: int) -> None:
        """Note that a chunk will not come; the stamps of the next cycle show it again."""
        self._fetching_since_s.pop(chunk, None)

    def _is_better(self, theirs: Stamp, ours: Stamp) -> bool:
        """Whether a state that another peer has is to take the place of ours."""
        if theirs.is_ahead_of(ours) or ours.is_ahead_of(theirs):
            return theirs.is_ahead_of(ours)
        return self._peers.is_over and theirs.digest < ours.digest
