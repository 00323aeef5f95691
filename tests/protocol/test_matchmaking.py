"""Matchmakers event by event, and many of them over lines that take time."""

import pytest

from protocol.gossip import matchmaking as m
from protocol.gossip.matchmaking import (
    MAX_DISTANCE_ROUNDS,
    PROPOSAL_ANSWER_S,
    RESTS,
    Matchmaker,
    pair_rank,
)
from protocol.limits import MAX_HELD_PROPOSALS, MAX_PROPOSAL_TRIES
from protocol.membership.book import BackOff
from protocol.outcomes import RefusalReason, SkipReason

GROUP = "group"
H = 10


def snapshot(round_: int = 0, step: int = 0, *, final: bool = False) -> m.RoundSnapshot:
    return m.RoundSnapshot(round_, step, final)


class Alone:
    """One matchmaker, driven by hand."""

    def __init__(self, own_id: str = "me") -> None:
        self.maker = Matchmaker(GROUP, own_id, H)
        self.now_s = 0.0

    def see(self, *free: str, present: int | None = None) -> list[m.MatchCommand]:
        """These are free, each with its round 7; so many are there."""
        told = tuple((peer, snapshot(7)) for peer in free)
        return self.maker.seen(self.now_s, told, len(free) if present is None else present)

    def become_free(self, round_: int = 0, fresh_s: float = 0.0) -> list[m.MatchCommand]:
        return self.look(snapshot(round_), fresh_s)

    def look(
        self, ours: m.RoundSnapshot, fresh_s: float = 0.0, search_s: float = 60.0
    ) -> list[m.MatchCommand]:
        return self.maker.search(self.now_s, ours, self.now_s + fresh_s, self.now_s + search_s)

    def asked_by(self, peer: str, round_: int = 7) -> list[m.MatchCommand]:
        return self.maker.asked(self.now_s, peer, snapshot(round_))

    def refused_by(
        self, peer: str, round_: int, reason: RefusalReason | None
    ) -> list[m.MatchCommand]:
        return self.maker.refused(self.now_s, peer, round_, reason)

    def withdrawn_by(self, peer: str, round_: int) -> list[m.MatchCommand]:
        return self.maker.withdrawn(self.now_s, peer, round_)

    def tick(self, at_s: float) -> list[m.MatchCommand]:
        self.now_s = at_s
        return self.maker.tick(at_s)


def ranked(*peers: str) -> list[str]:
    """Best first, for our round 0 and their round 7."""
    return sorted(peers, key=lambda peer: pair_rank(GROUP, ("me", 0), (peer, 7)))


# --- the rank of a pair ---------------------------------------------------------------------------
def test_the_rank_of_a_pair_is_the_same_for_both_and_new_with_every_round_of_either() -> None:
    assert pair_rank(GROUP, ("a", 3), ("b", 9)) == pair_rank(GROUP, ("b", 9), ("a", 3))
    ranks = {pair_rank(GROUP, ("a", mine), ("b", theirs)) for mine in (3, 4) for theirs in (8, 9)}
    assert len(ranks) == 4
    assert pair_rank("another", ("a", 3), ("b", 9)) not in ranks


# --- asking ---------------------------------------------------------------------------------------
def test_nobody_there_is_no_partner_at_once() -> None:
    assert Alone().become_free() == [m.Unmatched(0, SkipReason.NO_PARTNER)]


def is_open(me: Alone) -> bool:
    """Whether it looks for a partner, and has nobody to ask."""
    return me.maker.is_looking and me.maker._search.pending is None


def test_the_best_ranked_free_peer_is_asked_and_each_of_them_once() -> None:
    first, second, third = ranked("a", "b", "c")
    me = Alone()
    me.see("a", "b", "c")
    assert me.become_free() == [m.SendProposal(first, 0)]
    assert me.refused_by(first, 0, RefusalReason.BUSY) == [m.SendProposal(second, 0)]
    assert me.refused_by(second, 0, RefusalReason.BUSY) == [m.SendProposal(third, 0)]
    assert me.refused_by(third, 0, RefusalReason.BUSY) == []
    assert is_open(me)
    assert me.see("a", "b", "c") == []


def test_a_peer_that_is_free_again_with_another_round_may_be_asked_again() -> None:
    me = Alone()
    me.see("a")
    me.become_free()
    me.refused_by("a", 0, RefusalReason.BUSY)
    assert me.maker.seen(me.now_s, [("a", snapshot(8))], 1) == [m.SendProposal("a", 0)]


def test_a_search_goes_on_while_somebody_may_become_free_and_ends_when_nobody_can() -> None:
    me = Alone()
    me.see(present=3)
    assert me.become_free() == []
    assert me.see("a", present=3) == [m.SendProposal("a", 0)]
    assert me.refused_by("a", 0, RefusalReason.BUSY) == []
    assert me.see(present=0) == [m.Unmatched(0, SkipReason.NO_PARTNER)]


def test_a_search_ends_at_its_deadline() -> None:
    me = Alone()
    me.see(present=1)
    me.become_free()
    assert me.maker.next_deadline_s == 60.0
    assert me.tick(60.0) == [m.Unmatched(0, SkipReason.NO_PARTNER)]
    assert me.maker.next_deadline_s is None


def test_the_tries_of_a_search_are_bounded() -> None:
    me = Alone()
    me.see(*(f"p{i}" for i in range(2 * MAX_PROPOSAL_TRIES)))
    commands, tries = me.become_free(), 0
    while commands:
        (proposal,) = commands
        assert isinstance(proposal, m.SendProposal)
        tries += 1
        commands = me.refused_by(proposal.peer_id, 0, RefusalReason.BUSY)
    assert tries == MAX_PROPOSAL_TRIES


@pytest.mark.parametrize("reached", [False, True])
def test_a_silent_or_unreachable_peer_is_left_in_peace_for_a_while(reached: bool) -> None:
    first, second = ranked("a", "b")
    me = Alone()
    me.see("a", "b")
    me.become_free()
    if reached:  # it takes the proposal, and says nothing
        assert me.tick(PROPOSAL_ANSWER_S) == [m.Withdraw(first, 0), m.SendProposal(second, 0)]
    else:
        assert me.refused_by(first, 0, None) == [m.SendProposal(second, 0)]
    me.maker.accepted(second, 0)
    me.maker.end(0)
    me.see("a", "b", present=9)
    me.look(snapshot(1), search_s=1e9)
    me.refused_by(second, 1, RefusalReason.BUSY)
    assert me.see(first, present=9) == []
    me.now_s += RESTS.first_s
    assert me.see(first, present=9) == [m.SendProposal(first, 1)]


def test_silence_to_the_end_is_told_from_an_empty_swarm() -> None:
    me = Alone()
    me.see("a")
    me.look(snapshot(0), search_s=PROPOSAL_ANSWER_S)
    assert me.tick(PROPOSAL_ANSWER_S) == [
        m.Withdraw("a", 0),
        m.Unmatched(0, SkipReason.DEADLINE),
    ]


# --- being asked ----------------------------------------------------------------------------------
def test_a_peer_that_is_not_free_refuses_at_once_and_closes_nothing_early() -> None:
    me = Alone()
    assert me.asked_by("a") == [m.RefuseProposal("a", 7, RefusalReason.BUSY)]


def test_a_free_peer_that_waits_says_yes() -> None:
    me = Alone()
    me.see(present=1)
    me.become_free()
    assert me.asked_by("a") == [m.Paired("a", 0, 7)]
    assert me.asked_by("b") == [m.RefuseProposal("b", 7, RefusalReason.BUSY)]


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (snapshot(7, MAX_DISTANCE_ROUNDS * H), None),
        (snapshot(7, 1 + MAX_DISTANCE_ROUNDS * H), RefusalReason.BEHIND),
        (snapshot(7, final=True), RefusalReason.BEHIND),
    ],
)
def test_only_near_snapshots_of_the_same_kind_are_averaged(
    theirs: m.RoundSnapshot, reason: RefusalReason | None
) -> None:
    me = Alone()
    me.see(present=1)
    me.become_free()
    answer = me.maker.asked(me.now_s, "a", theirs)[0]
    if reason is None:
        assert answer == m.Paired("a", 0, 7)
    else:
        assert answer == m.RefuseProposal("a", 7, reason)
    asking = Alone()
    asking.maker.seen(asking.now_s, [("a", theirs)], 1)
    assert (asking.become_free() == []) is (reason is not None)


def test_a_peer_that_is_far_behind_is_told_that_we_are_ahead() -> None:
    me = Alone()
    me.see(present=1)
    me.look(snapshot(0, 1000))
    assert me.asked_by("a") == [m.RefuseProposal("a", 7, RefusalReason.AHEAD)]


def test_what_is_held_is_bounded() -> None:
    *held, best = reversed(ranked(*(f"p{i}" for i in range(MAX_HELD_PROPOSALS + 2))))
    me = Alone()
    me.see(best)
    me.become_free()
    for peer in held[:MAX_HELD_PROPOSALS]:
        assert me.asked_by(peer) == []
    refused = m.RefuseProposal(held[-1], 7, RefusalReason.TOO_MANY)
    assert me.asked_by(held[-1]) == [refused]


@pytest.mark.parametrize("own_id", ["a", "z"])
def test_crossed_proposals_become_one_pair(own_id: str) -> None:
    me = Alone(own_id)
    me.see("m")
    assert me.become_free() == [m.SendProposal("m", 0)]
    commands = me.asked_by("m")
    if own_id < "m":
        assert commands == []
        assert me.maker.accepted("m", 0) == [m.Paired("m", 0, None)]
    else:
        assert commands == [m.Withdraw("m", 0), m.Paired("m", 0, 7)]


def test_a_proposal_that_ranks_better_than_ours_is_taken_at_once() -> None:
    best, middle, worst = ranked("a", "b", "c")
    me = Alone()
    me.see(middle)
    me.become_free()
    assert me.asked_by(worst) == []
    assert me.asked_by(best) == [
        m.Withdraw(middle, 0),
        m.Paired(best, 0, 7),
        m.RefuseProposal(worst, 7, RefusalReason.BUSY),
    ]


def test_when_ours_is_refused_the_best_one_held_is_taken() -> None:
    best, middle, worst = ranked("a", "b", "c")
    me = Alone()
    me.see(best)
    me.become_free()
    me.asked_by(worst)
    me.asked_by(middle)
    commands = me.refused_by(best, 0, RefusalReason.BUSY)
    assert commands[0] == m.Paired(middle, 0, 7)


def test_a_withdrawn_proposal_is_forgotten() -> None:
    first, second = ranked("a", "b")
    me = Alone()
    me.see(first)
    me.become_free()
    me.asked_by(second)
    me.withdrawn_by(second, 7)
    assert me.refused_by(first, 0, RefusalReason.BUSY) == []


def test_a_peer_that_said_yes_too_late_looks_on() -> None:
    me = Alone()
    me.see(present=2)
    me.become_free()
    me.asked_by("a")
    assert me.withdrawn_by("a stranger", 7) == []
    assert me.withdrawn_by("a", 7) == []
    assert is_open(me)
    assert me.asked_by("b")[-1] == m.Paired("b", 0, 7)


def test_a_late_yes_is_withdrawn() -> None:
    me = Alone()
    me.see("a", present=2)
    me.become_free()
    me.tick(PROPOSAL_ANSWER_S)
    assert me.maker.accepted("a", 0) == [m.Withdraw("a", 0)]


def test_a_stopped_search_ends_with_the_reason_given() -> None:
    me = Alone()
    me.see("a")
    me.become_free()
    assert me.maker.end(0) == [
        m.Withdraw("a", 0),
        m.Unmatched(0, SkipReason.LEAVING),
    ]


# --- partners that were met of late ---------------------------------------------------------------
def met(fresh_s: float, *free: str, present: int) -> Alone:
    """One that has just averaged with `a`, and is free again."""
    me = Alone()
    me.see("a", present=present)
    me.become_free()
    me.maker.accepted("a", 0)
    me.maker.end(0)
    me.see(*free, present=present)
    me.look(snapshot(1), fresh_s)
    return me


def test_the_peer_met_last_is_put_off_until_the_patience_for_others_ends() -> None:
    me = met(5.0, "a", present=3)
    assert is_open(me)
    assert me.maker.next_deadline_s == 5.0
    assert me.asked_by("a") == [m.RefuseProposal("a", 7, RefusalReason.MET)]
    assert me.tick(4.9) == []
    assert me.tick(5.0) == [m.SendProposal("a", 1)]


def test_another_peer_goes_before_the_one_met_last() -> None:
    for other in "bcdefgh":  # whatever the rank
        me = met(0.0, "a", other, present=3)
        assert me.maker._search.pending is not None
        commands = me.maker.end(1)
        assert commands[0] == m.Withdraw(other, 1)


def test_of_two_peers_nobody_is_put_off() -> None:
    assert met(5.0, "a", present=1).maker._search.pending is not None


# --- peers that rest ------------------------------------------------------------------------------
def test_a_rest_doubles_up_to_a_bound_and_ends_with_an_answer() -> None:
    rest, now_s, rests = BackOff(*m.RESTS), 0.0, []
    for _ in range(7):
        rest.failed("a", now_s)
        rest_s = RESTS.first_s
        while not rest.is_due("a", now_s + rest_s):
            rest_s *= 2
        rests.append(min(rest_s, RESTS.most_s))
        now_s += rest_s
    assert rests == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    rest.answered("a")
    assert rest.is_due("a", now_s)
    rest.failed("a", now_s)
    assert rest.is_due("a", now_s + RESTS.first_s)


def test_what_has_long_been_over_is_forgotten() -> None:
    rest = BackOff(*m.RESTS)
    rest.failed("a", 0.0)
    rest.failed("b", RESTS.first_s + RESTS.most_s + 1)
    assert list(rest._kept) == ["b"]


# --- one that would be everybody's partner --------------------------------------------------------
def partners_in(rounds: int, honest: list[str], liar: str) -> list[str]:
    """One that is free whenever we are, asks at once, and ranks first, among others that are free.

    The others are free a moment after it, so that it is the first whom we could take each time.
    """
    alone, partners = Alone(), []
    for round_ in range(rounds):
        alone.see(liar, present=len(honest) + 1)
        told = [*alone.become_free(round_), *alone.asked_by(liar, 10**6 + round_)]
        if not any(isinstance(command, m.Paired) for command in told):
            told = [*told, *alone.refused_by(liar, round_, RefusalReason.BUSY)]
        for peer in honest[round_ % len(honest) :] + honest:
            if not any(isinstance(command, m.Paired) for command in told):
                told = [*told, *alone.asked_by(peer, 7 + round_)]
        partners += [command.peer_id for command in told if isinstance(command, m.Paired)]
        alone.maker.end(round_)
    return partners


def test_one_that_is_always_first_is_not_everybodys_partner_all_the_time() -> None:
    honest = [f"p{number}" for number in range(20)]
    partners = partners_in(64, honest, "liar")
    assert len(partners) == 64
    assert partners.count("liar") <= 64 / 4


def test_with_one_or_two_others_a_partner_is_taken_as_often_as_it_comes() -> None:
    assert partners_in(40, ["a"], "b").count("b") > 10


def test_a_partner_that_brought_poison_rests_and_is_refused_with_that_reason() -> None:
    alone = Alone()
    alone.maker.doubt(alone.now_s, "liar")
    alone.see("liar", present=2)
    assert alone.become_free() == []
    assert alone.asked_by("liar") == [m.RefuseProposal("liar", 7, RefusalReason.IMPLAUSIBLE)]
    alone.tick(RESTS.first_s + 1.0)
    assert not isinstance(alone.asked_by("liar")[0], m.RefuseProposal)
