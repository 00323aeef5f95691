"""What a peer counts of its own rounds."""

from peer.facts import RECENT_ROUNDS, Facts
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
