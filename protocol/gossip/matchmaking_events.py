"""What goes into the matchmaker and what comes out of it; the rules are in matchmaking.py.

`round` is the asker's own number of the round whose snapshot it wants averaged: numbers of two
peers say nothing to each other.
"""

from dataclasses import dataclass

from protocol.outcomes import RefusalReason, SkipReason


@dataclass(frozen=True, slots=True)
class RoundSnapshot:
    """What a free peer wants averaged.

    Attributes:
        round: the peer's own number of the round that it closed.
        step: the nominal step at which the snapshot was taken.
        final: it belongs to the final averaging, after the last training step.
    """

    round: int
    step: int
    final: bool = False


# --- events: what happened ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class BecameFree:
    """A round is closed, its snapshot is ready: look for a partner.

    Attributes:
        fresh_until_s: until then only a partner that was not met of late will do.
        deadline_s: then the search ends.
    """

    snapshot: RoundSnapshot
    fresh_until_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PeersSeen:
    """How the group looks now.

    Attributes:
        free: the others that say they are free.
        present: how many others there are that are free, or may become so.
    """

    free: tuple[tuple[str, RoundSnapshot], ...]
    present: int


@dataclass(frozen=True, slots=True)
class ProposalReceived:
    """A peer asks us to be its partner."""

    peer_id: str
    snapshot: RoundSnapshot


@dataclass(frozen=True, slots=True)
class ProposalWithdrawn:
    """A peer that asked us does not wait for our answer any more."""

    peer_id: str
    round: int


@dataclass(frozen=True, slots=True)
class ProposalAccepted:
    """The peer that we asked with the snapshot of our `round` has said yes."""

    peer_id: str
    round: int


@dataclass(frozen=True, slots=True)
class ProposalRefused:
    """The peer that we asked has said no, or cannot be reached (`reason` is None)."""

    peer_id: str
    round: int
    reason: RefusalReason | None


@dataclass(frozen=True, slots=True)
class RoundSettled:
    """The exchange of our `round` is over, one way or the other."""

    round: int


@dataclass(frozen=True, slots=True)
class PartnerDoubted:
    """What a partner brought to an exchange could not be used."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class SearchStopped:
    """Give up the search for this round for an outer reason."""

    round: int
    reason: SkipReason


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


MatchEvent = (
    BecameFree
    | PeersSeen
    | ProposalReceived
    | ProposalWithdrawn
    | ProposalAccepted
    | ProposalRefused
    | RoundSettled
    | PartnerDoubted
    | SearchStopped
    | Tick
)


# --- commands: what to do -------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SendProposal:
    """Ask this peer to average with the snapshot of our `round`."""

    peer_id: str
    round: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Stop waiting for this peer's answer."""

    peer_id: str
    round: int


@dataclass(frozen=True, slots=True)
class AcceptProposal:
    """Say yes to this peer, which asked with its `round`; it leads the exchange."""

    peer_id: str
    round: int


@dataclass(frozen=True, slots=True)
class RefuseProposal:
    """Say no to this peer, which asked with its `round`."""

    peer_id: str
    round: int
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class Paired:
    """We have a partner for our `round`. `leading`: we asked, so we begin the exchange."""

    peer_id: str
    round: int
    leading: bool


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Nobody for our `round`."""

    round: int
    reason: SkipReason


MatchCommand = SendProposal | Withdraw | AcceptProposal | RefuseProposal | Paired | Unmatched
