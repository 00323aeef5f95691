"""Finding a partner without a clock: whoever is free averages with whoever is free.

The idea. A peer is *free* from the close of a round until its exchange begins. It says so in its
beats, with the number of its round, so free peers know of each other after one message. Every pair
of free peers has a rank: a hash of the group and of both ends, each with its own round's number.
Both ends compute the same rank, no round is shared, and a pair gets a new rank each time. Each free
peer asks the others in the order of that rank. Among peers that are free together this is the
greedy matching of a random order of all pairs: partners are random, and nearly everybody gets one.
With views that differ it is still a matching, because a pair exists only when both have agreed.

The rules
  1. Peers average when the nominal steps of their snapshots are at most MAX_APART_ROUNDS rounds
     apart, and when both snapshots belong to the training, or both to the final averaging.
  2. A peer that is not free refuses as `busy`, at once: nobody is made to close a round early.
  3. While our own proposal is pending, proposals of others are held; when ours is refused, the best
     one held is taken. A proposal that ranks better than our pending one is taken at once. So of
     peers that wait for each other in a circle, the pair that ranks best is made.
  4. If two peers propose to each other, the proposal of the lower peer id stands, and the other is
     withdrawn.
  5. Of two peers with steady speeds one would always be free when the other is. So the peers met
     last (a quarter of the group) are put off: nobody asks or takes them before `fresh_until_s`,
     which the caller chooses so that waiting costs little (patience.py). One that asks
     before is refused as `met`; we ask it ourselves when that time is over.
  6. A peer that could not be reached, or gave no answer, is not asked again for REST_FIRST_S, and
     twice as long after each further time, at most REST_MAX_S. What it proposes itself is welcome.
     One whose vector was implausible is not even welcome before that, nor one that was our partner
     more often of late than a few times its share.
  7. The search ends at its deadline, and at once when there is nobody who is or may become free.
  8. A yes may cross a withdrawal. A peer that said yes to somebody that does not wait any more
     looks on.

Invariants: at most one `Paired` per round that is not taken back by rule 8; every proposal received
is answered, withdrawn or held (at most MAX_HELD); every search ends in exactly one
`Paired` or `Unmatched`; a peer is asked at most once with one pair of snapshots, and a search asks
at most MAX_TRIED times.

Pure: time comes in with each event, `next_deadline_s` says when the next `Tick` is due.
Source: docs/decisions/0016-gossip-without-a-clock.md, which compares it with other rules. The
paper's permutation (NoLoCo, arXiv 2506.10911, section 3) is the case of all peers free at once.

Partners of late (rule 6): none is to be everybody's all the time. A peer that is always free, and
chooses the numbers of its rounds so that it ranks first, would be the partner of all in each round.
So one that was partner MOST_FAIR_SHARES times as often as chance would have it is put off. With a
few peers that is never reached: there is nobody else.

What is kept of peers that rest is bounded: what is over is forgotten, and a peer that never answers
again keeps one entry until its rest has lasted REST_MAX_S and one more (the view is bounded, and
only peers of it are asked).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import blake3

from protocol.limits import MAX_HELD, MAX_TRIED
from protocol.membership.book import BackOff
from protocol.outcomes import RefusalReason, SkipReason

from .matchmaking_events import (
    AcceptProposal,
    BecameFree,
    MatchCommand,
    MatchEvent,
    Paired,
    PartnerDoubted,
    PeersSeen,
    ProposalAccepted,
    ProposalReceived,
    ProposalRefused,
    ProposalWithdrawn,
    RefuseProposal,
    RoundSettled,
    RoundSnapshot,
    SearchStopped,
    SendProposal,
    Tick,
    Unmatched,
    Withdraw,
)

# --- partners of late -----------------------------------------------------------------------------
RECENT: Final = 16
MOST_FAIR_SHARES: Final = 3


class RecentPartners:
    """The partners of the last RECENT exchanges."""

    def __init__(self) -> None:
        self._partners: deque[str] = deque(maxlen=RECENT)

    def add(self, peer_id: str) -> None:
        """A peer became our partner."""
        self._partners.append(peer_id)

    def is_too_often(self, peer_id: str, present: int) -> bool:
        """Whether a peer has had its share, among so many that may be partners."""
        most = max(2, math.ceil(MOST_FAIR_SHARES * RECENT / max(1, present)))
        return self._partners.count(peer_id) >= most


# --- peers that rest ------------------------------------------------------------------------------
REST_FIRST_S: Final = 30.0
REST_MAX_S: Final = 600.0


def resting() -> BackOff:
    """Peers that are not asked for now."""
    return BackOff(REST_FIRST_S, REST_MAX_S)


# --- one search -----------------------------------------------------------------------------------
class SearchPhase(Enum):
    """Where the search stands."""

    IDLE = auto()
    """Not free: no round is closed, or the last one is settled."""
    ASKING = auto()
    """Our proposal is pending."""
    OPEN = auto()
    """Nobody to ask just now."""
    PAIRED = auto()
    """Partner found; the exchange runs."""


_NONE: Final = RoundSnapshot(-1, 0)


@dataclass(slots=True)
class PartnerSearch:
    """The search of one round.

    Attributes:
        tried: snapshots of others that were asked in vain.
        pending: the peer that is asked, and its snapshot as far as we know.
        taken: the peer to which we said yes, and its round.
    """

    snapshot: RoundSnapshot = _NONE
    phase: SearchPhase = SearchPhase.IDLE
    tried: set[tuple[str, int]] = field(default_factory=set)
    pending: tuple[str, RoundSnapshot] | None = None
    taken: tuple[str, int] | None = None
    saw_silence: bool = False
    fresh_until_s: float = 0.0
    deadline_s: float = 0.0
    answer_until_s: float = 0.0


# --- the matchmaker -------------------------------------------------------------------------------
MAX_APART_ROUNDS: Final = 8
"""Partners' snapshots are at most so many rounds (of H nominal steps) apart."""
ANSWER_S: Final = 5.0
"""How long a peer may take to answer a proposal."""
PUT_OFF_SHARE: Final = 4
"""One of so many peers of the group has been met of late."""


def pair_rank(group: str, one: tuple[str, int], other: tuple[str, int]) -> bytes:
    """Rank of a pair of free peers: lower comes first; the same for both (16 bytes).

    Args:
        group: its digest.
        one, other: peer id and its own number of the round that it has closed.
    """
    (low, low_round), (high, high_round) = sorted((one, other))
    text = f"{group}/{low}/{low_round}/{high}/{high_round}"
    return blake3.blake3(text.encode()).digest(length=16)


@dataclass(frozen=True, slots=True)
class MatchmakerStatistics:
    """Counts since the start."""

    paired: int
    unmatched: int
    proposals_sent: int
    proposals_received: int


class Matchmaker:
    """One peer's search for partners, round after round. See the top of the file.

    Args:
        group: digest of the group.
        inner_steps: H, the nominal steps of a round.
    """

    def __init__(self, group: str, own_id: str, inner_steps: int) -> None:
        self._group = group
        self._own_id = own_id
        self._max_apart = MAX_APART_ROUNDS * inner_steps
        self._search = PartnerSearch()
        self._free: dict[str, RoundSnapshot] = {}
        self._present = 0
        self._held: dict[str, RoundSnapshot] = {}
        self._met: deque[str] = deque()
        self._recent = RecentPartners()
        self._resting = resting()
        self._doubted = resting()
        self._now_s = 0.0
        self._paired = self._unmatched = self._sent = self._received = 0

    @property
    def phase(self) -> SearchPhase:
        """Where the search stands."""
        return self._search.phase

    @property
    def is_looking(self) -> bool:
        """Whether we are free."""
        return self._search.phase in (SearchPhase.ASKING, SearchPhase.OPEN)

    @property
    def next_deadline_s(self) -> float | None:
        """When a `Tick` is due, in the time of `step`; None while nothing waits."""
        search = self._search
        if not self.is_looking:
            return None
        if search.phase is SearchPhase.ASKING:
            return min(search.deadline_s, search.answer_until_s)
        if self._now_s < search.fresh_until_s:
            return min(search.deadline_s, search.fresh_until_s)
        return search.deadline_s

    def statistics(self) -> MatchmakerStatistics:
        """Counts since the start."""
        return MatchmakerStatistics(self._paired, self._unmatched, self._sent, self._received)

    def step(self, now_s: float, event: MatchEvent) -> tuple[MatchCommand, ...]:
        """Take one event; say what to do. Events that no longer matter are ignored."""
        self._now_s = now_s
        handle = _HANDLERS[type(event)]
        return tuple(handle(self, now_s, event))

    # --- our own rounds ---------------------------------------------------------------------------
    def _became_free(self, now_s: float, event: BecameFree) -> Iterable[MatchCommand]:
        self._search = PartnerSearch(
            snapshot=event.snapshot,
            phase=SearchPhase.OPEN,
            fresh_until_s=event.fresh_until_s,
            deadline_s=event.deadline_s,
        )
        yield from self._seek(now_s)

    def _settled(self, _now_s: float, event: RoundSettled) -> Iterable[MatchCommand]:
        if event.round == self._search.snapshot.round:
            self._search.phase = SearchPhase.IDLE
        yield from ()

    def _stopped(self, _now_s: float, event: SearchStopped) -> Iterable[MatchCommand]:
        if event.round == self._search.snapshot.round and self.is_looking:
            yield from self._give_up(event.reason)

    def _seen(self, now_s: float, event: PeersSeen) -> Iterable[MatchCommand]:
        self._free, self._present = dict(event.free), event.present
        while len(self._met) > self._put_off():
            self._met.popleft()
        if self._search.phase is SearchPhase.OPEN:
            yield from self._seek(now_s)

    def _put_off(self) -> int:
        """How many of the peers met last are put off (rule 5): never all of them."""
        return 0 if self._present < 2 else max(1, self._present // PUT_OFF_SHARE)

    # --- being asked ------------------------------------------------------------------------------
    def _asked(self, now_s: float, event: ProposalReceived) -> Iterable[MatchCommand]:
        self._received += 1
        self._resting.answered(event.peer_id)
        refusal = self._reason_to_refuse(now_s, event.peer_id, event.snapshot)
        if refusal is None and len(self._held) >= MAX_HELD:
            refusal = RefusalReason.TOO_MANY
        if refusal is not None:
            yield RefuseProposal(event.peer_id, event.snapshot.round, refusal)
            return
        self._held[event.peer_id] = event.snapshot
        if self._search.phase is SearchPhase.OPEN or self._is_preferred(
            event.peer_id, event.snapshot
        ):
            yield from self._seek(now_s)

    def _reason_to_refuse(
        self, now_s: float, peer_id: str, theirs: RoundSnapshot
    ) -> RefusalReason | None:
        """Rules 1, 2 and 5."""
        if not self.is_looking:
            return RefusalReason.BUSY
        if not self._doubted.is_due(peer_id, now_s):
            return RefusalReason.IMPLAUSIBLE
        if self._is_fit(theirs):
            return RefusalReason.MET if self._is_put_off(peer_id, now_s) else None
        ours = self._search.snapshot
        is_ahead = (ours.final, ours.step) > (theirs.final, theirs.step)
        return RefusalReason.AHEAD if is_ahead else RefusalReason.BEHIND

    def _is_fit(self, theirs: RoundSnapshot) -> bool:
        """Rule 1."""
        ours = self._search.snapshot
        near = abs(ours.step - theirs.step) <= self._max_apart
        return near and ours.final == theirs.final

    def _is_preferred(self, peer_id: str, theirs: RoundSnapshot) -> bool:
        """Whether their proposal goes before our pending one (rules 3 and 4)."""
        pending = self._search.pending
        assert pending is not None
        if pending[0] == peer_id:
            return peer_id < self._own_id
        return self._rank(peer_id, theirs) < self._rank(*pending)

    def _withdrawn(self, now_s: float, event: ProposalWithdrawn) -> Iterable[MatchCommand]:
        held = self._held.get(event.peer_id)
        if held is not None and held.round == event.round:
            del self._held[event.peer_id]
        search = self._search
        if search.phase is SearchPhase.PAIRED and search.taken == (event.peer_id, event.round):
            self._paired -= 1
            search.taken, search.phase = None, SearchPhase.OPEN
            search.tried.add((event.peer_id, event.round))
            yield from self._seek(now_s)

    # --- asking -----------------------------------------------------------------------------------
    def _seek(self, now_s: float) -> Iterable[MatchCommand]:
        """Take the best proposal held, else ask the best free peer, else wait."""
        search = self._search
        if now_s >= search.deadline_s:
            yield from self._end(now_s)
        elif held := self._best(now_s, self._held):
            yield from self._take(held)
        elif free := self._best(now_s, self._askable(now_s)):
            search.pending, search.phase = (free, self._free[free]), SearchPhase.ASKING
            search.answer_until_s = now_s + ANSWER_S
            search.tried.add((free, self._free[free].round))
            self._sent += 1
            yield SendProposal(free, search.snapshot.round)
        else:
            search.pending, search.phase = None, SearchPhase.OPEN
            if not (self._present or self._held):
                yield from self._give_up(SkipReason.NO_PARTNER)

    def _askable(self, now_s: float) -> dict[str, RoundSnapshot]:
        if len(self._search.tried) >= MAX_TRIED:
            return {}
        return {
            peer_id: snapshot
            for peer_id, snapshot in self._free.items()
            if self._is_fit(snapshot)
            and (peer_id, snapshot.round) not in self._search.tried
            and self._resting.is_due(peer_id, now_s)
            and self._doubted.is_due(peer_id, now_s)
        }

    def _best(self, now_s: float, among: dict[str, RoundSnapshot]) -> str | None:
        """The best-ranked of these that is not put off: those not met of late go first."""
        fit = [peer_id for peer_id in among if not self._is_put_off(peer_id, now_s)]
        fit = [peer_id for peer_id in fit if peer_id not in self._met] or fit
        return min(fit, key=lambda peer_id: self._rank(peer_id, among[peer_id]), default=None)

    def _is_put_off(self, peer_id: str, now_s: float) -> bool:
        """Rules 5 and 6."""
        is_met = peer_id in self._met and now_s < self._search.fresh_until_s
        return is_met or self._recent.is_too_often(peer_id, self._present)

    def _partner_doubted(self, now_s: float, event: PartnerDoubted) -> Iterable[MatchCommand]:
        self._doubted.failed(event.peer_id, now_s)
        yield from ()

    def _take(self, peer_id: str) -> Iterable[MatchCommand]:
        search = self._search
        if search.pending is not None:
            yield Withdraw(search.pending[0], search.snapshot.round)
        theirs = self._held.pop(peer_id)
        search.taken = (peer_id, theirs.round)
        yield AcceptProposal(peer_id, theirs.round)
        yield from self._pair(peer_id, leading=False)

    def _pair(self, peer_id: str, *, leading: bool) -> Iterable[MatchCommand]:
        self._search.phase, self._search.pending = SearchPhase.PAIRED, None
        self._paired += 1
        if peer_id in self._met:
            self._met.remove(peer_id)
        self._met.append(peer_id)
        self._recent.add(peer_id)
        yield Paired(peer_id, self._search.snapshot.round, leading)
        yield from self._refuse_held()

    def _accepted(self, _now_s: float, event: ProposalAccepted) -> Iterable[MatchCommand]:
        if self._is_pending(event.peer_id, event.round):
            self._resting.answered(event.peer_id)
            self._held.pop(event.peer_id, None)
            yield from self._pair(event.peer_id, leading=True)
        else:
            yield Withdraw(event.peer_id, event.round)

    def _refused(self, now_s: float, event: ProposalRefused) -> Iterable[MatchCommand]:
        if event.reason is None:
            self._resting.failed(event.peer_id, now_s)
        if self._is_pending(event.peer_id, event.round):
            self._search.saw_silence |= event.reason is None
            self._search.pending, self._search.phase = None, SearchPhase.OPEN
            yield from self._seek(now_s)

    def _is_pending(self, peer_id: str, round_: int) -> bool:
        search = self._search
        return (
            search.phase is SearchPhase.ASKING
            and search.pending is not None
            and (search.pending[0], search.snapshot.round) == (peer_id, round_)
        )

    def _ticked(self, now_s: float, _event: Tick) -> Iterable[MatchCommand]:
        search = self._search
        if not self.is_looking:
            return
        if now_s >= search.deadline_s:
            yield from self._end(now_s)
        elif search.phase is SearchPhase.OPEN:
            yield from self._seek(now_s)
        elif now_s >= search.answer_until_s:
            assert search.pending is not None
            search.saw_silence = True
            self._resting.failed(search.pending[0], now_s)
            yield Withdraw(search.pending[0], search.snapshot.round)
            search.pending, search.phase = None, SearchPhase.OPEN
            yield from self._seek(now_s)

    def _end(self, _now_s: float) -> Iterable[MatchCommand]:
        search = self._search
        silent = search.saw_silence or search.phase is SearchPhase.ASKING
        yield from self._give_up(SkipReason.DEADLINE if silent else SkipReason.NO_PARTNER)

    def _give_up(self, reason: SkipReason) -> Iterable[MatchCommand]:
        search = self._search
        if search.pending is not None:
            yield Withdraw(search.pending[0], search.snapshot.round)
            search.pending = None
        search.phase = SearchPhase.IDLE
        self._unmatched += 1
        yield Unmatched(search.snapshot.round, reason)
        yield from self._refuse_held()

    def _refuse_held(self) -> Iterable[MatchCommand]:
        for peer_id, theirs in self._held.items():
            yield RefuseProposal(peer_id, theirs.round, RefusalReason.BUSY)
        self._held.clear()

    def _rank(self, peer_id: str, theirs: RoundSnapshot) -> bytes:
        own = (self._own_id, self._search.snapshot.round)
        return pair_rank(self._group, own, (peer_id, theirs.round))


_HANDLERS: Final[dict[type[MatchEvent], Callable[..., Iterable[MatchCommand]]]] = {
    BecameFree: Matchmaker._became_free,
    PeersSeen: Matchmaker._seen,
    PartnerDoubted: Matchmaker._partner_doubted,
    ProposalReceived: Matchmaker._asked,
    ProposalWithdrawn: Matchmaker._withdrawn,
    ProposalAccepted: Matchmaker._accepted,
    ProposalRefused: Matchmaker._refused,
    RoundSettled: Matchmaker._settled,
    SearchStopped: Matchmaker._stopped,
    Tick: Matchmaker._ticked,
}
