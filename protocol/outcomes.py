"""Closed lists of outcomes, by the names that `status`, metrics and the event log show.

Numbers are right, or the step is skipped visibly: a round ends averaged, or in a `SkipReason`.
"""

from enum import StrEnum


class SkipReason(StrEnum):
    """Why a round ended without averaging."""

    NO_PARTNER = "no_partner"
    """Nobody to ask, or everybody asked refused."""
    DEADLINE = "deadline"
    """Nobody answered, or the exchange did not end, within the deadline."""
    PARTNER_LOST = "partner_lost"
    PARTNER_STALLED = "partner_stalled"
    """The partner's vector stopped arriving."""
    BAD_VECTOR = "bad_vector"
    """The partner's vector had the wrong length, digest or layout, or was not finite."""
    IMPLAUSIBLE = "implausible"
    """The partner's vector is much further from ours than those of others were of late."""
    UNHELPFUL = "unhelpful"
    """The average raises our loss, and helps less than those with others did of late."""
    UNSETTLED = "unsettled"
    """We hold the partner's vector but never learned whether it holds ours."""
    OWN_MISTAKE = "own_mistake"
    """We tried in the exchange what the protocol does not allow: a bug here."""
    LEAVING = "leaving"


class AuditOutcome(StrEnum):
    """How the audit of an average ended (protocol/diloco/audits.py)."""

    TRUE = "true"
    """The leaf follows from what the owner was sent."""
    LIE = "lie"
    """It does not, and that is proved."""
    UNOPENED = "unopened"
    """The owner is there, and showed nothing, or nothing that its result names."""
    INCONCLUSIVE = "inconclusive"
    """The owner has gone."""


class RefusalReason(StrEnum):
    BUSY = "busy"
    """Not looking for a partner: training, or in an exchange."""
    MET = "met"
    """The two have averaged of late, and the asked peer still waits for another."""
    BEHIND = "behind"
    """The asked peer's snapshot is too far behind the asker's; of a microbatch, it is of an
    iteration that is past."""
    AHEAD = "ahead"
    OTHER_ROSTER = "other_roster"
    """The two do not see the same peers at the end of the run."""
    NOT_TRAINING = "not_training"
    """The asked peer is starting, downloading or finished."""
    OTHER_RUN = "other_run"
    OTHER_GROUP = "other_group"
    """It is meant for peers that hold another part of the model."""
    OTHER_LAYOUT = "other_layout"
    VERSION = "version"
    DUPLICATE_IDENTITY = "duplicate_identity"
    NOT_ADMITTED = "not_admitted"
    IGNORED = "ignored"
    """The asker has broken the protocol too often of late; it may come again in some minutes."""
    TOO_MANY = "too_many"
    """A bound of the asked peer is reached; ask another, or later."""
    NOT_LINKED = "not_linked"
    """The sender, or a peer that it names, is no member of the group that we are linked with."""
    NOT_OWNER = "not_owner"
    """The sender of a result is by no view near ours the owner of what it is about."""
    IMPLAUSIBLE = "implausible"
    """No honest peer can have come to it."""
    TWICE = "twice"
    """The same was sent before, and that stands."""
    UNAVAILABLE = "unavailable"
    """What was asked for is not there, or older than asked for."""
    TOO_LARGE = "too_large"
    LEAVING = "leaving"

    @classmethod
    def _missing_(cls, value: object) -> "RefusalReason | None":
        """A reason of a later version: who refuses for it is there, and may be asked again."""
        return cls.UNAVAILABLE if isinstance(value, str) else None
