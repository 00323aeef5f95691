"""The directory in real life: a hash table that all peers keep together, each a part of it.

Peers ask each other on streams of `/loco/directory/1`, a question each (Kademlia, without buckets:
protocol/membership/node_table.py; what a node keeps: record_table.py).

- A stranger's question passes the gate (handlers.py): a budget of places and a pace for each
  identity and network, the run's admission, bans, conduct. In a run that not everybody may join an
  outsider is told nothing.
- We ask only peers that the gate would let in, so no outsider is given a record to keep.
- Answers of others name nodes. Where we know no address of one, the named ones are tried.
- A search returns the records that the nodes on its way had, each checked here. A peer keeps its
  own record too, and stores it again before it expires; nodes hand none on to each other.

Store and get are best effort and raise nothing. A bug that others' answers find ends the search,
and the table is begun anew; the peers that we entered by are asked first then, as they are where no
node has answered yet, or all have fallen silent. No link or weight is concerned.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import trio

from peer.runtime import Address, PeerId, Stream
from protocol.errors import LocoError, leaves
from protocol.limits import ANSWER_S, MAX_LINKS, RECORDS_OF_SHARD
from protocol.membership.node_table import SEARCH_S, NodeSearch, NodeTable
from protocol.membership.record_table import RecordTable, live_record_at
from protocol.membership.records import place_of
from protocol.wire.directory_messages import (
    FindRecords,
    FoundRecord,
    KeepRecord,
    NearNode,
    RecordKept,
    RecordsFound,
)
from protocol.wire.versions import DIRECTORY

from .conversation import Conversation
from .libp2p import Libp2pNetwork

Reply = TypeVar("Reply", RecordsFound, RecordKept)

ASK_TIMEOUT_S: Final = 2.0
"""The time of another peer to be reached and to answer; one search asks many."""


class SharedTable:
    """Implements `peer.runtime.Directory`; made by `open_directory`.

    Attributes:
        restarts: how often the table was begun anew.
        last_failure: why it last was.
    """

    def __init__(self, network: Libp2pNetwork, wall_clock: Callable[[], float]) -> None:
        self._network = network
        self._wall_clock = wall_clock
        self._offset_s = 0.0
        self._entry_peers: dict[PeerId, None] = {}
        self._is_checking = False
        self.restarts = 0
        self.last_failure = ""
        self._begin()

    def _begin(self) -> None:
        self._records = RecordTable()
        self._nodes = NodeTable(self._network.peer_id)

    def swarm_time_s(self) -> float:
        return self._wall_clock() + self._offset_s

    def correct_clock(self, offset_s: float) -> None:
        self._offset_s = offset_s

    async def store(self, key: bytes, value: bytes) -> None:
        place = place_of(key)
        self._records.keep(self.swarm_time_s(), place, self._network.peer_id, value, "")
        keepers = await self._search(place, {})
        with self._surviving_bugs():
            async with trio.open_nursery() as nursery:
                for peer_id in keepers:
                    nursery.start_soon(self._ask, peer_id, KeepRecord(place, value), RecordKept)

    async def get(self, key: bytes) -> Mapping[PeerId, bytes]:
        place = place_of(key)
        found = self._records.at(self.swarm_time_s(), place)
        await self._search(place, found)
        return dict(sorted(found.items()))

    async def add_peers(self, addresses: Sequence[Address]) -> None:
        named = (address.rpartition("/p2p/")[::2] for address in addresses)
        peer_ids = dict.fromkeys(peer_id for front, peer_id in named if front)
        kept = (known for known in self._entry_peers if known not in peer_ids)
        self._entry_peers = dict.fromkeys([*kept, *peer_ids][-MAX_LINKS:])
        await self._search(place_of(self._network.peer_id.encode()), {}, peer_ids)

    # --- searching --------------------------------------------------------------------------------
    async def _search(
        self, place: bytes, found: dict[str, bytes], among: Collection[PeerId] = ()
    ) -> list[PeerId]:
        """Add the records that nodes have to those found. Returns who should keep one there.

        Args:
            among: peers that we enter by, to begin with, beside the nodes that we know.
        """
        now_s = trio.current_time()
        first = among if among or self._nodes.has_proven() else self._entry_peers
        search = NodeSearch(self._nodes, place, first)
        search.hear([*first, *self._nodes.near(place, now_s)], now_s)

        async def ask(peer_id: PeerId) -> None:
            answer = await self._ask(peer_id, FindRecords(place), RecordsFound)
            if answer is None:
                search.silent(peer_id)
            else:
                search.answered(peer_id)
                search.hear((node.peer_id for node in answer.nearest), trio.current_time())
                self._add_newest(found, place, answer.records)
            ask_next()

        def ask_next() -> None:
            for peer_id in search.next_asked(trio.current_time()):
                nursery.start_soon(ask, peer_id)

        with self._surviving_bugs(), trio.move_on_after(SEARCH_S):
            async with trio.open_nursery() as nursery:
                ask_next()
        search.end(trio.current_time())
        return search.keepers()

    @contextmanager
    def _surviving_bugs(self) -> Iterator[None]:
        """Begin the table anew where a bug ends the block: a stranger may have found it."""
        try:
            yield
        except* Exception as bugs:  # noqa: BLE001 - that we are cancelled as well, is left to trio
            self._begin()
            self.restarts += 1
            self.last_failure = repr(leaves(bugs)[0])

    async def _ask(
        self,
        peer_id: PeerId,
        question: FindRecords | KeepRecord,
        expected: type[Reply],
        timeout_s: float | None = None,
    ) -> Reply | None:
        """Put a question to a peer; None where it does not answer in time."""
        answer, address = None, ""
        if self._network.would_serve(peer_id):
            with (
                trio.move_on_after(timeout_s or ASK_TIMEOUT_S),
                suppress(LocoError, trio.BrokenResourceError, trio.ClosedResourceError),
            ):
                stream = await self._network.open_stream(peer_id, DIRECTORY)
                async with Conversation(stream) as talk:
                    await talk.send(question)
                    answer, address = (await talk.receive(expected))[0], stream.remote_address
        if answer is None:
            self._nodes.silent(peer_id, trio.current_time())
            return None
        self._nodes.answered(peer_id, address, trio.current_time())
        if isinstance(answer, RecordsFound):
            for node in answer.nearest:
                self._network.note_addresses(node.peer_id, node.addresses)
        return answer

    def _add_newest(
        self, gathered: dict[str, bytes], place: bytes, found: Collection[FoundRecord]
    ) -> None:
        """Add those of the records found that are valid, live, and outlast those of before."""
        now_s = self.swarm_time_s()
        for peer_id, value in ((each.peer_id, each.value) for each in found):
            held = gathered.get(peer_id)
            # Honest nodes keep nearly the same records: there are never many more than one keeps.
            if value == held or (held is None and len(gathered) >= 4 * RECORDS_OF_SHARD.total):
                continue
            record = live_record_at(now_s, place, peer_id, value)
            before = None if held is None else live_record_at(now_s, place, peer_id, held)
            if record is not None and (before is None or before.expires_s < record.expires_s):
                gathered[peer_id] = value

    # --- other peers ------------------------------------------------------------------------------
    async def serve(self, stream: Stream) -> None:
        """Answer one question of another peer."""
        talk, peer_id, address = Conversation(stream), stream.remote_peer_id, stream.remote_address
        question, _ = await talk.receive(FindRecords, KeepRecord, timeout_s=ANSWER_S)
        has_room = self._nodes.asked(peer_id, address, trio.current_time())
        await talk.send(self._answer(question, peer_id, address))
        if not has_room:
            await self._make_room()

    async def _make_room(self) -> None:
        """Ask the node that has not answered for longest: one that is silent leaves the table.

        It has the time to be reached on a slow line, and only one is asked at once.
        """
        oldest = self._nodes.to_check(trio.current_time())
        if oldest is None or self._is_checking:
            return
        self._is_checking = True
        try:
            with self._surviving_bugs():
                question = FindRecords(place_of(oldest.encode()))
                await self._ask(oldest, question, RecordsFound, timeout_s=ANSWER_S)
        finally:
            self._is_checking = False

    def _answer(
        self, question: FindRecords | KeepRecord, peer_id: PeerId, address: Address
    ) -> RecordsFound | RecordKept:
        now_s, place = self.swarm_time_s(), question.place
        if isinstance(question, KeepRecord):
            return RecordKept(self._records.keep(now_s, place, peer_id, question.value, address))
        known = self._network.known_addresses
        return RecordsFound(
            tuple(FoundRecord(*each) for each in self._records.at(now_s, place).items()),
            tuple(NearNode(name, known(name)) for name in self._nodes.told(place, but=peer_id)),
        )


def wall_time_s() -> float:
    return time.time()  # noqa: TID251 - this is the port


async def open_directory(
    network: Libp2pNetwork, wall_clock: Callable[[], float] = wall_time_s
) -> SharedTable:
    """A directory on this network, for as long as that is open."""
    directory = SharedTable(network, wall_clock)
    await network.serve(DIRECTORY, directory.serve)
    return directory
