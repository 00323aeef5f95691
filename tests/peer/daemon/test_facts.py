"""What a peer counts of its own rounds."""

from peer.facts import RECENT_ROUNDS, Facts, Meetings
from protocol.limits import MAX_FRAGMENTS_FREE, MAX_LINKS, MAX_MEMBERS
from protocol.outcomes import SkipReason


def test_the_share_of_averaged_rounds_is_unknown_before_the_first():
    assert Facts("me", 1).averaged_share is None


def test_the_share_of_averaged_rounds_is_that_of_the_last_ones_alone():
    facts = Facts("me", 1)
    for _ in range(RECENT_ROUNDS):
        facts.count_skipped(SkipReason.NO_PARTNER)
    assert facts.averaged_share == 0.0
    for _ in range(RECENT_ROUNDS - 1):
        facts.count_averaged()
    assert facts.averaged_share == 1 - 1 / RECENT_ROUNDS
    facts.count_averaged()
    assert facts.averaged_share == 1.0
    assert (facts.averaged, facts.skipped) == (
        RECENT_ROUNDS,
        {SkipReason.NO_PARTNER: RECENT_ROUNDS},
    )


def test_meetings_are_counted_by_partner_and_those_first_met_longest_ago_are_forgotten():
    facts = Facts("me", 1)
    for _ in range(2):
        facts.count_meeting("partner", 0.5)
    assert (facts.meetings["partner"].averages, facts.meetings["partner"].seconds) == (2, 1.0)
    for number in range(MAX_MEMBERS):
        facts.count_meeting(str(number), 1.0)
    assert len(facts.meetings) == MAX_MEMBERS
    assert "partner" not in facts.meetings
    assert facts.num_meetings == MAX_MEMBERS + 2
    assert len(facts.newest_meetings) == MAX_FRAGMENTS_FREE


def test_what_others_tell_of_theirs_is_bounded_for_each_and_for_all():
    facts = Facts("me", 1)
    for _ in range(2):
        facts.count_others_meetings("honest", [("me", 0.5)])
    for number in range(2 * MAX_LINKS):
        facts.count_others_meetings("liar", [(str(number), 1.0)])
    assert len(facts.others_meetings["liar"]) == MAX_LINKS
    assert facts.others_meetings["honest"]["me"] == Meetings(2, 1.0)
    for number in range(2 * MAX_LINKS):
        facts.count_others_meetings(str(number), [("me", 1.0)])
    assert len(facts.others_meetings) == MAX_LINKS
    assert "honest" in facts.others_meetings, "newcomers push nobody out"
    facts.forget_others_meetings("honest")
    facts.count_others_meetings("newcomer", [("me", 1.0)])
    assert facts.others_meetings["newcomer"]["me"] == Meetings(1, 1.0)
