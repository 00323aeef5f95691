"""Cores of the fragment exchange, connected by queues that delay, reorder and lose what they carry.

The arithmetic is a hash: a chunk's value after a step is a digest of the value before it and of the
codes that were applied. So two peers have the same bytes exactly if they have applied the same
results to the same values in the same order.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from protocol.diloco import commands as e
from protocol.diloco.chunk_ledger import NEVER
from protocol.diloco.core import FragmentCore
from protocol.diloco.cycle_machine import short_digest
from protocol.diloco.peers import SendPlan
from protocol.outcomes import AuditOutcome
from protocol.trainer_messages import Merge, Yield
from protocol.wire.fragment_messages import (
    ChunkResult,
    ChunkStateReply,
    Contribution,
    GetChunkState,
    GetResult,
    GetStamps,
    Proof,
    Result,
    Stamp,
    Stamps,
    mask_of,
)

GROUP = "group"
CODE_BYTES = 16
PROOF = b"what only checks out of a lie"


def stamp_of(chunk: int, value: bytes, cycle: int, steps: int, weight: int) -> Stamp:
    return Stamp(chunk, steps, weight, short_digest(value + f"/{cycle}/{steps}/{weight}".encode()))


def first_value(fragment: int, chunk: int) -> bytes:
    return short_digest(f"{fragment}/{chunk}".encode())


def averaged_codes(codes: Iterable[tuple[str, bytes]]) -> bytes:
    """Equal for equal contributors with equal codes."""
    return short_digest(b"".join(f"{p}/".encode() + part for p, part in sorted(codes)))


@dataclass
class Chunk:
    """Memory of one chunk, and what was there before its last step."""

    value: bytes
    before: bytes = b""
    written: bytes = b""

    def write(self, value: bytes) -> None:
        self.value = self.written = value


class Memory:
    """The outer copy of one peer."""

    def __init__(self, num_chunks: list[int]) -> None:
        self.chunks = [
            [Chunk(first_value(fragment, chunk)) for chunk in range(number)]
            for fragment, number in enumerate(num_chunks)
        ]
        for chunk in itertools.chain(*self.chunks):
            chunk.written = chunk.value

    def first_stamps(self) -> list[list[Stamp]]:
        return [
            [stamp_of(i, chunk.value, NEVER, 0, 0) for i, chunk in enumerate(of)]
            for of in self.chunks
        ]

    def values(self) -> list[list[bytes]]:
        return [[chunk.value for chunk in of] for of in self.chunks]

    def carry_out(self, order: e.WriteOrder) -> Mapping[int, Stamp]:
        chunks = self.chunks[order.fragment]
        match order:
            case e.Verify(_, cycles):
                spoilt = {}
                for i, chunk in enumerate(chunks):
                    if chunk.value != chunk.written:
                        chunk.written = chunk.value
                        spoilt[i] = stamp_of(i, chunk.value, cycles[i], 0, 0)
                return spoilt
            case e.WriteResults(fragment, results, again):
                return {
                    each.chunk: self._step(fragment, each, again=each.chunk in again)
                    for each in results
                }
            case e.WriteChunk(_, fetched):
                value, stamp = bytes(fetched.values), fetched.stamp
                if stamp_of(stamp.chunk, value, fetched.cycle, stamp.steps, stamp.weight) != stamp:
                    return {}
                chunks[fetched.chunk].write(value)
                return {fetched.chunk: stamp}
            case e.UndoSteps(_, stamps):
                for index in stamps:
                    chunks[index].write(chunks[index].before)
                return stamps

    def _step(self, fragment: int, result: e.ResultArrived, *, again: bool) -> Stamp:
        chunk = self.chunks[fragment][result.chunk]
        if not again:
            chunk.before = chunk.value
        chunk.write(short_digest(chunk.before + bytes(result.codes)))
        base = result.of_chunk.base_stamp
        steps, weight = base.steps + 1, base.weight + result.rank.weight
        return stamp_of(result.chunk, chunk.value, result.cycle, steps, weight)


class Trainer:
    """Sends when it may, and says what the real one says when it is to hold still."""

    def __init__(self) -> None:
        self.in_flight: dict[int, int] = {}
        self.yielded: set[int] = set()
        self.due: dict[int, int] = {}
        self.merged: list[tuple[int, int]] = []

    def may_be_written(self, fragment: int) -> bool:
        return fragment in self.in_flight or fragment in self.yielded


class Peer:
    """One core, and the shell around it."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.life = next(world.lives)
        self.memory = Memory(world.num_chunks)
        self.trainer = Trainer()
        plan = SendPlan(GROUP, len(world.num_chunks), lambda cycle: cycle == world.last_cycle)
        self.core = FragmentCore(
            plan, name, self.memory.first_stamps(), short_digest(name.encode()) * 2, self._do
        )
        self.round = 0
        self.is_over = False
        self.asks = True
        self.banned: list[str] = []
        self.sent: list[tuple[int, int]] = []
        self.returned: list[e.SendEnded] = []
        self.further: dict[tuple[int, str], deque[GetResult]] = {}
        self.writes: deque[e.WriteOrder] = deque()
        self.told_trainer: deque[e.ForTrainer] = deque()
        self.commands: list[e.FragmentCommand] = []

    @property
    def is_idle(self) -> bool:
        """Whether the trainer, or anybody, waits for nothing."""
        trainer = self.trainer
        under_way = self.writes or self.told_trainer or trainer.in_flight
        waits = under_way or trainer.yielded or trainer.due
        return not waits and not self.further

    # --- what the core is told --------------------------------------------------------------------
    def told(self) -> FragmentCore:
        """The core, which knows the time and the group as they are now."""
        self.core.at(self.world.now_s)
        self.core.see(self.world.seen_by(self))
        return self.core

    def send(self, fragment: int, cycle: int) -> None:
        """The trainer sends as soon as the fragment is neither in flight nor yielded."""
        trainer = self.trainer
        if fragment in trainer.in_flight or fragment in trainer.yielded:
            trainer.due[fragment] = cycle
            return
        trainer.in_flight[fragment] = cycle
        self.sent.append((fragment, cycle))
        parts = (self.codes(fragment, cycle, k) for k in range(self.world.num_chunks[fragment]))
        self.told().sent(e.Sent(fragment, cycle, memoryview(b"".join(parts)), 1, 1))

    def codes(self, fragment: int, cycle: int, chunk: int) -> bytes:
        return short_digest(f"{self.name}/{fragment}/{cycle}/{chunk}".encode())

    def _send_due(self, fragment: int) -> None:
        if fragment in self.trainer.due:
            self.send(fragment, self.trainer.due.pop(fragment))

    # --- commands ---------------------------------------------------------------------------------
    def _do(self, command: e.FragmentCommand) -> None:
        self.commands.append(command)
        self.carry_out(command)

    def carry_out(self, command: e.FragmentCommand) -> None:
        match command:
            case e.SendMessage(peer_id, message, codes):
                self.world.post(self.name, peer_id, message, bytes(codes))
            case e.Contribute():
                self._contribute(command)
            case e.Average():
                self.world.later(lambda: self._average(command))
            case e.SendEnded():
                self.returned.append(command)
            case e.Ask(peer_id, question):
                self._ask(peer_id, question)
            case e.Audit(result):
                self.world.later(lambda: self.told().audited(result, *self.world.audited(result)))
            case e.Convict(owner):
                self.banned.append(owner)
            case e.ForgetOthers():
                pass
            case Merge() | Yield():
                self.told_trainer.append(command)
                self.world.later(self._tell_trainer)
            case _:
                self.writes.append(command)
                self.world.later(self._write_next)

    def _average(self, order: e.Average) -> None:
        self.told().averaged(order.fragment, order.cycle, self._averages(order))

    def _contribute(self, order: e.Contribute) -> None:
        sent = order.sent
        parts = {
            s.chunk: sent.codes[s.chunk * CODE_BYTES : (s.chunk + 1) * CODE_BYTES]
            for s in order.stamps
        }
        message = Contribution(
            GROUP,
            sent.fragment,
            sent.cycle,
            1 if order.stamps else 0,
            1,
            1,
            order.stamps,
            (),
            (),
            bytes(64),
        )
        if order.owner == self.name:
            self.world.later(lambda: self.told().received(self.name, message, parts), at_once=True)
        else:
            self.world.post(self.name, order.owner, message, b"".join(parts.values()))

    def _averages(self, order: e.Average) -> e.Averages:
        contributors = sorted({p for each in order.admitted.values() for p in each.contributors})
        parts, chunks = {}, []
        for chunk, admitted in order.admitted.items():
            codes = averaged_codes((p, bytes(order.codes[chunk][p])) for p in admitted.contributors)
            parts[chunk] = memoryview(codes)
            mask = mask_of(contributors.index(p) for p in admitted.contributors)
            base = admitted.base
            chunks.append(
                ChunkResult(chunk, base.steps, base.weight, base.digest, mask, short_digest(codes))
            )
        result = Result(
            GROUP,
            order.fragment,
            order.cycle,
            self.name,
            self.life,
            tuple(contributors),
            (1,) * len(contributors),
            (bytes(16),) * len(contributors),
            tuple(chunks),
            tuple(parts),
            bytes(64),
        )
        return e.Averages(result, memoryview(b"".join(parts.values())), parts)

    def _tell_trainer(self) -> None:
        """The trainer is told one after another, each in its time."""
        message, trainer = self.told_trainer.popleft(), self.trainer
        fragment = message.fragment
        match message:
            case Merge(_, None):
                trainer.yielded.discard(fragment)
            case Merge(_, int(cycle)):
                if trainer.in_flight.get(fragment) == cycle:
                    del trainer.in_flight[fragment]
                    trainer.merged.append((fragment, cycle))
            case Yield() if fragment in trainer.in_flight:
                self.told().trainer_held(fragment, e.HoldOutcome.VOID)
                return
            case Yield():
                trainer.yielded.add(fragment)
                self.told().trainer_held(fragment, e.HoldOutcome.YIELDED)
                return
        self._send_due(fragment)

    def _write_next(self) -> None:
        """Writes are made one after another, each in its time."""
        order = self.writes.popleft()
        if isinstance(order, e.Verify):
            self.told().verified(order.fragment, self.memory.carry_out(order))
            return
        assert self.trainer.may_be_written(order.fragment)
        late = self.world.now_s > order.until_s
        stamps = {} if late else self.memory.carry_out(order)
        self.told().written(order.fragment, stamps)

    # --- questions --------------------------------------------------------------------------------
    def _ask(self, peer_id: str, question: e.FragmentQuestion) -> None:
        key = question.fragment, peer_id
        if not self.asks:
            return
        if isinstance(question, GetResult):
            self.further[key].append(question)
        elif isinstance(question, GetChunkState):
            self.world.later(lambda: self._fetch(peer_id, question))
        else:
            self.further[key] = deque()
            self.world.later(lambda: self._ask_stamps(key))

    def _fetch(self, peer_id: str, asked: GetChunkState) -> None:
        """The other one answers at one moment, and the answer comes at a later one."""
        other = self.world.peers[peer_id]
        fragment, chunk = asked.fragment, asked.chunk
        ledger, value = other.core.ledger(fragment), other.memory.chunks[fragment][chunk].value
        answer: ChunkStateReply | None = ChunkStateReply(
            fragment, ledger.cycle(chunk), ledger.stamp(chunk)
        )
        if self.world.loses():
            answer = None
        values = {chunk: memoryview(value)}
        self.world.later(lambda: self.told().answered(peer_id, asked, answer, values))

    def _ask_stamps(self, key: tuple[int, str]) -> None:
        fragment, peer_id = key
        if self.world.loses():
            self._ask_no_more(key)
            return
        ledger = self.world.peers[peer_id].core.ledger(fragment)
        answer = Stamps(fragment, tuple(ledger.stamps), tuple(ledger.cycles))
        self.told().answered(peer_id, GetStamps(GROUP, fragment), answer, {})
        self.world.later(lambda: self._ask_further(key))

    def _ask_further(self, key: tuple[int, str]) -> None:
        further = self.further[key]
        if not further:
            self._ask_no_more(key)
            return
        asked = further.popleft()
        kept = self.world.peers[key[1]].core.result_of(asked.fragment, asked.cycle, asked.chunk)
        result, codes = (None, {}) if kept is None else (kept[0], {asked.chunk: kept[1]})
        self.told().answered(key[1], asked, result, codes)
        self.world.later(lambda: self._ask_further(key))

    def _ask_no_more(self, key: tuple[int, str]) -> None:
        del self.further[key]
        self.told().answered(key[1], GetStamps(GROUP, key[0]), None, {})


class World:
    """Peers and what is on its way between them.

    Args:
        loss: share of messages and questions that are lost, until `calm` is called.
        delay_s: the longest that anything takes.
    """

    def __init__(
        self,
        names: str,
        seed: int = 0,
        *,
        num_chunks: list[int] | None = None,
        loss: float = 0.0,
        delay_s: float = 0.1,
        last_cycle: int | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.num_chunks = num_chunks or [2]
        self.last_cycle = last_cycle
        self.loss = loss
        self.delay_s = delay_s
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.audits: dict[str, AuditOutcome] = {}
        self.lives = itertools.count(1)
        self.peers = {name: Peer(self, name) for name in names}

    def seen_by(self, peer: Peer) -> e.GroupSeen:
        others = [
            other
            for other in self.peers.values()
            if other is not peer and peer.name not in other.banned and other.name not in peer.banned
        ]
        return e.GroupSeen(
            peer.round,
            frozenset([peer.name, *(other.name for other in others)]),
            {other.name: other.round for other in others if not other.is_over},
            peer.is_over,
        )

    # --- what is on its way -----------------------------------------------------------------------
    def loses(self) -> bool:
        return self.random.random() < self.loss

    def at(self, at_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at_s, next(self._numbers), do))

    def later(self, do: Callable[[], None], *, at_once: bool = False) -> None:
        self.at(self.now_s + (0.0 if at_once else self.random.uniform(0, self.delay_s)), do)

    def audited(self, result: Result) -> tuple[AuditOutcome, bytes]:
        """How an audit ends: as the owner deserves it."""
        outcome = self.audits.get(result.owner, AuditOutcome.TRUE)
        return outcome, PROOF if outcome is AuditOutcome.LIE else b""

    def post(self, sender: str, receiver: str, message: e.Unasked | Proof, codes: bytes) -> None:
        """Messages overtake each other; the real ones do not."""
        if self.loses():
            return
        if sender in self.peers[receiver].banned:
            return
        if isinstance(message, Proof):
            self.later(lambda: self.peers[receiver].told().proved(message.owner, codes))
            return
        carried = (
            [s.chunk for s in message.stamps]
            if isinstance(message, Contribution)
            else message.carried
            if isinstance(message, Result)
            else []
        )
        parts = {
            chunk: memoryview(codes[i * CODE_BYTES : (i + 1) * CODE_BYTES])
            for i, chunk in enumerate(carried)
        }
        self.later(lambda: self.peers[receiver].told().received(sender, message, parts))

    # --- time -------------------------------------------------------------------------------------
    def run(self, until_s: float) -> None:
        """Let happen what is due until then."""
        while True:
            due = {
                name: deadline_s
                for name, peer in self.peers.items()
                if (deadline_s := peer.core.next_deadline_s) is not None
            }
            first = min(due, key=lambda name: due[name], default=None)
            event_s = self._queue[0][0] if self._queue else float("inf")
            tick_s = due[first] if first is not None else float("inf")
            if min(event_s, tick_s) > until_s:
                self.now_s = until_s
                return
            if event_s <= tick_s:
                self.now_s, _, do = heapq.heappop(self._queue)
                do()
            else:
                assert first is not None
                self.now_s = max(self.now_s, tick_s)
                self.peers[first].told().tick()

    def calm(self) -> None:
        """From now on nothing is lost."""
        self.loss = 0.0
