"""Matchmakers over a seeded, delaying wire; and single ones, event by event."""

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from protocol import matchmaking_events as m
from protocol.limits import MAX_HELD_PROPOSALS, MAX_PROPOSAL_TRIES
from protocol.matchmaking import Matchmaker, Phase, pair_rank
from protocol.outcomes import RefusalReason, SkipReason

RUN = "run"


@dataclass
class Swarm:
    """N matchmakers, views with holes, messages that take time. One round at a time."""

    num_peers: int
    seed: int
    missing: float = 0.0
    close_spread_s: float = 0.5
    latency_s: float = 0.05
    now_s: float = 0.0
    rng: random.Random = field(init=False)
    events: list[tuple[float, int, str, m.Event]] = field(default_factory=list)
    pairs: dict[str, str] = field(default_factory=dict)
    unmatched: dict[str, SkipReason] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.ids = [f"peer{i:03d}" for i in range(self.num_peers)]
        self.makers = {peer: Matchmaker(RUN, peer) for peer in self.ids}
        self.counter = itertools.count()

    def post(self, delay_s: float, peer: str, event: m.Event) -> None:
        heapq.heappush(self.events, (self.now_s + delay_s, next(self.counter), peer, event))

    def view_of(self, peer: str) -> tuple[str, ...]:
        return tuple(o for o in self.ids if o != peer and self.rng.random() >= self.missing)

    def play_round(self, round_: int) -> None:
        self.pairs.clear()
        self.unmatched.clear()
        for peer in self.ids:
            self.post(0.0, peer, m.RoundOpened(round_))
            closes_in_s = 1.0 + self.rng.random() * self.close_spread_s
            self.post(closes_in_s / 2, peer, m.RoundProgressed(0.5))
            view = self.view_of(peer)
            deadline_s = self.now_s + 30.0
            self.post(closes_in_s, peer, m.RoundClosed(round_, view, deadline_s, patience_s=5.0))
        while self.events:
            self.now_s, _, peer, event = heapq.heappop(self.events)
            self.feed(peer, event)
        for peer in self.ids:
            self.makers[peer].step(self.now_s, m.RoundSettled(round_))

    def feed(self, peer: str, event: m.Event) -> None:
        for command in self.makers[peer].step(self.now_s, event):
            self.carry_out(peer, command)
        due_s = self.makers[peer].next_deadline_s
        if due_s is not None and not isinstance(event, m.Tick):
            self.post(max(0.0, due_s - self.now_s) + 1e-6, peer, m.Tick())

    def carry_out(self, peer: str, command: m.Command) -> None:
        delay_s = self.latency_s * (0.5 + self.rng.random())
        match command:
            case m.Propose(other, round_):
                self.post(delay_s, other, m.ProposalReceived(peer, round_))
            case m.Withdraw(other, round_):
                self.post(delay_s, other, m.ProposalWithdrawn(peer, round_))
            case m.AcceptProposal(other, round_):
                self.post(delay_s, other, m.ProposalAccepted(peer, round_))
            case m.RefuseProposal(other, round_, reason):
                self.post(delay_s, other, m.ProposalRefused(peer, round_, reason))
            case m.Paired(other, _, _):
                self.pairs[peer] = other
            case m.Unmatched(_, reason):
                self.pairs.pop(peer, None)  # of somebody who had withdrawn
                self.unmatched[peer] = reason
            case m.CloseEarly():
                pass


def mutual(pairs: dict[str, str]) -> int:
    return sum(pairs.get(other) == peer for peer, other in pairs.items())


def test_equal_views_match_everybody() -> None:
    swarm = Swarm(num_peers=16, seed=1)
    for round_ in range(20):
        swarm.play_round(round_)
        assert mutual(swarm.pairs) == 16


@pytest.mark.slow
@pytest.mark.parametrize("num_peers", [8, 33, 100])
def test_views_that_differ_by_a_tenth_still_match_nearly_everybody(num_peers: int) -> None:
    swarm = Swarm(num_peers=num_peers, seed=2, missing=0.1)
    matched = 0
    rounds = 30
    for round_ in range(rounds):
        swarm.play_round(round_)
        assert len(swarm.pairs) + len(swarm.unmatched) == num_peers
        matched += mutual(swarm.pairs)
    possible = num_peers - num_peers % 2
    assert matched >= 0.95 * possible * rounds


@pytest.mark.slow
def test_partners_are_close_to_uniformly_random() -> None:
    swarm = Swarm(num_peers=8, seed=3, missing=0.1)
    rounds = 600
    counts: Counter[tuple[str, str]] = Counter()
    for round_ in range(rounds):
        swarm.play_round(round_)
        counts.update((a, b) for a, b in swarm.pairs.items() if a < b)
    expected = sum(counts.values()) / 28
    chi_squared = sum(
        (counts[pair] - expected) ** 2 / expected for pair in itertools.combinations(swarm.ids, 2)
    )
    assert chi_squared < 55.5  # 27 degrees of freedom, p = 0.001


def test_the_rank_of_a_pair_is_the_same_for_both_and_new_in_each_round() -> None:
    assert pair_rank(RUN, 3, "a", "b") == pair_rank(RUN, 3, "b", "a")
    assert pair_rank(RUN, 3, "a", "b") != pair_rank(RUN, 4, "a", "b")


class Alone:
    """One matchmaker, driven by hand."""

    def __init__(self, own_id: str = "me") -> None:
        self.maker = Matchmaker(RUN, own_id)
        self.now_s = 0.0

    def __call__(self, event: m.Event, at_s: float | None = None) -> tuple[m.Command, ...]:
        self.now_s = self.now_s if at_s is None else at_s
        return self.maker.step(self.now_s, event)

    def close(self, round_: int, *candidates: str) -> tuple[m.Command, ...]:
        self(m.RoundOpened(round_))
        return self(m.RoundClosed(round_, candidates, deadline_s=10.0, patience_s=2.0))


def test_nobody_to_ask_is_no_partner_at_once() -> None:
    assert Alone().close(0) == (m.Unmatched(0, SkipReason.NO_PARTNER),)


def test_a_proposal_for_the_round_in_training_closes_it_once_half_is_done() -> None:
    me = Alone()
    me(m.RoundOpened(0))
    assert me(m.ProposalReceived("a", 0)) == ()
    assert me(m.RoundProgressed(0.4)) == ()
    assert me(m.RoundProgressed(0.5)) == (m.CloseEarly(0),)
    assert me(m.RoundProgressed(0.6)) == ()
    commands = me(m.RoundClosed(0, ("a", "b"), 10.0, 2.0))
    assert commands == (m.AcceptProposal("a", 0), m.Paired("a", 0, leading=False))


def test_no_early_close_while_the_round_before_is_being_exchanged() -> None:
    me = Alone()
    (proposal,) = me.close(0, "a")
    assert me(m.ProposalAccepted("a", 0)) == (m.Paired("a", 0, leading=True),)
    me(m.RoundOpened(1))
    me(m.ProposalReceived("b", 1))
    assert me(m.RoundProgressed(0.9)) == ()
    assert me(m.RoundSettled(0)) == (m.CloseEarly(1),)
    assert isinstance(proposal, m.Propose)


@pytest.mark.parametrize("own_id", ["a", "z"])
def test_crossed_proposals_become_one_pair(own_id: str) -> None:
    me = Alone(own_id)
    assert me.close(0, "m") == (m.Propose("m", 0),)
    commands = me(m.ProposalReceived("m", 0))
    if own_id < "m":
        assert commands == ()
        assert me(m.ProposalAccepted("m", 0)) == (m.Paired("m", 0, leading=True),)
    else:
        assert commands == (
            m.Withdraw("m", 0),
            m.AcceptProposal("m", 0),
            m.Paired("m", 0, leading=False),
        )


def test_a_silent_peer_costs_one_patience_and_the_next_is_asked() -> None:
    me = Alone()
    (first,) = me.close(0, "a", "b")
    assert isinstance(first, m.Propose)
    other = "b" if first.peer_id == "a" else "a"
    assert me(m.Tick(), at_s=1.9) == ()
    assert me(m.Tick(), at_s=2.0) == (m.Withdraw(first.peer_id, 0), m.Propose(other, 0))
    assert me(m.ProposalRefused(other, 0, RefusalReason.BUSY)) == ()
    assert me(m.Tick(), at_s=10.0) == (m.Unmatched(0, SkipReason.DEADLINE),)


def test_who_was_behind_may_still_ask_us_until_the_deadline() -> None:
    me = Alone()
    me.close(0, "a")
    assert me(m.ProposalRefused("a", 0, RefusalReason.BEHIND)) == ()
    assert me.maker.phase is Phase.OPEN
    assert me(m.ProposalReceived("x", 0)) == (
        m.AcceptProposal("x", 0),
        m.Paired("x", 0, leading=False),
    )


@pytest.mark.parametrize("reason", [RefusalReason.AHEAD, RefusalReason.BUSY, None])
def test_when_nobody_can_come_any_more_the_search_ends_at_once(
    reason: RefusalReason | None,
) -> None:
    me = Alone()
    me.close(0, "a")
    refused = m.ProposalRefused("a", 0, reason)
    assert me(refused) == (m.Unmatched(0, SkipReason.NO_PARTNER),)


def test_behind_and_never_asking_is_no_partner() -> None:
    me = Alone()
    me.close(0, "a")
    me(m.ProposalRefused("a", 0, RefusalReason.BEHIND))
    assert me(m.Tick(), at_s=10.0) == (m.Unmatched(0, SkipReason.NO_PARTNER),)


@pytest.mark.parametrize(
    ("round_", "reason"),
    [(3, RefusalReason.AHEAD), (4, RefusalReason.BUSY), (6, RefusalReason.BEHIND)],
)
def test_refusals_name_their_reason(round_: int, reason: RefusalReason) -> None:
    me = Alone()
    me.close(4, "a")
    me(m.ProposalAccepted("a", 4))
    me(m.RoundOpened(5))
    assert me(m.ProposalReceived("b", round_)) == (m.RefuseProposal("b", round_, reason),)


def test_everything_held_is_bounded_and_the_tries_too() -> None:
    me = Alone()
    me(m.RoundOpened(0))
    for i in range(MAX_HELD_PROPOSALS):
        assert me(m.ProposalReceived(f"p{i}", 0)) == ()
    assert me(m.ProposalReceived("one more", 0)) == (
        m.RefuseProposal("one more", 0, RefusalReason.BUSY),
    )
    asking = Alone()
    commands = asking.close(0, *(f"p{i}" for i in range(2 * MAX_PROPOSAL_TRIES)))
    tries = 0
    while commands:
        (proposal,) = commands
        assert isinstance(proposal, m.Propose)
        tries += 1
        commands = asking(m.ProposalRefused(proposal.peer_id, 0, RefusalReason.BUSY))
    assert tries == MAX_PROPOSAL_TRIES


def test_held_proposals_are_refused_once_paired() -> None:
    me = Alone()
    me(m.RoundOpened(0))
    for peer in "abc":
        me(m.ProposalReceived(peer, 0))
    commands = me(m.RoundClosed(0, (), 10.0, 2.0))
    assert [type(c) for c in commands] == [
        m.AcceptProposal,
        m.Paired,
        m.RefuseProposal,
        m.RefuseProposal,
    ]


def test_a_withdrawn_proposal_is_forgotten() -> None:
    me = Alone()
    me(m.RoundOpened(0))
    me(m.ProposalReceived("a", 0))
    me(m.ProposalWithdrawn("a", 0))
    assert me(m.RoundClosed(0, (), 10.0, 2.0)) == (m.Unmatched(0, SkipReason.NO_PARTNER),)


def ranked(round_: int, *peers: str) -> list[str]:
    return sorted(peers, key=lambda peer: pair_rank(RUN, round_, "me", peer))


def test_a_proposal_that_ranks_better_than_ours_is_taken_at_once() -> None:
    best, middle, worst = ranked(0, "a", "b", "c")
    me = Alone()
    assert me.close(0, middle) == (m.Propose(middle, 0),)
    assert me(m.ProposalReceived(worst, 0)) == ()
    assert me(m.ProposalReceived(best, 0)) == (
        m.Withdraw(middle, 0),
        m.AcceptProposal(best, 0),
        m.Paired(best, 0, leading=False),
        m.RefuseProposal(worst, 0, RefusalReason.BUSY),
    )


def test_who_said_yes_too_late_looks_on() -> None:
    first, second = ranked(0, "a", "b")
    me = Alone()
    assert me.close(0, first, second) == (m.Propose(first, 0),)
    me(m.ProposalReceived(second, 0))
    taken = me(m.ProposalRefused(first, 0, RefusalReason.BUSY))
    assert taken[-1] == m.Paired(second, 0, leading=False)
    assert me(m.ProposalWithdrawn("a stranger", 0)) == ()
    assert me(m.ProposalWithdrawn(second, 0)) == (m.Propose(second, 0),)
    assert me(m.ProposalAccepted(second, 0)) == (m.Paired(second, 0, leading=True),)
    assert me(m.ProposalWithdrawn(second, 0)) == ()
    assert me.maker.statistics().paired == 1


def test_a_late_yes_is_withdrawn() -> None:
    me = Alone()
    me.close(0, "a")
    me(m.Tick(), at_s=2.0)
    assert me(m.ProposalAccepted("a", 0)) == (m.Withdraw("a", 0),)


def test_a_stopped_search_ends_with_the_reason_given() -> None:
    me = Alone()
    me.close(0, "a")
    assert me(m.SearchStopped(0, SkipReason.LEAVING)) == (
        m.Withdraw("a", 0),
        m.Unmatched(0, SkipReason.LEAVING),
    )
