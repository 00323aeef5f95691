"""What peers say to each other of averages that are worked out again, on `/loco/fragment/1`.

The rules are in protocol/diloco/audits.py, what openings and evidence are in evidence.py beside it.
"""

from dataclasses import dataclass
from typing import Annotated, Final

from .field_types import Count, Digest, PeerIdText
from .fields import Integer
from .fragment_messages import ChunkIndex, FragmentIndex


@dataclass(frozen=True, slots=True)
class GetOpening:
    """Show me this leaf of all that your result for this chunk was made of."""

    group: Digest
    fragment: FragmentIndex
    cycle: Count
    chunk: ChunkIndex
    leaf: Annotated[int, Integer(0, (1 << 32) - 1)]


@dataclass(frozen=True, slots=True)
class Opening:
    """Answer to GetOpening: the contributions, each with its leaf, follow."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """The owner of this result does not open it to the sender; see for yourselves."""

    group: Digest
    fragment: FragmentIndex
    cycle: Count
    owner: PeerIdText


@dataclass(frozen=True, slots=True)
class Proof:
    """The owner has lied: a result, and what shows that it does not follow from what it names."""

    group: Digest
    owner: PeerIdText


AuditMessage = GetOpening | Opening | Doubt | Proof
AUDIT_TYPES: Final[dict[str, type[AuditMessage]]] = {
    "get_opening": GetOpening,
    "opening": Opening,
    "doubt": Doubt,
    "proof": Proof,
}
