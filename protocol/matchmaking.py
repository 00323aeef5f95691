"""Finding a partner for a round, with nobody to ask.

The idea. Every pair {i, j} has a rank in every round: a hash of (group, round, {i, j}), the same
whoever computes it and new in each round. Each peer asks the others in the order of that rank, as
far as it knows them; a peer that is asked says yes if it is free in that round. If all views were
equal and all peers ready at once, this would be the greedy matching of a random order of all pairs:
partners are uniformly random, and nearly everybody gets one. With views that differ it is still a
matching, because a pair exists only when both have agreed.

The rules
  1. One round at a time is *matched* (the last closed one), while the next may be in training
     already.
  2. A proposal for the round in training is held. When half of our quota is done, we close the
     round early for its sake.
  3. While our own proposal is pending, proposals of others are held; when ours is refused, the best
     one held is taken. A proposal that ranks better than our pending one is taken at once. So of
     peers that wait for each other in a circle, the pair that ranks best is made.
  4. If two peers propose to each other, the proposal of the lower peer id stands, and the other is
     withdrawn.
  5. At most MAX_PROPOSAL_TRIES proposals; then, until the deadline, we only wait to be asked, and
     that only if somebody may still come: one who was behind, silent, or not asked. When all are
     paired or past this round, waiting would only make us late for the next.
  6. A yes may cross a withdrawal. Who said yes to somebody that does not wait any more looks on.
  7. A proposal for a round that is past is refused as `ahead`, for one not reached as `behind`,
     when paired as `busy`.

Invariants: at most one `Paired` per round that is not taken back by rule 6; every proposal received
is answered, withdrawn or held (at most MAX_HELD_PROPOSALS); every round ends in exactly one
`Paired` or `Unmatched`.

Pure: time comes in with each event, `next_deadline_s` says when the next `Tick` is due.
Source: design 5; the paper's permutation (NoLoCo, section 3) is the case of equal views.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import blake3

from .limits import MAX_HELD_PROPOSALS, MAX_PROPOSAL_TRIES
from .matchmaking_events import (
    AcceptProposal,
    CloseEarly,
    Command,
    Event,
    Paired,
    ProposalAccepted,
    ProposalReceived,
    ProposalRefused,
    ProposalWithdrawn,
    Propose,
    RefuseProposal,
    RoundClosed,
    RoundOpened,
    RoundProgressed,
    RoundSettled,
    SearchStopped,
    Tick,
    Unmatched,
    Withdraw,
)
from .outcomes import RefusalReason, SkipReason

EARLY_CLOSE_FRACTION: Final = 0.5
"""Share of the quota after which a round may be closed for a waiting partner's sake."""


_MAY_COME: Final = frozenset({RefusalReason.BEHIND, RefusalReason.TOO_MANY})
"""Refusals after which a peer may still ask us in the same round."""


class Phase(Enum):
    """Where the matched round stands."""

    IDLE = auto()
    """Nothing closed yet, or the last round is settled."""
    ASKING = auto()
    """Our proposal is pending."""
    OPEN = auto()
    """Nobody left to ask: waiting to be asked."""
    PAIRED = auto()
    """Partner found; the exchange runs."""


def pair_rank(group: str, round_: int, one: str, other: str) -> bytes:
    """Rank of a pair in a round: lower comes first; the same for both (16 bytes)."""
    low, high = sorted((one, other))
    return blake3.blake3(f"{group}/{round_}/{low}/{high}".encode()).digest(length=16)


@dataclass(frozen=True, slots=True)
class MatchmakerStatistics:
    """Counts since the start."""

    paired: int
    unmatched: int
    proposals_sent: int
    proposals_received: int


@dataclass(slots=True)
class _Search:
    """The matched round."""

    round: int = -1
    phase: Phase = Phase.IDLE
    queue: list[str] = field(default_factory=list)
    """Peers still to ask, best last."""
    pending: str | None = None
    taken: str | None = None
    """Whom we said yes to."""
    tries: int = 0
    saw_silence: bool = False
    may_come: bool = False
    """Somebody who did not take us may ask us before the deadline."""
    deadline_s: float = 0.0
    patience_s: float = 0.0
    patience_until_s: float = 0.0


class Matchmaker:
    """One peer's search for partners, round after round. See the top of the file."""

    def __init__(self, group: str, own_id: str) -> None:
        self._group = group
        self._own_id = own_id
        self._training_round = -1
        self._fraction = 0.0
        self._closing_early = False
        self._search = _Search()
        self._held: dict[tuple[str, int], None] = {}
        self._paired = self._unmatched = self._sent = self._received = 0

    def __repr__(self) -> str:
        search = self._search
        return (
            f"<Matchmaker training={self._training_round} matching={search.round}"
            f" {search.phase.name} tries={search.tries} held={len(self._held)}>"
        )

    @property
    def phase(self) -> Phase:
        """Where the matched round stands."""
        return self._search.phase

    @property
    def next_deadline_s(self) -> float | None:
        """When a `Tick` is due, in the time of `step`; None while nothing waits."""
        search = self._search
        if search.phase is Phase.ASKING:
            return min(search.deadline_s, search.patience_until_s)
        if search.phase is Phase.OPEN:
            return search.deadline_s
        return None

    def statistics(self) -> MatchmakerStatistics:
        """Counts since the start."""
        return MatchmakerStatistics(self._paired, self._unmatched, self._sent, self._received)

    def step(self, now_s: float, event: Event) -> tuple[Command, ...]:
        """Take one event; say what to do. Events that no longer matter are ignored."""
        handle = _HANDLERS[type(event)]
        return tuple(handle(self, now_s, event))

    # --- rounds -----------------------------------------------------------------------------------
    def _opened(self, _now_s: float, event: RoundOpened) -> Iterable[Command]:
        self._training_round = event.round
        self._fraction = 0.0
        self._closing_early = False
        yield from self._refuse_outdated()
        yield from self._maybe_close_early()

    def _progressed(self, _now_s: float, event: RoundProgressed) -> Iterable[Command]:
        self._fraction = event.fraction
        yield from self._maybe_close_early()

    def _closed(self, now_s: float, event: RoundClosed) -> Iterable[Command]:
        ranked = sorted(
            (peer for peer in event.candidates if peer != self._own_id),
            key=lambda peer: self._rank(event.round, peer),
            reverse=True,
        )
        self._search = _Search(
            round=event.round,
            phase=Phase.OPEN,
            queue=ranked,
            deadline_s=event.deadline_s,
            patience_s=event.patience_s,
        )
        yield from self._refuse_outdated()
        yield from self._seek(now_s)

    def _settled(self, _now_s: float, event: RoundSettled) -> Iterable[Command]:
        if event.round == self._search.round:
            self._search.phase = Phase.IDLE
        yield from self._refuse_outdated()
        yield from self._maybe_close_early()

    def _stopped(self, _now_s: float, event: SearchStopped) -> Iterable[Command]:
        if event.round == self._search.round and self._search.phase in (Phase.ASKING, Phase.OPEN):
            yield from self._give_up(event.reason)

    def _maybe_close_early(self) -> Iterable[Command]:
        """Rule 2."""
        waiting = any(round_ == self._training_round for _, round_ in self._held)
        matching_over = self._search.phase is Phase.IDLE
        if (
            waiting
            and matching_over
            and not self._closing_early
            and self._fraction >= EARLY_CLOSE_FRACTION
        ):
            self._closing_early = True
            yield CloseEarly(self._training_round)

    # --- being asked ------------------------------------------------------------------------------
    def _asked(self, now_s: float, event: ProposalReceived) -> Iterable[Command]:
        self._received += 1
        refusal = self._reason_to_refuse(event.round)
        if refusal is not None:
            yield RefuseProposal(event.peer_id, event.round, refusal)
            return
        if len(self._held) >= MAX_HELD_PROPOSALS:
            yield RefuseProposal(event.peer_id, event.round, RefusalReason.BUSY)
            return
        self._held[event.peer_id, event.round] = None
        if event.round != self._search.round:
            yield from self._maybe_close_early()
        elif self._search.phase is Phase.OPEN or self._is_preferred(event.peer_id):
            yield from self._seek(now_s)

    def _is_preferred(self, peer_id: str) -> bool:
        """Whether their proposal goes before our pending one (rules 3 and 4)."""
        search = self._search
        assert search.pending is not None
        if search.pending == peer_id:
            return peer_id < self._own_id
        return self._rank(search.round, peer_id) < self._rank(search.round, search.pending)

    def _reason_to_refuse(self, round_: int) -> RefusalReason | None:
        """Rule 7; None for a round that is being matched or trained."""
        search = self._search
        if round_ == search.round and search.phase in (Phase.ASKING, Phase.OPEN):
            return None
        if round_ == self._training_round and round_ != search.round:
            return None
        if round_ == search.round and search.phase is Phase.PAIRED:
            return RefusalReason.BUSY
        return RefusalReason.AHEAD if round_ <= search.round else RefusalReason.BEHIND

    def _refuse_outdated(self) -> Iterable[Command]:
        for peer_id, round_ in list(self._held):
            reason = self._reason_to_refuse(round_)
            if reason is not None:
                del self._held[peer_id, round_]
                yield RefuseProposal(peer_id, round_, reason)

    def _withdrawn(self, now_s: float, event: ProposalWithdrawn) -> Iterable[Command]:
        self._held.pop((event.peer_id, event.round), None)
        search = self._search
        if search.phase is Phase.PAIRED and (search.taken, search.round) == (
            event.peer_id,
            event.round,
        ):
            self._paired -= 1
            search.taken, search.phase = None, Phase.OPEN
            yield from self._seek(now_s)

    # --- asking -----------------------------------------------------------------------------------
    def _seek(self, now_s: float) -> Iterable[Command]:
        """Take the best proposal held for this round, else ask the next peer, else wait."""
        search = self._search
        held = [peer for peer, round_ in self._held if round_ == search.round]
        if held:
            yield from self._take(min(held, key=lambda peer: self._rank(search.round, peer)))
        elif search.queue and search.tries < MAX_PROPOSAL_TRIES:
            search.pending = search.queue.pop()
            search.tries += 1
            search.phase = Phase.ASKING
            search.patience_until_s = now_s + search.patience_s
            self._sent += 1
            yield Propose(search.pending, search.round)
        else:
            search.phase = Phase.OPEN
            search.pending = None
            if not (search.may_come or search.queue):
                yield from self._give_up(SkipReason.NO_PARTNER)

    def _take(self, peer_id: str) -> Iterable[Command]:
        search = self._search
        if search.pending is not None:
            yield Withdraw(search.pending, search.round)
        del self._held[peer_id, search.round]
        search.taken = peer_id
        yield AcceptProposal(peer_id, search.round)
        yield from self._pair(peer_id, leading=False)

    def _pair(self, peer_id: str, *, leading: bool) -> Iterable[Command]:
        self._search.phase = Phase.PAIRED
        self._search.pending = None
        self._paired += 1
        yield Paired(peer_id, self._search.round, leading)
        yield from self._refuse_outdated()

    def _accepted(self, _now_s: float, event: ProposalAccepted) -> Iterable[Command]:
        if self._is_pending(event.peer_id, event.round):
            self._held.pop((event.peer_id, event.round), None)
            yield from self._pair(event.peer_id, leading=True)
        else:
            yield Withdraw(event.peer_id, event.round)

    def _refused(self, now_s: float, event: ProposalRefused) -> Iterable[Command]:
        if self._is_pending(event.peer_id, event.round):
            self._search.pending = None
            self._search.may_come |= event.reason in _MAY_COME
            yield from self._seek(now_s)

    def _is_pending(self, peer_id: str, round_: int) -> bool:
        search = self._search
        return search.phase is Phase.ASKING and (search.pending, search.round) == (peer_id, round_)

    def _ticked(self, now_s: float, _event: Tick) -> Iterable[Command]:
        search = self._search
        if search.phase not in (Phase.ASKING, Phase.OPEN):
            return
        if now_s >= search.deadline_s:
            silent = search.saw_silence or search.phase is Phase.ASKING
            yield from self._give_up(SkipReason.DEADLINE if silent else SkipReason.NO_PARTNER)
        elif search.phase is Phase.ASKING and now_s >= search.patience_until_s:
            assert search.pending is not None
            search.saw_silence = search.may_come = True
            yield Withdraw(search.pending, search.round)
            search.pending = None
            yield from self._seek(now_s)

    def _give_up(self, reason: SkipReason) -> Iterable[Command]:
        search = self._search
        if search.pending is not None:
            yield Withdraw(search.pending, search.round)
            search.pending = None
        search.phase = Phase.IDLE
        self._unmatched += 1
        yield Unmatched(search.round, reason)
        yield from self._refuse_outdated()

    def _rank(self, round_: int, peer_id: str) -> bytes:
        return pair_rank(self._group, round_, self._own_id, peer_id)


_HANDLERS: Final[dict[type[Event], Callable[..., Iterable[Command]]]] = {
    RoundOpened: Matchmaker._opened,
    RoundProgressed: Matchmaker._progressed,
    RoundClosed: Matchmaker._closed,
    ProposalReceived: Matchmaker._asked,
    ProposalWithdrawn: Matchmaker._withdrawn,
    ProposalAccepted: Matchmaker._accepted,
    ProposalRefused: Matchmaker._refused,
    RoundSettled: Matchmaker._settled,
    SearchStopped: Matchmaker._stopped,
    Tick: Matchmaker._ticked,
}
