"""The section of the run spec that says who may join (protocol/admission/register.py)."""

from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from protocol.address.peer_id import public_key_from_peer_id
from protocol.errors import RemoteProtocolError

from .section import LIST, Section

MAX_LISTED: Final = 1024


def _peer_id(text: str) -> str:
    try:
        public_key_from_peer_id(text)
    except RemoteProtocolError as error:
        raise ValueError(f"not a peer id ({error}); `loco-peer status` shows that of a home") from (
            error
        )
    return text


class AdmissionSection(Section):
    """Which peers may join."""

    mode: Literal["open", "invite", "list"] = "open"
    """Everybody, holders of an invitation, or the peers that are named here."""
    peers: Annotated[
        tuple[Annotated[str, AfterValidator(_peer_id)], ...], Field(max_length=MAX_LISTED), LIST
    ] = ()
    """Peer ids that may join in any case."""
    secret_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Digest of the run's secret; set by the founder's `start` where not everybody may join."""

    @model_validator(mode="after")
    def _open_names_nobody(self) -> Self:
        if self.mode == "open" and self.peers:
            raise self._misfit(
                "peers", "an open run takes everybody; set mode to 'list' or leave it out"
            )
        return self
