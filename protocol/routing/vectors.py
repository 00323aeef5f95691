"""Signed link vectors: what one peer of a pipeline has measured of its links and of its own work.

    bytes   body + Ed25519 signature of ("loco links 1", run id, peer id, body)
    body    msgpack [version of this form, incarnation, number, stage, slots, forward_us,
            backward_us, loss_us, [[peer id, rtt_us, out_us, in_us], ...]]

Anybody can pass a vector on, and nobody can change it: a snapshot (snapshot.py) is made of them.
Of two vectors of a peer the newer one counts: the later incarnation, then the higher number. There
is exactly one encoding. 0 stands for what has not been measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import MAX_LINK_VECTOR_BYTES, MAX_LINKS, MAX_RELAYS_OF_PATH
from protocol.membership.records import SIGNATURE_BYTES, Sign, Verify, verify_with_peer_id
from protocol.pipeline.problem import US_PER_S

FORM: Final = 1
MAX_US: Final = 10**12
MAX_NUMBER: Final = (1 << 63) - 1
MAX_SLOTS: Final = 4096
MAX_PEER_ID_CHARS: Final = 128
_CONTEXT: Final = b"loco links 1\0"


@dataclass(frozen=True, slots=True, order=True)
class LinkTimes:
    """A link as one of its ends has measured it; 0 is unknown.

    Attributes:
        rtt_us: there and back, for what is small.
        out_us: how long a boundary that leaves for the peer occupies the line.
        in_us: the same of one that comes from it.
    """

    peer_id: str
    rtt_us: int = 0
    out_us: int = 0
    in_us: int = 0

    @property
    def out_s(self) -> float:
        """`out_us` in seconds."""
        return self.out_us / US_PER_S


@dataclass(frozen=True, slots=True)
class WorkTimes:
    """What one microbatch takes at a peer's stage, in microseconds; 0 is unknown.

    Attributes:
        loss_us: norm, head and loss there and back, at a data peer.
    """

    forward_us: int = 0
    backward_us: int = 0
    loss_us: int = 0


@dataclass(frozen=True, slots=True)
class LinkVector:
    """See the top of the file.

    Attributes:
        number: of this peer's vectors in this incarnation.
        slots: microbatches that it holds at once.
        links: by peer id.
    """

    peer_id: str
    incarnation: int
    number: int
    stage: int
    slots: int
    work: WorkTimes
    links: tuple[LinkTimes, ...]

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


def decode_vector(
    peer_id: str, data: bytes, run_id: str, verify: Verify = verify_with_peer_id
) -> LinkVector:
    """The vector of this peer.

    Raises:
        RemoteProtocolError: anything about it is wrong.
    """
    if not SIGNATURE_BYTES < len(data) <= MAX_LINK_VECTOR_BYTES:
        raise RemoteProtocolError(f"a link vector of {len(data)} bytes")
    body, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
    vector = _read(peer_id, body)
    if _packed(vector) != body:
        raise RemoteProtocolError("a link vector that is not in canonical form")
    if not verify(peer_id, _signed_bytes(run_id, peer_id, body), signature):
        raise RemoteProtocolError(f"the link vector's signature is not that of {peer_id}")
    return vector


def _signed_bytes(run_id: str, peer_id: str, body: bytes) -> bytes:
    names = b"".join(
        len(name).to_bytes(2, "big") + name for name in (run_id.encode(), peer_id.encode())
    )
    return _CONTEXT + names + body


def _packed(vector: LinkVector) -> bytes:
    work = vector.work
    packed: bytes = msgpack.packb(
        [
            FORM, vector.incarnation, vector.number, vector.stage, vector.slots,
            work.forward_us, work.backward_us, work.loss_us,
            [
                [link.peer_id, link.rtt_us, link.out_us, link.in_us] for link in vector.links
            ],
        ]
    )  # fmt: skip
    return packed


def _read(peer_id: str, body: bytes) -> LinkVector:
    try:
        fields = msgpack.unpackb(body, raw=False, max_ext_len=0, max_map_len=0)
    except Exception as error:
        raise RemoteProtocolError(f"a link vector that is not msgpack: {error}") from error
    if not isinstance(fields, list) or len(fields) != 9 or fields[0] != FORM:
        raise RemoteProtocolError(f"not a link vector of form {FORM}")
    incarnation, number, stage, slots, *work, links = fields[1:]
    _check((incarnation, number), 0, MAX_NUMBER)
    _check((stage,), 0, MAX_RELAYS_OF_PATH)
    _check((slots,), 1, MAX_SLOTS)
    _check(work, 0, MAX_US)
    if not isinstance(links, list) or len(links) > MAX_LINKS:
        raise RemoteProtocolError(f"a link vector has at most {MAX_LINKS} links")
    times = tuple(_read_link(link) for link in links)
    names = [link.peer_id for link in times]
    if names != sorted(set(names)) or peer_id in names:
        raise RemoteProtocolError("a link vector names other peers, each once, in order")
    return LinkVector(peer_id, incarnation, number, stage, slots, WorkTimes(*work), times)


def _read_link(fields: Any) -> LinkTimes:
    if not isinstance(fields, list) or len(fields) != 4:
        raise RemoteProtocolError("a link has a peer and three numbers")
    peer_id, *times = fields
    if not isinstance(peer_id, str) or not 1 <= len(peer_id) <= MAX_PEER_ID_CHARS:
        raise RemoteProtocolError("a link names a peer")
    _check(times, 0, MAX_US)
    return LinkTimes(peer_id, *times)


def _check(numbers: Sequence[Any], least: int, most: int) -> None:
    if any(type(number) is not int or not least <= number <= most for number in numbers):
        raise RemoteProtocolError(f"a link vector's numbers are {least} to {most}")
