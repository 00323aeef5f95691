"""Signed link vectors: what one peer of a pipeline has measured of its links and of its own work.

    bytes   body + Ed25519 signature of ("loco links 2", run id, peer id, body)
    body    the vector as a msgpack map (protocol/wire/fields.py)

Anybody can pass a vector on, and nobody can change it: a snapshot (snapshots.py) is made of them.
Of two vectors of a peer the newer one counts: the later incarnation, then the higher number. There
is exactly one encoding. 0 stands for what has not been measured.
"""

from dataclasses import dataclass
from typing import Annotated, Final

import msgpack

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import MAX_LINK_VECTOR_BYTES, MAX_LINKS, MAX_RELAYS_OF_PATH
from protocol.membership.records import SIGNATURE_BYTES, Sign, Verify, verify_with_peer_id
from protocol.pipeline.problem import US_PER_S
from protocol.wire.fields import (
    Count,
    Integer,
    Many,
    PeerIdText,
    Record,
    write_record,
)

MAX_US: Final = 10**12
MAX_SLOTS: Final = 4096
_CONTEXT: Final = b"loco links 2\0"
Microseconds = Annotated[int, Integer(0, MAX_US)]


@dataclass(frozen=True, slots=True, order=True)
class LinkTimes:
    """A link as one of its ends has measured it; 0 is unknown.

    Attributes:
        rtt_us: there and back, for what is small.
        out_us: how long a boundary that leaves for the peer occupies the line.
        in_us: the same of one that comes from it.
    """

    peer_id: PeerIdText
    rtt_us: Microseconds = 0
    out_us: Microseconds = 0
    in_us: Microseconds = 0

    @property
    def out_s(self) -> float:
        """`out_us` in seconds."""
        return self.out_us / US_PER_S


@dataclass(frozen=True, slots=True)
class WorkTimes:
    """What one microbatch takes at a peer's stage; 0 is unknown.

    Attributes:
        loss_us: norm, head and loss there and back, at a data peer.
    """

    forward_us: Microseconds = 0
    backward_us: Microseconds = 0
    loss_us: Microseconds = 0


@dataclass(frozen=True, slots=True)
class LinkVector:
    """See the top of the file.

    Attributes:
        number: of this peer's vectors in this incarnation.
        slots: microbatches that it holds at once.
        links: by peer id.
    """

    peer_id: PeerIdText
    incarnation: Count
    number: Count
    stage: Annotated[int, Integer(0, MAX_RELAYS_OF_PATH)]
    slots: Annotated[int, Integer(1, MAX_SLOTS)]
    work: Annotated[WorkTimes, Record(WorkTimes)]
    links: Annotated[tuple[LinkTimes, ...], Many(Record(LinkTimes), MAX_LINKS)]

    @property
    def version(self) -> tuple[int, int]:
        """What is newer is greater."""
        return self.incarnation, self.number


def encode_vector(vector: LinkVector, run_id: str, sign: Sign) -> bytes:
    """A vector as it travels.

    Raises:
        LocalProtocolError: it would be longer than MAX_LINK_VECTOR_BYTES.
    """
    body = _packed(vector)
    data = body + sign(_signed_bytes(run_id, vector.peer_id, body))
    if len(data) > MAX_LINK_VECTOR_BYTES:
        raise LocalProtocolError(f"a link vector of {len(data)} bytes")
    return data


def decode_vector(data: bytes, run_id: str, verify: Verify = verify_with_peer_id) -> LinkVector:
    """A vector that came from another peer.

    Raises:
        RemoteProtocolError: anything about it is wrong.
    """
    if not SIGNATURE_BYTES < len(data) <= MAX_LINK_VECTOR_BYTES:
        raise RemoteProtocolError(f"a link vector of {len(data)} bytes")
    body, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
    try:
        tree = msgpack.unpackb(body, raw=False, max_ext_len=0, strict_map_key=True)
        vector: LinkVector = Record(LinkVector).read(tree)
    except Exception as error:
        raise RemoteProtocolError(f"not a link vector: {error}") from error
    names = [link.peer_id for link in vector.links]
    if names != sorted(set(names)) or vector.peer_id in names:
        raise RemoteProtocolError("a link vector names other peers, each once, in order")
    if _packed(vector) != body:
        raise RemoteProtocolError("a link vector that is not in canonical form")
    if not verify(vector.peer_id, _signed_bytes(run_id, vector.peer_id, body), signature):
        raise RemoteProtocolError(f"the link vector's signature is not that of {vector.peer_id}")
    return vector


def _signed_bytes(run_id: str, peer_id: str, body: bytes) -> bytes:
    names = b"".join(
        len(name).to_bytes(2, "big") + name for name in (run_id.encode(), peer_id.encode())
    )
    return _CONTEXT + names + body


def _packed(vector: LinkVector) -> bytes:
    packed: bytes = msgpack.packb(write_record(vector))
    return packed
