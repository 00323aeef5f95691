"""Questions on `/loco/hello/1` whether an identity is alive elsewhere; the codec: messages.py."""

from dataclasses import dataclass
from typing import Annotated

from .field_types import Count, PeerIdText
from .fields import Flag


@dataclass(frozen=True, slots=True)
class AskAlive:
    """Is that peer alive in another incarnation than this one? Please see whether it beats."""

    peer_id: PeerIdText
    incarnation: Count


@dataclass(frozen=True, slots=True)
class AliveReply:
    """Answer to AskAlive: whether another incarnation has just shown the sender that it lives."""

    peer_id: PeerIdText
    incarnation: Count
    alive: Annotated[bool, Flag()]
