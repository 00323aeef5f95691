"""The owner's part: collect contributions, average them, sign the result.

One `Collection` per fragment and cycle that somebody has sent us something for. It is averaged when
it is complete, or when its deadline has passed; the deadline follows what such collections took
before. The decisions stand in protocol/fragment/collection.py; here are buffers, clock and
arithmetic.

Who let a deadline pass is not waited for again before it has contributed: a peer that stalls costs
the others one deadline, however long it stalls. When what was missed comes later, the deadline
learns how long it would have had to be: so it follows links that become slower.

A contribution is refused that comes twice, or for a cycle that is over, or for one that is more
than one ahead of any that others have come to: it would close the cycles between for all.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import blake3
import torch
import trio

from peer.codec import codes_as_tensor
from peer.ports import PeerId, Work
from protocol.fragment.chunk_ledger import Stamp
from protocol.fragment.collection import Admitted, Collection
from protocol.membership.records import Sign
from protocol.outcomes import RefusalReason
from protocol.schedule.deadline import ObservedDeadline
from protocol.wire.fragment_messages import DIGEST_BYTES, ChunkResult, signed_result
from protocol.wire.messages import Contribution, Result

from . import nesterov
from .outer_fragments import OuterFragments

MIN_COLLECT_S: Final = 1.0
MAX_COLLECT_S: Final = 30.0
TICK_S: Final = 0.25
MAX_COLLECTIONS: Final = 16
"""Collected at once; of further ones the oldest is closed as it is."""


@dataclass(slots=True)
class _Open:
    """One collection under way."""

    collection: Collection
    deadline_s: float
    began_s: float
    last_came_s: float
    codes: dict[int, dict[PeerId, memoryview]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Averages:
    """A result with the codes of all its chunks, in order."""

    result: Result
    codes: memoryview


@dataclass(frozen=True, slots=True)
class OwnerStatistics:
    """Counts since the start."""

    complete: int
    cut_short: int


class FragmentOwner:
    """All collections of one peer. `run` must be running.

    Args:
        expected: who should still contribute to a cycle of a fragment, ourselves among them;
            nobody where the cycle is not near ours.
        reached: the newest cycle of a fragment that anybody but this peer has come to.
        publish: called with every result that we made.
        over: called with fragment and cycle when nothing more will be made for them.
    """

    def __init__(
        self,
        group: str,
        peer_id: PeerId,
        *,
        outer: OuterFragments,
        work: Work,
        sign: Sign,
        expected: Callable[[int, int], set[PeerId]],
        reached: Callable[[int, PeerId], int],
        publish: Callable[[Averages], None],
        over: Callable[[int, int], None],
    ) -> None:
        self._group = group
        self._peer_id = peer_id
        self._outer = outer
        self._work = work
        self._sign = sign
        self._expected = expected
        self._reached = reached
        self._publish = publish
        self._over = over
        self._open: dict[tuple[int, int], _Open] = {}
        self._newest = [-1] * len(outer.fragments)
        self._late: set[PeerId] = set()
        self._cut_short_of: dict[int, tuple[int, float]] = {}
        self._patience = ObservedDeadline(floor_s=MIN_COLLECT_S, ceiling_s=MAX_COLLECT_S)
        self._put, self._take = trio.open_memory_channel[tuple[tuple[int, int], _Open]](
            MAX_COLLECTIONS
        )
        self._scratch = torch.empty(0)
        self._complete = self._cut_short = 0

    def __repr__(self) -> str:
        return f"<FragmentOwner collecting {sorted(self._open)}, {self._patience!r}>"

    def statistics(self) -> OwnerStatistics:
        """Counts since the start."""
        return OwnerStatistics(self._complete, self._cut_short)

    async def run(self) -> None:
        """Close collections whose time is up, and average those that are closed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            async for key, collected in self._take:
                with suppress(ValueError):  # values at the very bound of what codes take
                    averages = await self._work.run(self._average, *key, collected)
                    if averages is not None:
                        self._publish(averages)
                self._over(*key)

    def keep_only(self, peer_ids: AbstractSet[PeerId]) -> None:
        """The others are gone, and with them what we remember of them."""
        self._late &= peer_ids

    async def _watch(self) -> None:
        while True:
            await trio.sleep(TICK_S)
            self.look()

    def look(self) -> None:
        """See who is not expected any more, and whose time is up."""
        now_s = trio.current_time()
        for key, collecting in list(self._open.items()):
            for peer_id in collecting.collection.awaited - self._expected(*key):
                collecting.collection.excuse(peer_id)
            if collecting.collection.is_complete or now_s >= collecting.deadline_s:
                self._close(key)

    def contributed(
        self, peer_id: PeerId, contribution: Contribution, parts: dict[int, memoryview]
    ) -> RefusalReason | None:
        """Somebody, perhaps we, sent us codes of chunks. Returns why they were not taken, if so."""
        key = (contribution.fragment, contribution.cycle)
        if contribution.cycle >= self._newest[contribution.fragment]:
            self._late.discard(peer_id)
        if key not in self._open and (reason := self._reason_to_refuse(*key, peer_id)):
            self._learn_from_late(*key)
            return reason
        collecting = self._open.get(key) or self._begin(key)
        stamps = {stamp.chunk: stamp.stamp for stamp in contribution.stamps}
        if collecting.collection.add(peer_id, contribution.weight, stamps):
            for chunk, codes in parts.items():
                collecting.codes.setdefault(chunk, {})[peer_id] = codes
        elif contribution.weight:
            return RefusalReason.TWICE
        collecting.last_came_s = trio.current_time()
        if collecting.collection.is_complete:
            self._close(key)
        return None

    def _reason_to_refuse(self, fragment: int, cycle: int, peer_id: PeerId) -> RefusalReason | None:
        """Why nothing is collected for a cycle, if so."""
        newest = max(self._newest[fragment], self._reached(fragment, peer_id))
        if cycle <= self._newest[fragment]:
            return RefusalReason.AHEAD
        if cycle > newest + 1:
            return RefusalReason.BEHIND
        if not self._expected(fragment, cycle):  # of another time: nobody can be helped with it
            return RefusalReason.AHEAD if cycle <= newest else RefusalReason.BEHIND
        return None

    def _learn_from_late(self, fragment: int, cycle: int) -> None:
        """The last collection was cut short, and this is what it lacked."""
        missed = self._cut_short_of.get(fragment)
        if missed is not None and missed[0] == cycle:
            del self._cut_short_of[fragment]
            self._patience.observe(trio.current_time() - missed[1])

    def _begin(self, key: tuple[int, int]) -> _Open:
        if len(self._open) >= MAX_COLLECTIONS:
            self._close(min(self._open, key=lambda each: self._open[each].began_s))
        now_s = trio.current_time()
        collecting = self._open[key] = _Open(
            Collection(self._expected(*key) - self._late),
            now_s + self._patience.current_s * self._outer.sends_at_once(key[1]),
            now_s,
            now_s,
        )
        return collecting

    def _close(self, key: tuple[int, int]) -> None:
        collecting = self._open.pop(key)
        fragment, cycle = key
        self._newest[fragment] = max(self._newest[fragment], cycle)
        if collecting.collection.is_complete:
            self._patience.observe(collecting.last_came_s - collecting.began_s)
            self._complete += 1
        else:
            self._late |= collecting.collection.awaited
            self._cut_short_of[fragment] = (cycle, collecting.began_s)
            self._cut_short += 1
        collecting.collection.closed = True
        if not collecting.collection.chunks:
            self._over(*key)
            return
        try:
            self._put.send_nowait((key, collecting))
        except trio.WouldBlock:
            self._cut_short += 1  # averaging cannot keep up: this one is lost
            self._over(*key)

    # --- in a worker thread -----------------------------------------------------------------------
    def _average(self, fragment: int, cycle: int, collected: _Open) -> Averages | None:
        admitted: dict[int, Admitted] = {}
        for chunk in collected.collection.chunks:
            who = collected.collection.admitted(chunk)
            if who is not None:
                admitted[chunk] = who
        if not admitted:
            return None
        num_bytes = sum(self._outer.chunk_code_bytes(fragment, chunk) for chunk in admitted)
        codes = self._outer.spare.take(num_bytes)
        parts = self._outer.split_codes(fragment, tuple(admitted), codes)
        for chunk, who in admitted.items():
            self._average_chunk(fragment, chunk, who, collected.codes[chunk], parts[chunk])
        return Averages(self._signed(fragment, cycle, admitted, parts), codes)

    def _average_chunk(
        self,
        fragment: int,
        chunk: int,
        who: Admitted,
        codes: dict[PeerId, memoryview],
        out: memoryview,
    ) -> None:
        num_values = self._outer.chunk_values(fragment, chunk)
        if len(self._scratch) < num_values:
            self._scratch = torch.empty(num_values)
        nesterov.average_codes(
            [
                nesterov.Contribution(codes_as_tensor(codes[peer_id]), weight)
                for peer_id, weight in who.weights.items()
            ],
            self._outer.codec,
            num_values,
            codes_as_tensor(out),
            self._scratch,
        )

    def _signed(
        self, fragment: int, cycle: int, admitted: dict[int, Admitted], parts: dict[int, memoryview]
    ) -> Result:
        weights: dict[PeerId, int] = {}
        for who in admitted.values():
            weights.update(who.weights)
        contributors = tuple(sorted(weights))
        place = {peer_id: i for i, peer_id in enumerate(contributors)}
        chunks = tuple(
            _chunk_result(chunk, who.base, sum(1 << place[p] for p in who.weights), parts[chunk])
            for chunk, who in admitted.items()
        )
        unsigned = Result(
            group=self._group,
            fragment=fragment,
            cycle=cycle,
            owner=self._peer_id,
            contributors=contributors,
            weights=tuple(weights[peer_id] for peer_id in contributors),
            chunks=chunks,
            carried=tuple(admitted),
            signature=bytes(64),
        )
        return signed_result(unsigned, self._sign)


def _chunk_result(chunk: int, base: Stamp, mask: int, codes: memoryview) -> ChunkResult:
    digest = short_digest(codes)
    return ChunkResult(chunk, base.steps, base.weight, base.digest, mask, digest)


def short_digest(data: bytes | memoryview) -> bytes:
    """Of codes, as messages carry it."""
    return blake3.blake3(data).digest(length=DIGEST_BYTES)
