"""What the peers of a group say of a chunk's state, and which state that makes the one to take.

Idea. A state is taken over from another peer only when others say the same of it: of many states
the one that most peers are in. What only one peer says moves nothing while others say otherwise.

Rules
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
from dataclasses import replace

from protocol.fragment.chunk_ledger import Stamp

from .beliefs import can_be
from .fragment_events import StampsAnswered


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
