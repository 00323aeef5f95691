"""The conversation of the daemon and the process of the directory's table.

Requests and responses go both ways, in the frames of peer/runtime/child_frames.py.

    daemon                                    table
    Store, Get, Enter: for our own peer       AskNode: put this question to that peer
    Serve: another peer's question

Peers are not judged, timed or dialled by the table: that is the daemon's. It also knows addresses,
so a node in an answer of the table has none, and those in an answer of another peer are not read.
"""

from typing import Final, Literal

import msgspec
from msgspec import Struct

from protocol.wire.directory_messages import FindRecords, KeepRecord, RecordKept, RecordsFound

CALL_TIMEOUT_S: Final = 8.0
"""A request of the daemon is given up by the table after this; a search ends after half of it."""

NodeQuestion = FindRecords | KeepRecord
NodeReply = RecordsFound | RecordKept


class TableMessage(Struct, frozen=True, tag=True, tag_field="kind"): ...


class Store(TableMessage, frozen=True):
    """Store our own record at the nodes nearest to the key."""

    key: bytes
    value: bytes
    expires_s: float


class Get(TableMessage, frozen=True):
    """Find all records under a key; answered by `Records`."""

    key: bytes


class Enter(TableMessage, frozen=True):
    """Enter the table by these peers."""

    peer_ids: tuple[str, ...]


class Serve(TableMessage, frozen=True):
    """Another peer asks this; answered by `NodeAnswer`. It came from that address."""

    peer_id: str
    address: str
    question: NodeQuestion


class AskNode(TableMessage, frozen=True):
    """Put a question to a peer; answered by `NodeAnswer`."""

    peer_id: str
    question: NodeQuestion


class NodeAnswer(TableMessage, frozen=True):
    """An answer, and the address of a peer that gave it; None where it did not."""

    answer: NodeReply | None
    address: str = ""


class Records(TableMessage, frozen=True):
    records: tuple[tuple[str, bytes], ...]


class TableRequest(TableMessage, frozen=True):
    """A request of the daemon.

    Attributes:
        ahead_s: the swarm's clock less the machine's.
    """

    number: int
    body: Store | Get | Enter | Serve
    ahead_s: float


class NodeRequest(TableMessage, frozen=True):
    """A request of the table."""

    number: int
    body: AskNode


class Response(TableMessage, frozen=True):
    """The outcome of the request with this number; the failure is a name, for people."""

    number: int
    body: NodeAnswer | Records | None = None
    failure: Literal["", "timeout", "error"] = ""


class Up(TableMessage, frozen=True):
    """The table can be asked from now on."""


TO_TABLE: Final = msgspec.msgpack.Decoder(TableRequest | Response)
FROM_TABLE: Final = msgspec.msgpack.Decoder(Up | NodeRequest | Response)
