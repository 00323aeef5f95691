"""What goes into the matchmaker and what comes out of it; the rules are in matchmaking.py."""

from dataclasses import dataclass

from .outcomes import RefusalReason, SkipReason


# --- events: what happened ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RoundOpened:
    """The trainer has begun this round."""

    round: int


@dataclass(frozen=True, slots=True)
class RoundProgressed:
    """This share of our quota for the round in training is done."""

    fraction: float


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """The round in training is closed, its snapshot ready: look for a partner."""

    round: int
    candidates: tuple[str, ...]
    deadline_s: float
    patience_s: float


@dataclass(frozen=True, slots=True)
class ProposalReceived:
    """A peer asks us to be its partner."""

    peer_id: str
    round: int


@dataclass(frozen=True, slots=True)
class ProposalWithdrawn:
    """A peer that asked us does not wait for our answer any more."""

    peer_id: str
    round: int


@dataclass(frozen=True, slots=True)
class ProposalAccepted:
    """The peer we asked has said yes."""

    peer_id: str
    round: int


@dataclass(frozen=True, slots=True)
class ProposalRefused:
    """The peer we asked has said no, or cannot be reached (`reason` is None)."""

    peer_id: str
    round: int
    reason: RefusalReason | None


@dataclass(frozen=True, slots=True)
class RoundSettled:
    """The exchange of the matched round is over, one way or the other."""

    round: int


@dataclass(frozen=True, slots=True)
class SearchStopped:
    """Give up the search for this round for an outer reason."""

    round: int
    reason: SkipReason


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    RoundOpened
    | RoundProgressed
    | RoundClosed
    | ProposalReceived
    | ProposalWithdrawn
    | ProposalAccepted
    | ProposalRefused
    | RoundSettled
    | SearchStopped
    | Tick
)


# --- commands: what to do -------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Propose:
    """Ask this peer."""

    peer_id: str
    round: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Stop waiting for this peer's answer."""

    peer_id: str
    round: int


@dataclass(frozen=True, slots=True)
class AcceptProposal:
    """Say yes to this peer; it leads the exchange."""

    peer_id: str
    round: int


@dataclass(frozen=True, slots=True)
class RefuseProposal:
    """Say no to this peer."""

    peer_id: str
    round: int
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class CloseEarly:
    """Close the round in training now: somebody is waiting, and half of our quota is done."""

    round: int


@dataclass(frozen=True, slots=True)
class Paired:
    """We have a partner. `leading` tells whether the exchange runs on the stream that we opened."""

    peer_id: str
    round: int
    leading: bool


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Nobody for this round."""

    round: int
    reason: SkipReason


Command = Propose | Withdraw | AcceptProposal | RefuseProposal | CloseEarly | Paired | Unmatched
