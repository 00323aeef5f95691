"""How averaging a round ended for us, and what two peers must agree on before it begins."""

from collections.abc import Callable
from dataclasses import dataclass

from peer.ports import PeerId
from protocol.limits import MAX_STRIPES, PIECE_BYTES, STRIPE_FROM_BYTES
from protocol.membership.group import other_group_sentence
from protocol.outcomes import RefusalReason, SkipReason
from protocol.run.codecs import CODECS
from protocol.wire.messages import Propose, Refusal

from .exchange_io import OwnVector


@dataclass(frozen=True, slots=True)
class Averaged:
    """Both sides hold each other's vector.

    Attributes:
        payload: the partner's codes; valid until the next exchange.
    """

    partner_id: PeerId
    steps: int
    tokens: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Skipped:
    """The round ended without averaging."""

    reason: SkipReason
    partner_id: PeerId | None = None


RoundOutcome = Averaged | Skipped


@dataclass(frozen=True, slots=True)
class Agreement:
    """What two peers must have in common to average.

    Attributes:
        group: its digest.
        inner_steps: H.
        declined_now: why we take no proposal at present; None when we do.
        max_stripes: further streams that one exchange may have.
    """

    group: str
    inner_steps: int
    layout_digest: str
    codec: str
    vectors: int
    padded_parameters: int
    declined_now: Callable[[], RefusalReason | None] = lambda: None
    max_stripes: int = MAX_STRIPES

    @property
    def payload_bytes(self) -> int:
        """Bytes of one contribution."""
        return self.vectors * CODECS[self.codec].code_bytes(self.padded_parameters)

    @property
    def stripes(self) -> int:
        """Further streams that an exchange of ours may have: none that would carry no piece."""
        if self.payload_bytes < STRIPE_FROM_BYTES:
            return 0
        return min(self.max_stripes, self.payload_bytes // PIECE_BYTES)

    def proposal(self, own: OwnVector, *, roster: str | None = None, meeting: int = 0) -> Propose:
        """What we say when we ask; `roster` and `meeting` of the final averaging's plan."""
        return Propose(
            group=self.group,
            round=own.round,
            step=own.step,
            final=own.final,
            layout_digest=self.layout_digest,
            codec=self.codec,
            vectors=self.vectors,
            steps=own.steps,
            tokens=own.tokens,
            stripes=self.stripes,
            roster=roster,
            meeting=meeting,
        )

    def unfit(self, proposal: Propose) -> Refusal | None:
        """Why a proposal cannot be ours to accept; None when it can."""
        if proposal.group != self.group:
            sentence = other_group_sentence(self.group, proposal.group)
            return Refusal(RefusalReason.OTHER_GROUP, sentence)
        theirs = (proposal.layout_digest, proposal.codec, proposal.vectors)
        ours = (self.layout_digest, self.codec, self.vectors)
        if theirs != ours:
            sentence = f"my model and code are {ours}, yours are {theirs}"
            return Refusal(RefusalReason.OTHER_LAYOUT, sentence)
        reason = self.declined_now()
        return None if reason is None else Refusal(reason, f"I do not average now: {reason}")


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one round's averaging took. Seconds."""

    match_s: float
    exchange_s: float
