"""What a fragment lacks, and which peers are asked for it.

Two questions. *Which states are your chunks in?* is asked of a peer that ended a cycle with another
digest than ours: what it has better than we is then fetched, as the result that we lack if that can
be applied here (one byte a value), else as the chunk itself (eight). *Send me this chunk* is also
asked when a header shows at once that we differ. What comes goes to the fragment's keeper; a
question that fails is not repeated: the next cycle's headers show what is still wrong.

Of two states with equal histories the next result decides (protocol/fragment/chunk_ledger.py, rule
1). When the run is over there is none, and the lower digest wins.

No chunk is taken on the word of one peer. A peer that says, or shows, that it has a better state
makes a *wish*; then all the others are asked which states they are in, and the chunk is fetched if
that makes it the one to take (votes, below), from a peer that is in it. Should what comes be in
another state than that, for all have stepped meanwhile, then all are asked once more, and it is
taken if they say the same by now. With one other peer there is nobody to ask.

At most one question about a chunk, and one about the states of a peer's chunks, is under way.

Votes: what the peers of a group say of a chunk's state, and which state that makes the one to take.
A state is taken over from another peer only when others say the same of it: of many states the one
that most peers are in. What only one peer says moves nothing while others say otherwise.

Rules of votes
  1. Each peer has one vote for each chunk, ourselves too: the state that it is in.
  2. A state that more than half of all are in is taken, unless ours has more behind it: they may be
     on their way to where we are.
  3. Without such a majority, and when everybody has said where it is, the state that most are in is
     taken, but not one that a single peer is in while others are on their way (a step is not taken
     by all at once): only when all have settled the same cycle and differ. Of as many the one with
     more behind it is taken, then the lower digest.
  4. A state without a step says nothing once others must have some: it is that of a joiner that has
     values, and does not know of when. It has no vote.
  5. Of two peers each is the other's only company: what is ahead is taken.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from protocol.fragment.chunk_ledger import ChunkLedger, ResultVerdict, Stamp

from .beliefs import can_be
from .fragment_events import (
    AskResult,
    AskStamps,
    ChunkFetched,
    FetchChunk,
    ResultAnswered,
    ResultArrived,
    StampsAnswered,
)
from .peers import BEGUN_FROM, Peers


# --- votes ----------------------------------------------------------------------------------------
def state_to_take(
    ours: Stamp,
    said: Mapping[str, Stamp],
    num_others: int,
    *,
    settled: bool,
    begun: bool = False,
) -> Stamp | None:
    """The state that a chunk should be brought to; None while it is ours, or cannot be told.

    Args:
        said: by the others that have said it.
        num_others: how many others there are.
        settled: whether all have settled the same cycle.
        begun: whether all must have some steps by now.
    """
    cast = [stamp for stamp in (ours, *said.values()) if stamp.steps or not begun]
    votes = Counter(cast)
    if not votes:
        return None
    best = _most(votes)
    if best == ours or ours.is_ahead_of(best):
        return None
    if 2 * votes[best] > len(cast) + num_others - len(said):
        return best
    everybody = len(said) >= num_others
    return best if everybody and (votes[best] > 1 or settled or num_others == 1) else None


def most_say(answers: Sequence[StampsAnswered]) -> Iterator[StampsAnswered]:
    """The answers of several peers about one fragment, each with those states alone that most name.

    States that cannot be are nobody's. Of as many the one with more behind it counts.
    """
    votes = [Counter[Stamp]() for _ in answers[0].states]
    for answer in answers:
        votes_of = zip(votes, answer.states, strict=True)
        for of_chunk, (theirs, cycle) in votes_of:
            of_chunk[theirs.stamp] += can_be(theirs.stamp, cycle)
    best = [_most(each) for each in votes]
    for answer in answers:
        states = tuple(state for state in answer.states if state[0].stamp == best[state[0].chunk])
        yield replace(answer, states=states)


def _most(votes: Counter[Stamp]) -> Stamp:
    return max(votes, key=lambda stamp: (votes[stamp], *_place(stamp)))


def _place(stamp: Stamp) -> tuple[int, int, int]:
    return stamp.steps, stamp.weight, -int.from_bytes(stamp.digest, "big")


# --- what a fragment lacks ------------------------------------------------------------------------
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
        self._wished: dict[int, str] = {}
        self._to_take: dict[int, Stamp | None] = {}
        self._doubted: dict[int, ChunkFetched] = {}
        self._confirmed: list[ChunkFetched] = []
        self._asking: set[str] = set()
        self._said: dict[str, Mapping[int, Stamp]] = {}
        self._diverged = self._healed = 0
        self._healed_s = 0.0

    @property
    def is_fetching(self) -> bool:
        """Whether a chunk is being fetched."""
        return bool(self._fetching_since_s)

    def statistics(self) -> HealingStatistics:
        """Counts since the start."""
        return HealingStatistics(self._diverged, self._healed, self._healed_s)

    # --- asking -----------------------------------------------------------------------------------
    def wish(self, now_s: float, chunk: int, peer_id: str) -> Iterator[FetchChunk | AskStamps]:
        """A peer may have a better state of a chunk: fetch it, once others say the same."""
        taken = chunk in self._fetching_since_s or chunk in self._wished
        if taken or self._ledger.is_undone(chunk):  # those who stepped have still to undo it
            return
        others = self._peers.others
        if not others and not peer_id:  # all have gone: there is nobody to ask
            self._doubted.pop(chunk, None)
            return
        if others <= {peer_id}:
            yield from self._fetch(now_s, chunk, peer_id, None)
            return
        self._wished[chunk] = peer_id
        for other in sorted(others - self._asking):
            self._asking.add(other)
            self._said.pop(other, None)
            yield AskStamps(self._fragment, other)

    def _fetch(
        self, now_s: float, chunk: int, peer_id: str, to_take: Stamp | None
    ) -> Iterator[FetchChunk]:
        self._fetching_since_s[chunk], self._to_take[chunk] = now_s, to_take
        self._diverged += 1
        yield FetchChunk(self._fragment, chunk, peer_id)

    def _count_votes(self, now_s: float) -> Iterator[FetchChunk]:
        """Fetch what is wished for and voted for; let go what cannot be any more."""
        others, settled = self._peers.others, self._peers.all_settled(self._fragment)
        begun = self._peers.own_round >= BEGUN_FROM
        for chunk, wished_of in list(self._wished.items()):
            said = {
                peer_id: stamps[chunk]
                for peer_id, stamps in self._said.items()
                if peer_id in others and chunk in stamps
            }
            ours = self._ledger.stamp(chunk)
            to_take = state_to_take(ours, said, len(others), settled=settled, begun=begun)
            doubted = self._doubted.get(chunk)
            if to_take is not None and doubted is not None and doubted.stamp == to_take:
                del self._wished[chunk]
                self._confirmed.append(self._doubted.pop(chunk))
            elif to_take is not None:
                del self._wished[chunk]
                there = sorted(peer_id for peer_id, stamp in said.items() if stamp == to_take)
                source = wished_of if wished_of in there else there[0]
                yield from self._fetch(now_s, chunk, source, to_take)
            elif not self._asking:
                del self._wished[chunk]
                self._doubted.pop(chunk, None)

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
    def stamps_answered(
        self, now_s: float, answer: StampsAnswered
    ) -> Iterator[AskResult | AskStamps | FetchChunk]:
        """Ask on about every chunk that the peer may have better than we."""
        possible = [each for each in answer.states if can_be(each[0].stamp, each[1])]
        self._said[answer.peer_id] = {theirs.chunk: theirs.stamp for theirs, _ in possible}
        for theirs, cycle in possible:
            ours = self._ledger.stamp(theirs.chunk)
            if theirs.stamp == ours or ours.is_ahead_of(theirs.stamp):
                continue
            if theirs.steps <= ours.steps + 1:
                yield AskResult(self._fragment, answer.peer_id, max(cycle, 0), theirs)
            else:  # one result does not lead there
                yield from self.wish(now_s, theirs.chunk, answer.peer_id)
        yield from self._count_votes(now_s)

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
        if verdict not in (ResultVerdict.STEP, ResultVerdict.REDO):
            return None
        return ResultArrived(result, of_chunk, answer.codes[chunk], answer.peer_id, asked=True)

    def no_result_helps(
        self, now_s: float, answer: ResultAnswered
    ) -> Iterator[FetchChunk | AskStamps]:
        """Wish for the chunk itself, if theirs is better."""
        if self._is_better(answer.theirs.stamp, self._ledger.stamp(answer.theirs.chunk)):
            yield from self.wish(now_s, answer.theirs.chunk, answer.peer_id)

    def questions_ended(self, now_s: float, peer_id: str) -> Iterator[FetchChunk]:
        """Note that a peer has been asked."""
        self._asking.discard(peer_id)
        yield from self._count_votes(now_s)

    def fetched(self, now_s: float, fetched: ChunkFetched) -> Iterator[FetchChunk | AskStamps]:
        """Note that a chunk is here; what is in another state than wanted is asked about again."""
        chunk = fetched.chunk
        self._healed_s += now_s - self._fetching_since_s.pop(chunk)
        to_take, was_doubted = self._to_take.pop(chunk), self._doubted.pop(chunk, None) is not None
        if not can_be(fetched.stamp, fetched.cycle):
            return
        if to_take in (None, fetched.stamp):
            self._confirmed.append(fetched)
        elif not was_doubted:
            self._doubted[chunk] = fetched
            yield from self.wish(now_s, chunk, "")

    def confirmed(self) -> tuple[ChunkFetched, ...]:
        """Let go the chunks that are to be taken."""
        confirmed, self._confirmed = tuple(self._confirmed), []
        self._healed += len(confirmed)
        return confirmed

    def fetch_failed(self, chunk: int) -> None:
        """Note that a chunk will not come; the stamps of the next cycle show it again."""
        self._fetching_since_s.pop(chunk, None)
        self._to_take.pop(chunk, None)
        self._doubted.pop(chunk, None)

    def forget_absent(self) -> None:
        """Forget what peers said that are not there."""
        present = self._peers.present
        self._said = {peer_id: said for peer_id, said in self._said.items() if peer_id in present}

    def _is_better(self, theirs: Stamp, ours: Stamp) -> bool:
        """Whether a state that another peer has is to take the place of ours."""
        if theirs.is_ahead_of(ours) or ours.is_ahead_of(theirs):
            return theirs.is_ahead_of(ours)
        return self._peers.is_over and theirs.digest < ours.digest
