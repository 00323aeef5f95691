"""Signed link vectors: what one peer of a pipeline has measured of its links and of its own work.

    bytes   body + Ed25519 signature of ("loco links 2", run id, peer id, body)
    body    the vector as a msgpack list

Anybody can pass a vector on, and nobody can change it: a snapshot (snapshots.py) is made of them.
Of two vectors of a peer the newer one counts: the later incarnation, then the higher number. There
is exactly one encoding. 0 stands for what has not been measured.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from protocol.address.peer_id import SIGNATURE_BYTES
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import MAX_LINK_VECTOR_BYTES, MAX_LINKS, MAX_STAGES
from protocol.membership.records import Sign, Verify, verify_with_peer_id
from protocol.pipeline.problem import US_PER_S
from protocol.wire.fields import Count, PeerIdText

MAX_US: Final = 10**12
MAX_SLOTS: Final = 4096
_CONTEXT: Final = b"loco links 2\0"
Microseconds = Annotated[int, Meta(ge=0, le=MAX_US)]


class LinkTimes(Struct, frozen=True, order=True, array_like=True):
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


class WorkTimes(Struct, frozen=True, array_like=True):
    """What one microbatch takes at a peer's stage; 0 is unknown.

    Attributes:
        loss_us: norm, head and loss there and back, at a data peer.
    """

    forward_us: Microseconds = 0
    backward_us: Microseconds = 0
    loss_us: Microseconds = 0


class LinkVector(Struct, frozen=True, array_like=True):
    """What one peer has measured of its links and of its own work.

    Attributes:
        number: of this peer's vectors in this incarnation.
        slots: microbatches that it holds at once.
        links: by peer id.
    """

    peer_id: PeerIdText
    incarnation: Count
    number: Count
    stage: Annotated[int, Meta(ge=0, lt=MAX_STAGES)]
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
    work: WorkTimes
    links: Annotated[tuple[LinkTimes, ...], Meta(max_length=MAX_LINKS)]

    @property
    def version(self) -> tuple[int, int]:
        """What is newer is greater."""
        return self.incarnation, self.number


def encode_vector(vector: LinkVector, run_id: str, sign: Sign) -> bytes:
    """A vector as it travels.

    Raises:
        LocalProtocolError: it would be longer than MAX_LINK_VECTOR_BYTES.
    """
    body = msgspec.msgpack.encode(vector)
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
        vector = msgspec.msgpack.decode(body, type=LinkVector)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a link vector: {error}") from error
    names = [link.peer_id for link in vector.links]
    if names != sorted(set(names)) or vector.peer_id in names:
        raise RemoteProtocolError("a link vector names other peers, each once, in order")
    if msgspec.msgpack.encode(vector) != body:
        raise RemoteProtocolError("a link vector that is not in canonical form")
    if not verify(vector.peer_id, _signed_bytes(run_id, vector.peer_id, body), signature):
        raise RemoteProtocolError(f"the link vector's signature is not that of {vector.peer_id}")
    return vector


def _signed_bytes(run_id: str, peer_id: str, body: bytes) -> bytes:
    names = b"".join(
        len(name).to_bytes(2, "big") + name for name in (run_id.encode(), peer_id.encode())
    )
    return _CONTEXT + names + body
