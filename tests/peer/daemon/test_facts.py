"""What a peer counts of its own rounds."""

from peer.facts import RECENT_ROUNDS, Facts, PartnerRecord
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
        facts.count_partner("partner", 0.5)
    assert (facts.partners["partner"].averages, facts.partners["partner"].seconds) == (2, 1.0)
    for number in range(MAX_MEMBERS):
        facts.count_partner(str(number), 1.0)
    assert len(facts.partners) == MAX_MEMBERS
    assert "partner" not in facts.partners
    assert facts.num_pair_averages == MAX_MEMBERS + 2
    assert len(facts.newest_pair_averages) == MAX_FRAGMENTS_FREE


def test_what_others_tell_of_theirs_is_bounded_for_each_and_for_all():
    facts = Facts("me", 1)
    for _ in range(2):
        facts.count_others_partners("honest", [("me", 0.5)])
    for number in range(2 * MAX_LINKS):
        facts.count_others_partners("liar", [(str(number), 1.0)])
    assert len(facts.others_partners["liar"]) == MAX_LINKS
    assert facts.others_partners["honest"]["me"] == PartnerRecord(2, 1.0)
    for number in range(2 * MAX_LINKS):
        facts.count_others_partners(str(number), [("me", 1.0)])
    assert len(facts.others_partners) == MAX_LINKS
    assert "honest" in facts.others_partners, "newcomers push nobody out"
    facts.forget_others_partners("honest")
    facts.count_others_partners("newcomer", [("me", 1.0)])
    assert facts.others_partners["newcomer"]["me"] == PartnerRecord(1, 1.0)
