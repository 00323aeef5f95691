"""The directory in simulation: one shared table in memory, under trio's clock, from a seed.

What it keeps of the real one: only valid signed records are taken in; an entry gives way to one
that expires strictly later; an expired one is not found; a handle finds only what was stored by
those that it is connected with through `add_peers`; store never says whether it worked. What it
adds: latency, handles whose clock is wrong, handles cut off from the table, and partial views,
in which each reader never sees a fixed random part of the writers.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import blake3
import trio

from peer.ports import Address
from protocol.limits import MAX_RECORDS_PER_SHARD
from protocol.membership.records import place_of, valid_record_at

from .directory import CALL_TIMEOUT_S

EPOCH_S: Final = 1_700_000_000.0
"""Unix time of the simulated world at trio's time zero."""


@dataclass(frozen=True, slots=True)
class _Entry:
    value: bytes
    expires_s: float
    writer: str


class SimulatedDhtWorld:
    """The table that all handles share.

    Args:
        seed: decides latencies and who sees whom.
        latency_s: shortest and longest duration of an operation.
        hidden_fraction: part of the writers that each reader does not see.
    """

    def __init__(
        self,
        seed: int,
        latency_s: tuple[float, float] = (0.01, 0.2),
        hidden_fraction: float = 0.0,
    ) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._latency_s = latency_s
        self._hidden_fraction = hidden_fraction
        self._table: dict[bytes, dict[str, _Entry]] = {}
        self._parents: dict[str, str] = {}

    def directory(self, peer_id: str, clock_skew_s: float = 0.0) -> "SimulatedDirectory":
        """A peer's handle; `clock_skew_s` is how far its wall clock is ahead."""
        return SimulatedDirectory(self, peer_id, clock_skew_s)

    def connect(self, peer_id: str, other: str) -> None:
        """Let two peers, and all that they are connected with, find each other's records."""
        self._parents[self._root(other)] = self._root(peer_id)

    def keep(self, key: bytes, subkey: str, entry: _Entry) -> bool:
        """Take an entry in. Returns whether it was acceptable."""
        record = valid_record_at(place_of(key), subkey, entry.value)
        if record is None or record.expires_s != entry.expires_s:
            return False
        entries = self._table.setdefault(key, {})
        there = entries.get(subkey)
        if there is None and len(entries) >= MAX_RECORDS_PER_SHARD:
            return False
        if there is not None and there.expires_s >= entry.expires_s:
            return False
        entries[subkey] = entry
        return True

    def find(self, key: bytes, reader: str, now_s: float) -> dict[str, bytes]:
        """What this reader sees under a key at its own idea of the time."""
        root = self._root(reader)
        return {
            subkey: entry.value
            for subkey, entry in sorted(self._table.get(key, {}).items())
            if entry.expires_s > now_s
            and self._root(entry.writer) == root
            and not self._is_hidden(reader, subkey)
        }

    def expire(self, now_s: float) -> None:
        """Drop what has expired by the world's true time."""
        for key in list(self._table):
            live = {
                name: entry for name, entry in self._table[key].items() if entry.expires_s > now_s
            }
            if live:
                self._table[key] = live
            else:
                del self._table[key]

    def true_time_s(self) -> float:
        """The Unix time that a right clock shows."""
        return EPOCH_S + trio.current_time()

    def draw_latency_s(self) -> float:
        """How long the next operation takes."""
        return self._random.uniform(*self._latency_s)

    def _root(self, peer_id: str) -> str:
        while (parent := self._parents.get(peer_id, peer_id)) != peer_id:
            peer_id = parent
        return peer_id

    def _is_hidden(self, reader: str, writer: str) -> bool:
        if reader == writer or not self._hidden_fraction:
            return False
        digest = blake3.blake3(f"{self._seed}/{reader}/{writer}".encode()).digest(length=8)
        return int.from_bytes(digest, "big") < self._hidden_fraction * 2**64


class SimulatedDirectory:
    """One peer's handle on a `SimulatedDhtWorld`; implements `peer.ports.Directory`.

    Attributes:
        online: False while the peer is cut off from the table.
        clock_skew_s: how far its wall clock is ahead of the truth.
        refused: values that were not taken in.
    """

    def __init__(self, world: SimulatedDhtWorld, peer_id: str, clock_skew_s: float) -> None:
        self._world = world
        self._peer_id = peer_id
        self._offset_s = 0.0
        self.refused = 0
        self.clock_skew_s = clock_skew_s
        self.online = True

    def swarm_time_s(self) -> float:
        return self._world.true_time_s() + self.clock_skew_s + self._offset_s

    def correct_clock(self, offset_s: float) -> None:
        self._offset_s = offset_s

    async def store(self, key: bytes, subkey: str, value: bytes, expires_s: float) -> None:
        """Best effort; what is not a valid record is not kept."""
        if not await self._reach_table():
            return
        self._world.expire(self._world.true_time_s())
        if not self._world.keep(key, subkey, _Entry(value, expires_s, self._peer_id)):
            self.refused += 1

    async def get(self, key: bytes) -> Mapping[str, bytes]:
        if not await self._reach_table():
            return {}
        return self._world.find(key, self._peer_id, self.swarm_time_s())

    async def add_peers(self, addresses: Sequence[Address]) -> None:
        """Connect with the peers named at the end of these addresses."""
        if not await self._reach_table():
            return
        for address in addresses:
            _, found, peer_id = address.rpartition("/p2p/")
            if found:
                self._world.connect(self._peer_id, peer_id)

    async def _reach_table(self) -> bool:
        await trio.sleep(self._world.draw_latency_s() if self.online else CALL_TIMEOUT_S)
        return self.online
