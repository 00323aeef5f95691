"""Measures of a peer's links and of its own work, and the signed vector that tells others.

Samples. Whatever is in the way of a transfer, another one or a busy processor, makes its time
longer, and nothing makes it too short. So of the last KEPT_SAMPLES samples of a link the lower
quartile is taken; of work, whose times spread both ways, the median. Single outliers move neither.
What is known of a peer goes when it is gone.

Hysteresis. A vector is told again only when a value has moved by more than CHANGE from what was
told last, and by more than LEAST_US, so noise of a quarter moves nothing. The time on the line is
judged together with the round trip: it is the difference of two times, and their noise is much for
a short one. A value that was unknown is told at once.

Vectors:

    bytes   body + Ed25519 signature of ("loco links 2", run id, peer id, body)
    body    the vector as a msgpack list

Anybody can pass a vector on, and nobody can change it: a snapshot (snapshots.py) is made of them.
Of two vectors of a peer the newer one counts: the later incarnation, then the higher number. There
is exactly one encoding. 0 stands for what has not been measured.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import astuple

from protocol.address.peer_id import SIGNATURE_BYTES, Sign
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import MAX_LINK_VECTOR_BYTES, MAX_LINKS, MAX_STAGES
from protocol.membership.records import verify_with_peer_id
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
        return self.out_us / US_PER_S


class WorkTimes(Struct, frozen=True, array_like=True):
    """Times of one microbatch at a peer's stage; 0 is unknown.

    Attributes:
        loss_us: norm, head and loss there and back, at a data peer.
    """

    forward_us: Microseconds = 0
    backward_us: Microseconds = 0
    loss_us: Microseconds = 0


class LinkVector(Struct, frozen=True, array_like=True):
    peer_id: PeerIdText
    incarnation: Count
    number: Count
    stage: Annotated[int, Meta(ge=0, lt=MAX_STAGES)]
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
    work: WorkTimes
    links: Annotated[tuple[LinkTimes, ...], Meta(max_length=MAX_LINKS)]

    @property
    def version(self) -> tuple[int, int]:
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


def decode_vector(data: bytes, run_id: str) -> LinkVector:
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
    if not verify_with_peer_id(
        vector.peer_id, _signed_bytes(run_id, vector.peer_id, body), signature
    ):
        raise RemoteProtocolError(f"the link vector's signature is not that of {vector.peer_id}")
    return vector


def _signed_bytes(run_id: str, peer_id: str, body: bytes) -> bytes:
    names = b"".join(
        len(name).to_bytes(2, "big") + name for name in (run_id.encode(), peer_id.encode())
    )
    return _CONTEXT + names + body


KEPT_SAMPLES: Final = 32
ENOUGH: Final = 3
"""Samples before which nothing is told."""
CHANGE: Final = 0.4
LEAST_US: Final = 1000


class Samples:
    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=KEPT_SAMPLES)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)

    def at(self, part: float) -> float | None:
        if len(self._last) < ENOUGH:
            return None
        return sorted(self._last)[int(part * (len(self._last) - 1))]


@dataclass(slots=True)
class _LinkSamples:
    rtt: Samples = field(default_factory=Samples)
    out: Samples = field(default_factory=Samples)
    back: Samples = field(default_factory=Samples)


class Measures:
    """Samples in seconds, and whether they are worth telling.

    Attributes:
        forward, backward: of a microbatch through the stage.
        loss: of head and loss, there and back.
    """

    def __init__(self) -> None:
        self._links: dict[str, _LinkSamples] = {}
        self.forward, self.backward, self.loss = Samples(), Samples(), Samples()
        self._told: LinkVector | None = None

    def round_trip(self, peer_id: str, seconds: float) -> None:
        if link := self._link(peer_id):
            link.rtt.add(seconds)

    def sent(self, peer_id: str, seconds: float) -> float | None:
        """A boundary went to a peer: from its first byte until it was told that all are there.

        Without the way of what is small: the first byte there, and the receipt back. Returns how
        long one occupies the line; None while that is not known.
        """
        link = self._link(peer_id)
        if link is None:
            return None
        link.out.add(max(1 / US_PER_S, seconds - (link.rtt.at(0.25) or 0.0)))
        return link.out.at(0.25)

    def received(self, peer_id: str, seconds: float) -> None:
        """A boundary came from a peer: from its first byte until all of it was there."""
        if link := self._link(peer_id):
            link.back.add(seconds)

    def line_s(self, peer_id: str) -> float | None:
        link = self._links.get(peer_id)
        return None if link is None else link.out.at(0.25)

    def keep(self, peer_ids: Iterable[str]) -> None:
        there = set(peer_ids)
        for gone in self._links.keys() - there:
            del self._links[gone]

    def work(self) -> WorkTimes:
        return WorkTimes(
            *(_whole(samples.at(0.5)) for samples in (self.forward, self.backward, self.loss))
        )

    def links(self) -> tuple[LinkTimes, ...]:
        return tuple(
            LinkTimes(
                peer_id, *(_whole(times.at(0.25)) for times in (link.rtt, link.out, link.back))
            )
            for peer_id, link in sorted(self._links.items())
        )

    def vector(self, peer_id: str, incarnation: int, stage: int, slots: int) -> LinkVector | None:
        """The vector to be told from now on; None when what was told still stands."""
        before = self._told
        number = 1 if before is None else before.number + 1
        now = LinkVector(peer_id, incarnation, number, stage, slots, self.work(), self.links())
        if before is not None and not _has_moved(before, now):
            return None
        self._told = now
        return now

    def _link(self, peer_id: str) -> _LinkSamples | None:
        if peer_id not in self._links and len(self._links) < MAX_LINKS:
            self._links[peer_id] = _LinkSamples()
        return self._links.get(peer_id)


def _whole(seconds: float | None) -> int:
    return 0 if seconds is None else min(MAX_US, max(1, round(seconds * US_PER_S)))


def _has_moved(before: LinkVector, now: LinkVector) -> bool:
    then, there = ({link.peer_id: link for link in each.links} for each in (before, now))
    if then.keys() != there.keys() or before.slots != now.slots:
        return True
    pairs = list(zip(astuple(before.work), astuple(now.work), strict=True))
    for peer_id, link in there.items():
        pairs += zip(_moves(then[peer_id]), _moves(link), strict=True)
    return any(map(_differs, *zip(*pairs, strict=True)))


def _moves(link: LinkTimes) -> tuple[int, int, int]:
    """Times of a link there and back, and with a boundary either way; 0 is unknown."""
    return (
        link.rtt_us,
        link.out_us and link.rtt_us + link.out_us,
        link.in_us and link.rtt_us + link.in_us,
    )


def _differs(before_us: int, now_us: int) -> bool:
    """Whether two values are further apart than CHANGE, seen from the smaller one."""
    less, more = sorted((before_us, now_us))
    return more > 0 and (less == 0 or (more > (1 + CHANGE) * less and more - less > LEAST_US))
