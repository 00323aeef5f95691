"""Snapshots: the link vectors of a pipeline's peers, named by a digest, and the problem in them.

    bytes   msgpack [run id, [vector, ...]], by peer id
    name    blake3 of these bytes, 32 hex digits

All data peers that hold the same snapshot make the same plan of it (routers.py). Every vector in it
is signed by its peer, so a proposer can leave others out, or name older vectors, and can make
nothing up.

A link is measured at both ends, and the worse of two values counts: a peer that praises its links
gains nothing, and one that runs them down keeps work away from itself alone. What nobody has
measured is taken for the median of what is known.

A move takes half a round trip: it is offered ahead, while its sender works on what it will send
(peer/stages/transfers.py). Where a round trip is longer than that work, the sender waits for the
rest of it. Plans that left this out sent microbatches over far relays, and took twice as long as
they said.

Proposals (no coordinator):
  1. Of the data peers that train, the one with the lowest peer id proposes. It gathers the link
     vectors of all peers of the pipeline; the others take the snapshot that it names. Where views
     differ two may propose for a while: each data peer follows the one that it sees, and plans
     differ until views agree. Nothing depends on plans being equal.
  2. A snapshot is proposed when the vectors have changed: at once when peers have come or gone, at
     most every REPLAN_EVERY_S when numbers have (measures.py says when those change).
  3. Of a peer's vectors the newest counts. A peer that is gone is left out of the next snapshot, as
     is one that says another stage than its beats do; one that has told nothing yet is not waited
     for.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Final, Self

import blake3
import msgspec

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import MAX_SNAPSHOT_BYTES
from protocol.pipeline.problem import (
    MAX_PEERS,
    THOUSAND,
    US_PER_S,
    Matrix,
    PathRules,
    PipelinePeer,
    Problem,
    StageWork,
)

from .measures import LinkTimes, LinkVector, decode_vector

USUAL_US: Final = 100_000
USUAL_LINE_US: Final = 10_000
"""Both where nothing at all is known."""


@dataclass(frozen=True, slots=True)
class Terms:
    """A run spec's pipeline, as far as plans need it.

    Attributes:
        visited: stages of a path.
        microbatches: of an iteration, of each data peer.
        boundary_bytes: coded.
    """

    stages: int
    visited: int
    microbatches: int
    boundary_bytes: int
    rules: PathRules


@dataclass(frozen=True, slots=True)
class LinkSnapshot:
    """Link vectors of the peers of a pipeline, by peer id, and the bytes that name them."""

    vectors: tuple[LinkVector, ...]
    data: bytes

    @classmethod
    def of(cls, run_id: str, vectors: Iterable[tuple[LinkVector, bytes]]) -> Self:
        """The snapshot of these vectors, each with its bytes.

        Raises:
            LocalProtocolError: there are none, or too many.
        """
        ordered = sorted(vectors, key=lambda each: each[0].peer_id)
        data = msgspec.msgpack.encode([run_id, [signed for _, signed in ordered]])
        if len(data) > MAX_SNAPSHOT_BYTES or not 1 <= len(ordered) <= MAX_PEERS:
            raise LocalProtocolError(f"a snapshot of {len(ordered)} peers, {len(data)} bytes")
        return cls(tuple(vector for vector, _ in ordered), data)

    @classmethod
    def read(cls, data: bytes, run_id: str) -> Self:
        """A snapshot that came from another peer.

        Raises:
            RemoteProtocolError: anything about it is wrong.
        """
        if len(data) > MAX_SNAPSHOT_BYTES:
            raise RemoteProtocolError(f"a snapshot of {len(data)} bytes")
        try:
            run, parts = msgspec.msgpack.decode(data, type=tuple[str, list[bytes]])
            vectors = [decode_vector(part, run_id) for part in parts[: MAX_PEERS + 1]]
        except (msgspec.MsgspecError, UnicodeError, RemoteProtocolError) as error:
            raise RemoteProtocolError(f"not a snapshot: {error}") from error
        if run != run_id:
            raise RemoteProtocolError("a snapshot of another run")
        if not 1 <= len(vectors) <= MAX_PEERS:
            raise RemoteProtocolError(f"a snapshot of {len(vectors)} peers")
        snapshot = cls.of(run_id, zip(vectors, parts, strict=True))
        if snapshot.data != data or len({each.peer_id for each in vectors}) < len(vectors):
            raise RemoteProtocolError("a snapshot that is not in canonical form")
        return snapshot

    @property
    def digest(self) -> str:
        return blake3.blake3(self.data).hexdigest(length=16)

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(vector.stage for vector in self.vectors)

    def problem(self, terms: Terms, visited: int) -> Problem | None:
        """The problem to plan for; None while a stage has nobody."""
        stages = self.stages
        sizes = tuple(stages.count(stage) for stage in range(terms.stages))
        if min(sizes) < 1 or sum(sizes) != len(stages):
            return None
        table = _LinkTable(self.vectors)
        work, peers = _work(self.vectors, terms.boundary_bytes)
        return Problem(
            peers,
            table.matrix(lambda sender, link: _move_us(link.rtt_us, peers[sender], work)),
            table.matrix(lambda _, link: max(1, terms.boundary_bytes * US_PER_S // link.out_us)),
            work,
            sizes,
            visited,
            terms.microbatches * sizes[0],
            terms.rules,
            queued_links=True,
        )


class _LinkTable:
    """Every link as both of its ends see it; nothing in it is unknown."""

    def __init__(self, vectors: Sequence[LinkVector]) -> None:
        self._peers = [vector.peer_id for vector in vectors]
        told = [{link.peer_id: link for link in vector.links} for vector in vectors]
        self._links: list[list[LinkTimes]] = []
        for a, one in enumerate(self._peers):
            row = []
            for b, other in enumerate(self._peers):
                mine = told[a].get(other, LinkTimes(other))
                theirs = told[b].get(one, LinkTimes(one))
                rtt_us, out_us = max(mine.rtt_us, theirs.rtt_us), max(mine.out_us, theirs.in_us)
                row.append(LinkTimes(other, rtt_us, out_us))
            self._links.append(row)
        everything = [link for row in self._links for link in row]
        self._usual = LinkTimes(
            "",
            _usual((link.rtt_us for link in everything), USUAL_US),
            _usual((link.out_us for link in everything), USUAL_LINE_US),
        )

    def matrix(self, value: Callable[[int, LinkTimes], int]) -> Matrix:
        return tuple(
            tuple(value(sender, self._filled(link)) for link in row)
            for sender, row in enumerate(self._links)
        )

    def _filled(self, link: LinkTimes) -> LinkTimes:
        usual = self._usual
        return LinkTimes("", link.rtt_us or usual.rtt_us, link.out_us or usual.out_us)


def _work(
    vectors: Sequence[LinkVector], boundary_bytes: int
) -> tuple[StageWork, tuple[PipelinePeer, ...]]:
    """The whole work of each peer, in the shares that are usual for all."""
    known = [each.work for each in vectors if each.work.forward_us and each.work.backward_us]
    usual_us = _usual((work.forward_us for work in known), USUAL_US)
    backward = _usual((w.backward_us * THOUSAND // w.forward_us for w in known), 2 * THOUSAND)
    peers = []
    for vector in vectors:
        work, forward_us = vector.work, usual_us
        if work.forward_us and work.backward_us:
            forward_us = (work.forward_us + work.backward_us) * THOUSAND // (THOUSAND + backward)
        peers.append(PipelinePeer(vector.peer_id, max(1, forward_us), vector.slots))
    shares = (
        vector.work.loss_us * THOUSAND // peer.forward_us
        for vector, peer in zip(vectors, peers, strict=True)
        if vector.work.loss_us
    )
    loss = _usual(shares, THOUSAND)
    return StageWork(boundary_bytes, backward_permille=backward, loss_permille=loss), tuple(peers)


def _move_us(rtt_us: int, sender: PipelinePeer, work: StageWork) -> int:
    """How long a boundary is on its way, beside its time on the line; the mean of both ways."""
    forward_us = sender.forward_us
    backward_us = forward_us * work.backward_permille // THOUSAND
    waited_us = max(0, rtt_us - forward_us) + max(0, rtt_us - backward_us)
    return (rtt_us + waited_us) // 2


def _usual(values: Iterable[int], otherwise: int) -> int:
    known = [value for value in values if value]
    return median_low(known) if known else otherwise


REPLAN_EVERY_S: Final = 20.0


class Proposals:
    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._vectors: dict[str, tuple[LinkVector, bytes]] = {}
        self._proposed_s = -math.inf

    def take(self, vector: LinkVector, signed: bytes) -> bool:
        """A vector has come. Returns whether it is newer than what was there."""
        known = self._vectors.get(vector.peer_id)
        if known is not None and known[0].version >= vector.version:
            return False
        self._vectors[vector.peer_id] = vector, signed
        return True

    def keep(self, stages: Mapping[str, int]) -> None:
        for peer_id, (vector, _) in list(self._vectors.items()):
            if stages.get(peer_id) != vector.stage:
                del self._vectors[peer_id]

    def due(self, current: LinkSnapshot | None, now_s: float) -> LinkSnapshot | None:
        """The snapshot to propose now; None when the current one stands, or they are too many."""
        try:
            proposed = LinkSnapshot.of(self._run_id, self._vectors.values())
        except LocalProtocolError:
            return None
        if current is not None and _places(proposed) == _places(current):
            since_s = now_s - self._proposed_s
            if proposed.digest == current.digest or since_s < REPLAN_EVERY_S:
                return None
        self._proposed_s = now_s
        return proposed


def _places(snapshot: LinkSnapshot) -> list[tuple[str, int]]:
    return [(vector.peer_id, vector.stage) for vector in snapshot.vectors]
