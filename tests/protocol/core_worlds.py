"""Cores of the fragment exchange, connected by queues that delay, reorder and lose what they carry.

The arithmetic is a hash: a chunk's value after a step is a digest of the value before it and of the
codes that were applied. So two peers have the same bytes exactly if they have applied the same
results to the same values in the same order.
"""

import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from protocol.diloco import fragment_events as e
from protocol.diloco.fragment_core import FragmentCore
from protocol.diloco.keeper import short_digest
from protocol.diloco.peers import SendPlan
from protocol.fragment.chunk_ledger import NEVER, Stamp
from protocol.outcomes import AuditOutcome
from protocol.wire.fragment_messages import (
    ChunkResult,
    ChunkStamp,
    Contribution,
    Proof,
    Result,
    mask_of,
)

GROUP = "group"
CODE_BYTES = 16
PROOF = b"what only checks out of a lie"


def stamp_of(value: bytes, cycle: int, steps: int, weight: int) -> Stamp:
    return Stamp(steps, weight, short_digest(value + f"/{cycle}/{steps}/{weight}".encode()))


def first_value(fragment: int, chunk: int) -> bytes:
    return short_digest(f"{fragment}/{chunk}".encode())


def averaged_codes(codes: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Equal for equal contributors with equal codes."""
    return short_digest(b"".join(f"{p}/{w}/".encode() + part for p, w, part in sorted(codes)))


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
        return [[stamp_of(chunk.value, NEVER, 0, 0) for chunk in of] for of in self.chunks]

    def values(self) -> list[list[bytes]]:
        return [[chunk.value for chunk in of] for of in self.chunks]

    def carry_out(
        self, order: e.Verify | e.WriteResults | e.WriteChunk | e.UndoSteps
    ) -> e.Verified | e.Written:
        chunks = self.chunks[order.fragment]
        match order:
            case e.Verify(fragment, cycles):
                spoilt = {}
                for i, chunk in enumerate(chunks):
                    if chunk.value != chunk.written:
                        chunk.written = chunk.value
                        spoilt[i] = stamp_of(chunk.value, cycles[i], 0, 0)
                return e.Verified(fragment, spoilt)
            case e.WriteResults(fragment, results):
                return e.Written(
                    fragment, {each.chunk: self._step(fragment, each) for each in results}
                )
            case e.WriteChunk(fragment, chunk, cycle, stamp, values):
                if stamp_of(bytes(values), cycle, stamp.steps, stamp.weight) != stamp:
                    return e.Written(fragment, {})
                chunks[chunk].write(bytes(values))
                return e.Written(fragment, {chunk: stamp})
            case e.UndoSteps(fragment, stamps):
                for index in stamps:
                    chunks[index].write(chunks[index].before)
                return e.Written(fragment, stamps)

    def _step(self, fragment: int, result: e.ResultToWrite) -> Stamp:
        chunk = self.chunks[fragment][result.chunk]
        if not result.again:
            chunk.before = chunk.value
        chunk.write(short_digest(chunk.before + bytes(result.codes)))
        steps, weight = result.base.steps + 1, result.base.weight + result.outcome.weight
        return stamp_of(chunk.value, result.cycle, steps, weight)


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
            plan, name, self.memory.first_stamps(), short_digest(name.encode()) * 2
        )
        self.round = 0
        self.is_over = False
        self.asks = True
        self.banned: list[str] = []
        self.sent: list[tuple[int, int]] = []
        self.returned: list[e.SendEnded] = []
        self.further: dict[tuple[int, str], deque[e.AskResult]] = {}
        self.orders: dict[int, deque[e.InOrder]] = defaultdict(deque)
        self.commands: list[e.FragmentCommand] = []

    @property
    def is_idle(self) -> bool:
        """Whether the trainer, or anybody, waits for nothing."""
        trainer = self.trainer
        waits = any(self.orders.values()) or trainer.in_flight or trainer.yielded or trainer.due
        return not waits and not self.further

    # --- events -----------------------------------------------------------------------------------
    def feed(self, event: e.FragmentEvent) -> None:
        seen = self.world.seen_by(self)
        for told in (seen, event):
            for command in self.core.step(self.world.now_s, told):
                self.commands.append(command)
                self.carry_out(command)

    def send(self, fragment: int, cycle: int) -> None:
        """The trainer sends as soon as the fragment is neither in flight nor yielded."""
        trainer = self.trainer
        if fragment in trainer.in_flight or fragment in trainer.yielded:
            trainer.due[fragment] = cycle
            return
        trainer.in_flight[fragment] = cycle
        self.sent.append((fragment, cycle))
        parts = (self.codes(fragment, cycle, k) for k in range(self.world.num_chunks[fragment]))
        self.feed(e.Sent(fragment, cycle, memoryview(b"".join(parts)), 1, 1))

    def codes(self, fragment: int, cycle: int, chunk: int) -> bytes:
        return short_digest(f"{self.name}/{fragment}/{cycle}/{chunk}".encode())

    def _send_due(self, fragment: int) -> None:
        if fragment in self.trainer.due:
            self.send(fragment, self.trainer.due.pop(fragment))

    # --- commands ---------------------------------------------------------------------------------
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
            case e.FetchChunk() | e.AskStamps() | e.AskResult():
                self._ask(command)
            case e.Audit(result):
                self.world.later(lambda: self.feed(self.world.audited(result)))
            case e.Convict(owner):
                self.banned.append(owner)
            case e.ForgetOthers() | e.CountRefusal() | e.CountAudit():
                pass
            case _:
                self.orders[command.fragment].append(command)
                if len(self.orders[command.fragment]) == 1:
                    self.world.later(lambda: self._carry_out_first(command.fragment))

    def _average(self, order: e.Average) -> None:
        self.feed(e.AveragesMade(order.fragment, order.cycle, self._averages(order)))

    def _contribute(self, order: e.Contribute) -> None:
        sent = order.sent
        parts = {
            s.chunk: sent.codes[s.chunk * CODE_BYTES : (s.chunk + 1) * CODE_BYTES]
            for s in order.stamps
        }
        message = Contribution(
            GROUP, sent.fragment, sent.cycle, order.weight, 1, 1, order.stamps, (), (), bytes(64)
        )
        if order.owner == self.name:
            self.world.later(
                lambda: self.feed(e.MessageReceived(self.name, message, parts)), at_once=True
            )
        else:
            self.world.post(self.name, order.owner, message, b"".join(parts.values()))

    def _averages(self, order: e.Average) -> e.Averages:
        contributors = sorted({p for admitted in order.admitted.values() for p in admitted.weights})
        weights = {p: w for a in order.admitted.values() for p, w in a.weights.items()}
        parts, chunks = {}, []
        for chunk, admitted in order.admitted.items():
            codes = averaged_codes(
                (p, w, bytes(order.codes[chunk][p])) for p, w in admitted.weights.items()
            )
            parts[chunk] = memoryview(codes)
            mask = mask_of(contributors.index(p) for p in admitted.weights)
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
            tuple(weights[p] for p in contributors),
            (bytes(16),) * len(contributors),
            tuple(chunks),
            tuple(parts),
            bytes(64),
        )
        return e.Averages(result, memoryview(b"".join(parts.values())), parts)

    def _carry_out_first(self, fragment: int) -> None:
        """Orders of one fragment are carried out one after another, each in its time."""
        order = self.orders[fragment][0]
        trainer = self.trainer
        match order:
            case e.MergeIntoTrainer(_, cycle):
                if trainer.in_flight.get(fragment) == cycle:
                    del trainer.in_flight[fragment]
                    trainer.merged.append((fragment, cycle))
            case e.HoldTrainer():
                if fragment not in trainer.in_flight:
                    trainer.yielded.add(fragment)
                held = (
                    e.HoldOutcome.VOID if fragment in trainer.in_flight else e.HoldOutcome.YIELDED
                )
                self._ended(fragment, e.TrainerHeld(fragment, held))
                return
            case e.AmendTrainer():
                trainer.yielded.discard(fragment)
            case e.Verify():
                self._ended(fragment, self.memory.carry_out(order))
                return
            case e.WriteResults() | e.WriteChunk() | e.UndoSteps():
                assert trainer.may_be_written(fragment)
                late = self.world.now_s > order.until_s
                self._ended(
                    fragment, e.Written(fragment, {}) if late else self.memory.carry_out(order)
                )
                return
        self._ended(fragment, None)
        self._send_due(fragment)

    def _ended(self, fragment: int, event: e.FragmentEvent | None) -> None:
        self.orders[fragment].popleft()
        waiting = bool(self.orders[fragment])
        if event is not None:
            self.feed(event)
        if waiting:
            self.world.later(lambda: self._carry_out_first(fragment))

    # --- questions --------------------------------------------------------------------------------
    def _ask(self, question: e.FetchChunk | e.AskStamps | e.AskResult) -> None:
        key = question.fragment, question.peer_id
        if not self.asks:
            return
        if isinstance(question, e.AskResult):
            self.further[key].append(question)
        elif isinstance(question, e.FetchChunk):
            self.world.later(lambda: self._fetch(question))
        else:
            self.further[key] = deque()
            self.world.later(lambda: self._ask_stamps(key))

    def _fetch(self, asked: e.FetchChunk) -> None:
        """The other one answers at one moment, and the answer comes at a later one."""
        other = self.world.peers[asked.peer_id]
        fragment, chunk = asked.fragment, asked.chunk
        ledger, value = other.core.ledger(fragment), other.memory.chunks[fragment][chunk].value
        event: e.FragmentEvent = e.ChunkFetched(
            fragment, chunk, ledger.cycle(chunk), ledger.stamp(chunk), memoryview(value)
        )
        if self.world.loses():
            event = e.FetchFailed(fragment, chunk)
        self.world.later(lambda: self.feed(event))

    def _ask_stamps(self, key: tuple[int, str]) -> None:
        fragment, peer_id = key
        if self.world.loses():
            del self.further[key]
            self.feed(e.QuestionsEnded(*key))
            return
        ledger = self.world.peers[peer_id].core.ledger(fragment)
        states = tuple(
            (ChunkStamp.of(chunk, stamp), ledger.cycle(chunk))
            for chunk, stamp in enumerate(ledger.stamps)
        )
        self.feed(e.StampsAnswered(*key, states))
        self.world.later(lambda: self._ask_further(key))

    def _ask_further(self, key: tuple[int, str]) -> None:
        further = self.further[key]
        if not further:
            del self.further[key]
            self.feed(e.QuestionsEnded(*key))
            return
        asked = further.popleft()
        kept = self.world.peers[asked.peer_id].core.result_of(
            asked.fragment, asked.cycle, asked.theirs.chunk
        )
        result, codes = (None, {}) if kept is None else (kept[0], {asked.theirs.chunk: kept[1]})
        self.feed(e.ResultAnswered(*key, asked.cycle, asked.theirs, result, codes))
        self.world.later(lambda: self._ask_further(key))


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

    def audited(self, result: Result) -> e.Audited:
        """How an audit ends: as the owner deserves it."""
        outcome = self.audits.get(result.owner, AuditOutcome.TRUE)
        return e.Audited(result, outcome, PROOF if outcome is AuditOutcome.LIE else b"")

    def post(self, sender: str, receiver: str, message: e.Told | Proof, codes: bytes) -> None:
        """Messages overtake each other; the real ones do not."""
        if self.loses():
            return
        if sender in self.peers[receiver].banned:
            return
        if isinstance(message, Proof):
            self.later(lambda: self.peers[receiver].feed(e.Proved(message, codes)))
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
        self.later(lambda: self.peers[receiver].feed(e.MessageReceived(sender, message, parts)))

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
                self.peers[first].feed(e.FragmentTick())

    def calm(self) -> None:
        """From now on nothing is lost."""
        self.loss = 0.0
