"""Chunks and results that a fragment lacks, and the peers that are asked for them.

*Which states are your chunks in?* is asked of a peer that ended a cycle with another digest than
ours: what it has better than we is then fetched, as the result that we lack if that can be applied
here (one byte a value), else as the chunk itself (eight). *Send me this chunk* is also asked when a
header shows at once that we differ. What comes goes to the fragment's machine; a question that
fails is not repeated: the next cycle's headers show what is still wrong.

Of two states with equal histories the next result decides (chunk_ledger.py, rule 1). When the run
is over there is none, and the lower digest wins.

No chunk is taken on the word of one peer. A peer that says, or shows, that it has a better state
makes a *request*; then all the others are asked which states they are in, and the chunk is fetched
from a peer in the state that wins (votes, below). Should it come in another state, because all have
stepped meanwhile, all are asked once more, and it is taken if they say the same by now. With one
other peer there is nobody to ask.

At most one question about a chunk, and one about the states of a peer's chunks, is under way.

    - --request--> all are asked --voted for--> fetched --as voted--> taken
                     ^                          |
                     +------ in another state, for the first time

Rules of votes
  1. Each peer, we too, has one vote for each chunk: the state that it is in.
  2. A state that more than half of all are in is taken, unless ours has more behind it: they may be
     on their way to where we are.
  3. Without such a majority, and when everybody has said where it is, the state that most are in is
     taken, but not one that a single peer is in while others are on their way (a step is not taken
     by all at once): only when all have settled the same cycle and differ. Among equals the one
     with more behind it is taken, then the lower digest.
  4. A state without a step has no vote once others must have some: it is that of a joiner that has
     values, and does not know of when.
  5. Of two peers each is the other's only company: what is ahead is taken.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.wire.fragment_messages import (
    ChunkStateReply,
    GetChunkState,
    GetResult,
    GetStamps,
    Result,
    Stamp,
    Stamps,
)

from .chunk_ledger import ChunkLedger, ResultVerdict, can_be
from .commands import Ask, ChunkFetched, Codes, FragmentAnswer, FragmentQuestion, ResultArrived
from .peers import BEGUN_FROM, Context


def state_to_take(
    ours: Stamp, said: Mapping[str, Stamp], num_others: int, *, settled: bool, begun: bool = False
) -> Stamp | None:
    """The state that a chunk should be brought to; None while it is ours, or cannot be told.

    Args:
        said: by the others that have said it.
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


def most_say(answers: Sequence[Stamps]) -> list[tuple[int, Stamp]]:
    """The states of one fragment's chunks that most peers name, with the cycles that they name.

    States that cannot be are nobody's. Among equals the one with more behind it counts.
    """
    votes = [Counter[Stamp]() for _ in answers[0].stamps]
    for answer in answers:
        for of_chunk, theirs, cycle in zip(votes, answer.stamps, answer.cycles, strict=True):
            of_chunk[theirs] += can_be(theirs, cycle)
    best = [_most(each) for each in votes]
    return [
        (cycle, theirs)
        for answer in answers
        for theirs, cycle in zip(answer.stamps, answer.cycles, strict=True)
        if theirs == best[theirs.chunk]
    ]


def _most(votes: Counter[Stamp]) -> Stamp:
    return max(votes, key=lambda stamp: (votes[stamp], *_place(stamp)))


def _place(stamp: Stamp) -> tuple[int, int, int]:
    return stamp.steps, stamp.weight, -int.from_bytes(stamp.digest, "big")


@dataclass(frozen=True, slots=True)
class _ChunkRequest:
    """A chunk that others may have better than we.

    Attributes:
        of: the peer that may; none in particular once a chunk came that is doubted.
        since_s: when it was begun to be fetched; None while all are asked.
        to_take: None where there is nobody to vote.
        doubted: a chunk that came in another state than was voted for.
    """

    of: str
    since_s: float | None = None
    to_take: Stamp | None = None
    doubted: ChunkFetched | None = None


class Healing:
    """The questions about one fragment."""

    def __init__(self, fragment: int, ledger: ChunkLedger, context: Context) -> None:
        self._fragment = fragment
        self._ledger = ledger
        self._context = context
        self._peers = context.peers
        self._group = context.plan.group
        self._requests: dict[int, _ChunkRequest] = {}
        self._asking: set[str] = set()
        self._said: dict[str, Mapping[int, Stamp]] = {}

    @property
    def is_fetching(self) -> bool:
        return any(request.since_s is not None for request in self._requests.values())

    # --- asking -----------------------------------------------------------------------------------
    def request(self, chunk: int, peer_id: str, doubted: ChunkFetched | None = None) -> None:
        """A peer may have a better state of a chunk: fetch it, once others say the same."""
        if chunk in self._requests or self._ledger.is_undone(chunk):
            return  # those who stepped have still to undo it
        others = self._peers.others
        if not others and not peer_id:  # all have gone: there is nobody to ask
            return
        if others <= {peer_id}:
            self._fetch(chunk, _ChunkRequest(peer_id), peer_id, None)
            return
        self._requests[chunk] = _ChunkRequest(peer_id, doubted=doubted)
        for other in sorted(others - self._asking):
            self._said.pop(other, None)
            self._ask_stamps(other)

    def _ask_stamps(self, peer_id: str) -> None:
        self._asking.add(peer_id)
        self._context.do(Ask(peer_id, GetStamps(self._group, self._fragment)))

    def _fetch(
        self, chunk: int, request: _ChunkRequest, peer_id: str, to_take: Stamp | None
    ) -> None:
        now_s = self._context.now_s
        self._requests[chunk] = _ChunkRequest(request.of, now_s, to_take, request.doubted)
        self._context.counts.diverged += 1
        self._context.do(Ask(peer_id, GetChunkState(self._group, self._fragment, chunk)))

    def _count_votes(self) -> list[ChunkFetched]:
        """Fetch what is requested and voted for; drop what can no longer be.

        Returns chunks that are here, and that most say the same of by now.
        """
        confirmed = []
        others, settled = self._peers.others, self._peers.all_settled(self._fragment)
        begun = self._peers.seen.round >= BEGUN_FROM
        for chunk, request in list(self._requests.items()):
            if request.since_s is not None:
                continue
            said = {
                peer_id: stamps[chunk]
                for peer_id, stamps in self._said.items()
                if peer_id in others and chunk in stamps
            }
            ours = self._ledger.stamp(chunk)
            to_take = state_to_take(ours, said, len(others), settled=settled, begun=begun)
            doubted = request.doubted
            if to_take is not None and doubted is not None and doubted.stamp == to_take:
                del self._requests[chunk]
                confirmed.append(doubted)
            elif to_take is not None:
                there = sorted(peer_id for peer_id, stamp in said.items() if stamp == to_take)
                source = request.of if request.of in there else there[0]
                self._fetch(chunk, request, source, to_take)
            elif not self._asking:
                del self._requests[chunk]
        return confirmed

    def compare(self, peer_id: str) -> None:
        """Ask a peer that ended the same cycle elsewhere."""
        ours = self._peers.settled(self._fragment, self._peers.own_id)
        theirs = self._peers.settled(self._fragment, peer_id)
        if ours is None or theirs is None or peer_id in self._asking:
            return
        if ours[0] == theirs[0] and ours[1] != theirs[1]:
            self._ask_stamps(peer_id)

    # --- answers ----------------------------------------------------------------------------------
    def answered(
        self, peer_id: str, question: FragmentQuestion, answer: FragmentAnswer | None, codes: Codes
    ) -> list[ChunkFetched]:
        """A peer answers, or (None) says nothing more. Returns the chunks that are to be taken."""
        confirmed: list[ChunkFetched] = []
        match question, answer:
            case _, Stamps():
                self._stamps_came(peer_id, answer)
                confirmed = self._count_votes()
            case GetStamps(), _:
                self._asking.discard(peer_id)
                confirmed = self._count_votes()
            case _, ChunkStateReply(cycle=cycle, stamp=stamp):
                confirmed = self._chunk_came(
                    ChunkFetched(self._fragment, cycle, stamp, codes[stamp.chunk])
                )
            case GetChunkState(chunk=chunk), _:  # the stamps of the next cycle show it again
                self._requests.pop(chunk, None)
        self._context.counts.healed += len(confirmed)
        return confirmed

    def _stamps_came(self, peer_id: str, answer: Stamps) -> None:
        """Ask on about every chunk that the peer may have better than we."""
        said = zip(answer.stamps, answer.cycles, strict=True)
        possible = [(theirs, cycle) for theirs, cycle in said if can_be(theirs, cycle)]
        self._said[peer_id] = {theirs.chunk: theirs for theirs, _ in possible}
        for theirs, cycle in possible:
            chunk, ours = theirs.chunk, self._ledger.stamp(theirs.chunk)
            if theirs == ours or ours.is_ahead_of(theirs):
                continue
            if theirs.steps <= ours.steps + 1:
                asked = GetResult(self._group, self._fragment, max(cycle, 0), chunk)
                self._context.do(Ask(peer_id, asked))
            else:  # one result does not lead there
                self.request(chunk, peer_id)

    def applicable(
        self, peer_id: str, asked: GetResult, result: Result, codes: Codes
    ) -> ResultArrived | None:
        """The result that was asked for, if it can be applied to the state that we have."""
        if (result.fragment, result.cycle) != (self._fragment, asked.cycle):
            return None
        of_chunk = result.chunk(asked.chunk)
        if of_chunk is None or asked.chunk not in codes:
            return None
        part = ResultArrived(result, of_chunk, codes[asked.chunk], peer_id, asked=True)
        verdict = self._ledger.judge(asked.chunk, result.cycle, of_chunk.base_stamp, part.rank)
        return part if verdict in (ResultVerdict.STEP, ResultVerdict.REDO) else None

    def no_result_helps(self, peer_id: str, chunk: int) -> None:
        theirs, ours = self._said.get(peer_id, {}).get(chunk), self._ledger.stamp(chunk)
        if theirs is None or ours.is_ahead_of(theirs):
            return
        of_lower_digest = self._peers.seen.is_over and theirs.digest < ours.digest
        if theirs.is_ahead_of(ours) or of_lower_digest:
            self.request(chunk, peer_id)

    def _chunk_came(self, came: ChunkFetched) -> list[ChunkFetched]:
        """Take a chunk; what is in another state than wanted is asked about again."""
        request = self._requests.pop(came.chunk)
        assert request.since_s is not None
        self._context.counts.healed_s += self._context.now_s - request.since_s
        if not can_be(came.stamp, came.cycle):
            return []
        if request.to_take in (None, came.stamp):
            return [came]
        if request.doubted is None:
            self.request(came.chunk, "", came)
        return []

    def forget_absent(self) -> None:
        present = self._peers.seen.present
        self._said = {peer_id: said for peer_id, said in self._said.items() if peer_id in present}
