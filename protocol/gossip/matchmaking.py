"""Finding a partner without a clock: peers that are free average with peers that are free.

The idea. A peer is *free* from the close of a round until its exchange begins. It says so in its
beats, with the number of its round, so free peers know of each other after one message. Every pair
of free peers has a rank: a hash of the group and of both ends, each with its own round's number.
Both ends compute the same rank, no round is shared, and a pair gets a new rank each time. Each free
peer asks the others in the order of that rank. Among peers that are free together this is the
greedy matching of a random order of all pairs: partners are random, and nearly every peer gets one.
With views that differ it is still a matching, because a pair exists only when both have agreed.

The rules
  1. Peers average when the nominal steps of their snapshots are at most MAX_DISTANCE_ROUNDS rounds
     apart, and when both snapshots belong to the training, or both to the final averaging.
  2. A peer that is not free refuses as `busy`, at once: nobody closes a round early for another.
  3. While our own proposal is pending, proposals of others are held; when ours is refused, the best
     one held is taken. A proposal that ranks better than our pending one is taken at once: of peers
     that wait for each other in a circle, the pair that ranks best is made.
  4. If two peers propose to each other, the proposal of the lower peer id stands, and the other is
     withdrawn.
  5. Of two peers with steady speeds one would always be free when the other is. So the peers met
     last (a quarter of the group) are put off: nobody asks or takes them before `fresh_until_s`,
     which `Patience` chooses so that waiting costs little. One that asks before is refused as
     `met`; we ask it ourselves when that time is over.
  6. A peer that could not be reached, or gave no answer, is not asked again for RESTS.first_s, and
     twice as long after each further time, at most RESTS.most_s. What it proposes itself is
     welcome, unless its last vector was bad, implausible or of no help, or it was our partner
     recently more often than a few times its share.
  7. The search ends at its deadline, and at once when nobody is or may become free.
  8. A yes may cross a withdrawal: a peer that said yes to one that no longer waits looks on.

Invariants: at most one `Paired` per round that is not taken back by rule 8; every proposal received
is answered, withdrawn or held (at most MAX_HELD_PROPOSALS); every search ends in exactly one
`Paired` or `Unmatched`; a peer is asked at most once with one pair of snapshots, and a search asks
at most MAX_PROPOSAL_TRIES times.

Pure: time comes in with each event, `next_deadline_s` says when the next `tick` is due.
Source: docs/decisions/0016-gossip-without-a-clock.md, which compares it with other rules. The
paper's permutation (NoLoCo, arXiv 2506.10911, section 3) is the case of all peers free at once.

Recent partners (rule 6). A peer that is always free, and chooses the numbers of its rounds so that
it ranks first, would be the partner of all in each round. So one that was partner MOST_FAIR_SHARES
times as often as chance would have it, among the last RECENT exchanges, is put off. With a few
peers that is never reached: there is nobody else.

Patience (rule 5). Averages spread only when partners change; but on thin lines two peers end their
exchange at the same moment, are both free, and nobody else is. Waiting for others costs time on the
line, averaging with the same peer again costs mixing. So a peer waits as long as waiting costs
nothing, and saves up a small share of its time for longer waits:

  - Slack: where an exchange is shorter than a round, half of the difference may be waited. The line
    would be idle in any case.
  - Savings: each exchange adds SAVED_SHARE of its length, and a wait beyond the slack takes off
    what it lasted. They are spent once they come to LUMP_SHARE of an exchange, not before: many
    waits that are all too short for another pair to come would bring nobody new, and two peers
    would meet for ever. They are never longer than an exchange.
  - So at most SAVED_SHARE of the time is lost to waiting where lines are always busy. (Simulated:
    without savings 99% of the exchanges are repeats where an exchange outlasts a round; with them a
    fifth or less.)

What is kept of peers that rest is bounded: the view is bounded, only peers of it are asked, and one
that never answers again keeps an entry until its rest has lasted RESTS.most_s and one more.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import blake3

from protocol.limits import MAX_HELD_PROPOSALS, MAX_PROPOSAL_TRIES
from protocol.membership.book import BackOff, Pauses
from protocol.outcomes import RefusalReason, SkipReason

MAX_DISTANCE_ROUNDS: Final = 8
"""Most rounds (of H nominal steps) between the snapshots of two partners."""
PROPOSAL_ANSWER_S: Final = 5.0
"""How long a peer may take to answer a proposal."""
RECENT: Final = 16
MOST_FAIR_SHARES: Final = 3
RESTS: Final = Pauses(30.0, 600.0)


@dataclass(frozen=True, slots=True)
class RoundSnapshot:
    """The snapshot that a free peer wants averaged.

    Attributes:
        round: the peer's own number of the round that it has closed.
        step: the nominal step at which the snapshot was taken.
        final: it belongs to the final averaging, after the last training step.
    """

    round: int
    step: int
    final: bool = False


# --- what to do -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SendProposal:
    """Ask this peer to average with the snapshot of our `round`."""

    peer_id: str
    round: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Stop waiting for this peer's answer to the proposal of our `round`."""

    peer_id: str
    round: int


@dataclass(frozen=True, slots=True)
class RefuseProposal:
    peer_id: str
    round: int
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class Paired:
    """We have a partner for our `round`.

    Attributes:
        proposed: their round, if they asked: say yes, they lead the exchange. None if we asked.
    """

    peer_id: str
    round: int
    proposed: int | None


@dataclass(frozen=True, slots=True)
class Unmatched:
    round: int
    reason: SkipReason


MatchCommand = SendProposal | Withdraw | RefuseProposal | Paired | Unmatched


# --- one search -----------------------------------------------------------------------------------
@dataclass(slots=True)
class PartnerSearch:
    """The search of one round.

    Attributes:
        is_looking: neither partner found, nor given up.
        tried: snapshots of others that were asked in vain.
        pending: the peer that is asked, and its snapshot as far as we know; None while there is
            nobody to ask.
        taken: the peer to which we said yes, and its round, until our round is over.
        wake_s: when something is to be done if nothing happens before.
    """

    snapshot: RoundSnapshot = RoundSnapshot(-1, 0)
    is_looking: bool = False
    tried: set[tuple[str, int]] = field(default_factory=set)
    pending: tuple[str, RoundSnapshot] | None = None
    taken: tuple[str, int] | None = None
    saw_silence: bool = False
    fresh_until_s: float = 0.0
    deadline_s: float = 0.0
    wake_s: float = 0.0


# --- the matchmaker -------------------------------------------------------------------------------
def pair_rank(group: str, one: tuple[str, int], other: tuple[str, int]) -> bytes:
    """16 bytes, the same for both peers, which have closed these rounds; the lowest comes first."""
    (low, low_round), (high, high_round) = sorted((one, other))
    text = f"{group}/{low}/{low_round}/{high}/{high_round}"
    return blake3.blake3(text.encode()).digest(length=16)


class Matchmaker:
    """One peer's search for partners, round after round.

    Methods tell it of something that has happened, and return what to do; what no longer matters is
    ignored. `round_` is the asker's own number.

    Args:
        inner_steps: H, the nominal steps of a round.
    """

    def __init__(self, group: str, own_id: str, inner_steps: int) -> None:
        self._group = group
        self._own_id = own_id
        self._max_distance = MAX_DISTANCE_ROUNDS * inner_steps
        self._search = PartnerSearch()
        self._free: dict[str, RoundSnapshot] = {}
        self._present = 0
        self._held: dict[str, RoundSnapshot] = {}
        self._met: deque[str] = deque()
        self._recent: deque[str] = deque(maxlen=RECENT)
        self._resting, self._doubted = BackOff(*RESTS), BackOff(*RESTS)

    @property
    def is_looking(self) -> bool:
        return self._search.is_looking

    @property
    def next_deadline_s(self) -> float | None:
        """When `tick` is due; None while nothing waits."""
        return self._search.wake_s if self.is_looking else None

    # --- our own rounds ---------------------------------------------------------------------------
    def search(
        self, now_s: float, snapshot: RoundSnapshot, fresh_until_s: float, deadline_s: float
    ) -> list[MatchCommand]:
        """Look for a partner; until `fresh_until_s` only one that was not met recently will do."""
        self._search = PartnerSearch(
            snapshot, is_looking=True, fresh_until_s=fresh_until_s, deadline_s=deadline_s
        )
        return self._seek(now_s)

    def end(self, round_: int) -> list[MatchCommand]:
        """Our round is over, one way or the other; if the search is not, we are leaving."""
        if round_ != self._search.snapshot.round:
            return []
        commands = self._give_up(SkipReason.LEAVING) if self.is_looking else []
        self._search.is_looking, self._search.taken = False, None
        return commands

    def seen(
        self, now_s: float, free: Iterable[tuple[str, RoundSnapshot]], present: int
    ) -> list[MatchCommand]:
        """How the group looks now: the others that are free, and how many are or may become so."""
        self._free, self._present = dict(free), present
        # Never are all of them put off (rule 5).
        most_met = 0 if present < 2 else max(1, present // 4)
        while len(self._met) > most_met:
            self._met.popleft()
        is_open = self.is_looking and self._search.pending is None
        return self._seek(now_s) if is_open else []

    def tick(self, now_s: float) -> list[MatchCommand]:
        search = self._search
        if not self.is_looking:
            return []
        if now_s >= search.deadline_s:
            return self._end()
        if search.pending is None:
            return self._seek(now_s)
        if now_s < search.wake_s:
            return []
        search.saw_silence = True
        self._resting.failed(search.pending[0], now_s)
        return [*self._drop_pending(), *self._seek(now_s)]

    # --- being asked ------------------------------------------------------------------------------
    def asked(self, now_s: float, peer_id: str, theirs: RoundSnapshot) -> list[MatchCommand]:
        self._resting.answered(peer_id)
        refusal = self._reason_to_refuse(now_s, peer_id, theirs)
        if refusal is None and len(self._held) >= MAX_HELD_PROPOSALS:
            refusal = RefusalReason.TOO_MANY
        if refusal is not None:
            return [RefuseProposal(peer_id, theirs.round, refusal)]
        self._held[peer_id] = theirs
        return self._seek(now_s) if self._is_preferred(peer_id, theirs) else []

    def _reason_to_refuse(
        self, now_s: float, peer_id: str, theirs: RoundSnapshot
    ) -> RefusalReason | None:
        """Why a proposal is refused at once, if so (rules 1, 2, 5 and 6)."""
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
        """Whether their snapshot and ours may be averaged (rule 1)."""
        ours = self._search.snapshot
        near = abs(ours.step - theirs.step) <= self._max_distance
        return near and ours.final == theirs.final

    def _is_preferred(self, peer_id: str, theirs: RoundSnapshot) -> bool:
        """Whether their proposal goes before our pending one, if any (rules 3 and 4)."""
        pending = self._search.pending
        if pending is None:
            return True
        if pending[0] == peer_id:
            return peer_id < self._own_id
        return self._rank(peer_id, theirs) < self._rank(*pending)

    def withdrawn(self, now_s: float, peer_id: str, round_: int) -> list[MatchCommand]:
        """A peer that asked us no longer waits for our answer."""
        held = self._held.get(peer_id)
        if held is not None and held.round == round_:
            del self._held[peer_id]
        search = self._search
        if search.taken != (peer_id, round_):
            return []
        search.taken, search.is_looking = None, True
        search.tried.add((peer_id, round_))
        return self._seek(now_s)

    def doubt(self, now_s: float, peer_id: str) -> None:
        """Let a peer rest whose vector could not be used; it is not welcome meanwhile."""
        self._doubted.failed(peer_id, now_s)

    # --- asking -----------------------------------------------------------------------------------
    def accepted(self, peer_id: str, round_: int) -> list[MatchCommand]:
        if not self._is_pending(peer_id, round_):
            return [Withdraw(peer_id, round_)]
        self._resting.answered(peer_id)
        self._held.pop(peer_id, None)
        return self._pair(peer_id, None)

    def refused(
        self, now_s: float, peer_id: str, round_: int, reason: RefusalReason | None
    ) -> list[MatchCommand]:
        """The peer that we asked has said no, or cannot be reached (None)."""
        if reason is None:
            self._resting.failed(peer_id, now_s)
        if not self._is_pending(peer_id, round_):
            return []
        self._search.saw_silence |= reason is None
        self._drop_pending()
        return self._seek(now_s)

    def _is_pending(self, peer_id: str, round_: int) -> bool:
        pending, ours = self._search.pending, self._search.snapshot
        return pending is not None and (pending[0], ours.round) == (peer_id, round_)

    def _seek(self, now_s: float) -> list[MatchCommand]:
        """Take the best proposal held, else ask the best free peer, else wait."""
        search = self._search
        if now_s >= search.deadline_s:
            return self._end()
        if held := self._best(now_s, self._held):
            return self._take(held)
        if free := self._best(now_s, self._askable(now_s)):
            search.pending = free, self._free[free]
            search.wake_s = min(search.deadline_s, now_s + PROPOSAL_ANSWER_S)
            search.tried.add((free, self._free[free].round))
            return [SendProposal(free, search.snapshot.round)]
        self._drop_pending()
        is_patient = now_s < search.fresh_until_s
        search.wake_s = min(search.deadline_s, search.fresh_until_s if is_patient else math.inf)
        return [] if self._present or self._held else self._give_up(SkipReason.NO_PARTNER)

    def _askable(self, now_s: float) -> dict[str, RoundSnapshot]:
        if len(self._search.tried) >= MAX_PROPOSAL_TRIES:
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
        """The best-ranked of these that is not put off: those not met recently go first."""
        fit = [peer_id for peer_id in among if not self._is_put_off(peer_id, now_s)]
        fit = [peer_id for peer_id in fit if peer_id not in self._met] or fit
        return min(fit, key=lambda peer_id: self._rank(peer_id, among[peer_id]), default=None)

    def _is_put_off(self, peer_id: str, now_s: float) -> bool:
        """Whether a peer was our partner just now, or too often (rules 5 and 6)."""
        is_met = peer_id in self._met and now_s < self._search.fresh_until_s
        most = max(2, math.ceil(MOST_FAIR_SHARES * RECENT / max(1, self._present)))
        return is_met or self._recent.count(peer_id) >= most

    def _rank(self, peer_id: str, theirs: RoundSnapshot) -> bytes:
        own = (self._own_id, self._search.snapshot.round)
        return pair_rank(self._group, own, (peer_id, theirs.round))

    # --- how a search ends ------------------------------------------------------------------------
    def _take(self, peer_id: str) -> list[MatchCommand]:
        proposed = self._held.pop(peer_id).round
        self._search.taken = (peer_id, proposed)
        return [*self._drop_pending(), *self._pair(peer_id, proposed)]

    def _pair(self, peer_id: str, proposed: int | None) -> list[MatchCommand]:
        self._search.is_looking, self._search.pending = False, None
        if peer_id in self._met:
            self._met.remove(peer_id)
        self._met.append(peer_id)
        self._recent.append(peer_id)
        return [Paired(peer_id, self._search.snapshot.round, proposed), *self._refuse_held()]

    def _end(self) -> list[MatchCommand]:
        silent = self._search.saw_silence or self._search.pending is not None
        return self._give_up(SkipReason.DEADLINE if silent else SkipReason.NO_PARTNER)

    def _give_up(self, reason: SkipReason) -> list[MatchCommand]:
        withdrawn, self._search.is_looking = self._drop_pending(), False
        unmatched = Unmatched(self._search.snapshot.round, reason)
        return [*withdrawn, unmatched, *self._refuse_held()]

    def _drop_pending(self) -> list[MatchCommand]:
        """Wait no longer for an answer."""
        pending, self._search.pending = self._search.pending, None
        return [] if pending is None else [Withdraw(pending[0], self._search.snapshot.round)]

    def _refuse_held(self) -> list[MatchCommand]:
        held, self._held = self._held, {}
        return [RefuseProposal(peer, each.round, RefusalReason.BUSY) for peer, each in held.items()]


# --- patience -------------------------------------------------------------------------------------
WAIT_ROUNDS: Final = 2.0
"""A partner is looked for as long as this many rounds take, or one of our own where that is longer;
then a peer steps alone. At the end of the training the others are waited for as long."""
MAX_EXCHANGE_ROUNDS: Final = 8.0
"""An exchange may take as long as this many rounds. So an average is at most 10 rounds old (search
and exchange) when it is merged."""
SAVED_SHARE: Final = 0.08
LUMP_SHARE: Final = 0.2
SMOOTHING: Final = 0.3
"""Weight of the newest exchange in the estimate of the next one's length."""


class Patience:
    def __init__(self) -> None:
        self._exchange_s: float | None = None
        self._saved_s = 0.0

    def for_fresh_s(self, until_next_s: float) -> float:
        """How long to wait for a partner that was not met recently."""
        exchange_s = self._exchange_s
        if exchange_s is None:
            return self._slack_s(until_next_s)
        lump_s = self._saved_s if self._saved_s >= LUMP_SHARE * exchange_s else 0.0
        return max(self._slack_s(until_next_s), lump_s)

    def exchanged(self, waited_s: float, exchange_s: float, until_next_s: float) -> None:
        """An exchange has ended."""
        spent_s = max(0.0, waited_s - self._slack_s(until_next_s))
        before_s = exchange_s if self._exchange_s is None else self._exchange_s
        self._exchange_s = before_s + SMOOTHING * (exchange_s - before_s)
        saved_s = max(0.0, self._saved_s - spent_s) + SAVED_SHARE * exchange_s
        self._saved_s = min(exchange_s, saved_s)

    def _slack_s(self, until_next_s: float) -> float:
        return max(0.0, until_next_s - (self._exchange_s or 0.0)) / 2
