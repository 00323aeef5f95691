"""A pipeline of cores alone: trainers and streams are queues, and a seed says what happens next.

The trainers here compute nothing; they only keep the books: what was forwarded, whose gradient was
added in which step, and that nothing happens to a microbatch that they do not hold. What a relay
has added counts for its stage when it steps; it is gone with the relay, or with its trainer.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

from protocol.microbatch.checks import Checks, Compare, Differing, Read
from protocol.microbatch.core import AnswerOffer, Command, OfferAhead, SendBoundary, SendNotice
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.relay import RelayCore
from protocol.microbatch.trainer_messages import Drop, Filled, Finish, Resend
from protocol.outcomes import RefusalReason
from protocol.pipeline.problem import PathRules
from protocol.routing.routers import RandomRouter
from protocol.wire.stage_messages import Announcement, Direction, Hop, Lost, Noted

PATIENCE_S = 30.0
SLOTS = 3
IN_FLIGHT = 2
LOOKS = 0.05
RULES = PathRules()


@dataclass
class Books:
    """What a trainer of these tests keeps count of."""

    held: dict[int, object] = field(default_factory=dict)
    added: Counter[object] = field(default_factory=Counter)
    steps: list[int] = field(default_factory=list)
    in_step: int = 0
    pending: list[object] = field(default_factory=list)


class Ahead:
    """A hop that was offered before there is anything to send; `told` is who waits for that.

    The stream ends with the life of the receiver's trainer.
    """

    def __init__(self, ticket, receiver):
        self.ticket = ticket
        self.receiver, self.life = receiver, receiver.life
        self.answers = []
        self.told = None

    def answered(self, refusal):
        self.answers.append(refusal)
        if self.told:
            self.told(refusal)

    def when_answered(self, tell):
        self.told = tell
        if self.answers:
            tell(self.answers[0])


class Node:
    """A peer: its core, its trainer's books, and the names of its microbatches."""

    def __init__(self, name, core):
        self.name = name
        self.core = core
        self.books = Books()
        self.queue: deque[Command] = deque()
        self.alive = True
        self.life = 0


class MicrobatchWorld:
    """Data peers and relays. `step` does one thing, drawn at random.

    Attributes:
        hears_late: chance that a relay, as it looks around, has not heard yet that one trains.
        is_refused: whether a receiver refuses what a hop brings, since it cannot be right.
        made: what a relay adds to a boundary that a check reads, of a copy or of its original.
        differing: what data peers have found to differ.
    """

    def __init__(
        self,
        seed,
        data_peers=2,
        relays=(2, 2),
        visited=3,
        microbatches=4,
        slots=SLOTS,
        rules=RULES,
        checks=None,
    ):
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.microbatches = microbatches
        self.stages = [
            [f"relay-{stage}-{i}" for i in range(count)] for stage, count in enumerate(relays, 1)
        ]
        self.origins = [f"data-{i}" for i in range(data_peers)]
        self.nodes = {}
        for name in self.origins:
            router = RandomRouter(name, seed, visited, rules)
            seed_of = None if checks is None else f"{checks}/{name}"
            core = DataPeerCore(
                name, router, PATIENCE_S, in_flight=IN_FLIGHT, checks=Checks(seed_of)
            )
            self.nodes[name] = Node(name, core)
        for name in (n for stage in self.stages for n in stage):
            self.nodes[name] = Node(name, RelayCore(slots, PATIENCE_S))
        self.slots = slots
        self.todo = []
        self.named = {}
        self.applied: Counter[tuple[int, object]] = Counter()
        self.offers = {}
        self.ahead: dict[tuple[Node, Hop], Ahead] = {}
        self.forgotten: dict[tuple[str, object], int] = {}
        self.asked = {}
        self.taken = set()
        self.path: tuple[str, ...] = ()
        self.forwards: Counter[str] = Counter()
        self.hops = {}
        self.tickets = 0
        self.begun: Counter[str] = Counter()
        self.unborn: dict[str, deque[int]] = {}
        self.out = {}
        self.failing = 0.0
        self.hears_late = 0.0
        self.is_refused = lambda hop: False
        self.made = lambda relay, is_copy: 0.0
        self.differing: list[Differing] = []
        self.heard: set[tuple[str, str]] = set()
        self.trained = True

    # --- what happens -----------------------------------------------------------------------------
    def look_around(self):
        living = {name for name, node in self.nodes.items() if node.alive}
        relays = tuple(tuple(n for n in stage if n in living) for stage in self.stages)
        origins = [name for name in self.origins if name in living]
        for name in sorted(living):
            core = self.nodes[name].core
            if name in self.origins:
                self.do(name, core.peers_changed(relays, self.now_s, trained=self.trained))
            else:
                self.hear(name, origins)
                heard = [each for each in origins if (name, each) in self.heard]
                self.do(name, core.peers_changed(heard, self.now_s, ended=False, alive=origins))
            self.do(name, core.ticked(self.now_s))

    def hear(self, name, origins):
        """A relay hears of data peers that they train, of some later than of others."""
        for each in origins:
            if not self.hears_late or self.random.random() >= self.hears_late:
                self.heard.add((name, each))

    def begin(self, name):
        """The trainer of a data peer begins an iteration."""
        node = self.nodes[name]
        self.begun[name] += 1
        node.books.in_step = 0
        first = self.begun[name] * 1000
        self.out[name] = set(range(first, first + self.microbatches))
        self.unborn[name] = deque(sorted(self.out[name]))
        self.do(name, node.core.begun(self.microbatches, self.now_s))
        self.embed(node)

    def embed(self, node):
        """The trainer of a data peer begins as many as it keeps under way."""
        unborn = self.unborn.get(node.name, ())
        while unborn and len(node.books.held) < IN_FLIGHT:
            number = unborn.popleft()
            node.books.held[number] = "embedded"
            produced = node.core.produced(Direction.FORWARD, number, number, None, self.now_s)
            self.do(node.name, produced)

    def kill(self, name):
        self.nodes[name].alive = False
        self.break_streams(self.nodes[name])

    def revive(self, name):
        """A relay comes back, and knows nothing; what was said to the old one reaches nobody."""
        self.nodes[name] = Node(name, RelayCore(self.slots, PATIENCE_S))

    def restart(self, name):
        """A trainer dies, and a new one starts; what the old one was told is not told to it."""
        node = self.nodes[name]
        node.life += 1
        node.queue.clear()
        self.unborn.pop(name, None)
        node.books.held.clear()
        node.books.pending.clear()
        node.books.in_step = 0
        self.break_streams(node)
        self.do(name, node.core.restarted(self.slots))

    def settle(self):
        """Every relay that lives steps with what it has added."""
        for name in self.relays:
            node = self.nodes[name]
            if node.alive:
                stage = self.stage_of(name)
                self.applied.update((stage, self.named[each]) for each in node.books.pending)

    def stage_of(self, name):
        return next(i for i, stage in enumerate(self.stages, 1) if name in stage)

    @property
    def relays(self):
        return [name for stage in self.stages for name in stage]

    def run(self, iterations, bound=20_000):
        """Let every data peer train so many iterations."""
        self.look_around()
        for name in self.origins:
            self.begin(name)
        for _ in range(bound):
            for name in self.origins:
                if self.nodes[name].alive and not self.out[name] and self.begun[name] < iterations:
                    self.begin(name)
            if self.is_done(iterations):
                return True
            if self.hears_late and self.random.random() < LOOKS:
                self.look_around()
            if self.todo:
                job = self.todo.pop(self.random.randrange(len(self.todo)))
                job()
            else:
                self.now_s += 1.0
                self.look_around()
        return False

    def is_done(self, iterations):
        living = [n for n in self.origins if self.nodes[n].alive]
        ended = all(self.begun[n] >= iterations and not self.out[n] for n in living)
        return ended and not self.todo

    # --- commands ---------------------------------------------------------------------------------
    def do(self, name, commands):
        node = self.nodes[name]
        for command in commands:
            if isinstance(command, Filled | Drop | Resend | Finish):
                # One queue leads to a trainer, so its commands stay in order.
                node.queue.append(command)
                self.todo.append(partial(self.train_next, node, node.life))
            elif isinstance(command, Read):  # before its slot is free
                self.read(node, command)
            elif isinstance(command, Compare):
                self.todo.append(partial(self.compare, node, command.check))
            elif isinstance(command, Differing):
                self.differing.append(command)
            elif isinstance(command, OfferAhead):  # under way before anything else is done
                self.offer_ahead(node, command.hop)
            else:
                self.todo.append(partial(self.obey, node, command))

    def read(self, node, command):
        check, relay = command.check, command.relay
        path = check.path.relays
        is_copy = relay != path[check.place]
        through = [*path[: check.place], relay, *path[check.place + 1 :]]
        output = sum(self.made(each, is_copy) for each in through)
        self.do(node.name, node.core.read(check, relay, str(output).encode()))

    def compare(self, node, check):
        outputs = [float(output) for output in check.outputs.values()]
        distances = [abs(one - other) for one, other in combinations(outputs, 2)]
        self.do(node.name, node.core.compared(check, distances, self.now_s))

    def is_here(self, node):
        """Whether this life of a peer is its present one."""
        return node.alive and self.nodes[node.name] is node

    def train_next(self, node, life):
        if self.is_here(node) and life == node.life:
            self.train(node, node.queue.popleft())

    def obey(self, node, command):
        if not self.is_here(node):
            return
        match command:
            case AnswerOffer(ticket, refusal):
                if ticket in self.offers:
                    self.offers.pop(ticket)(refusal)
                elif refusal is None:  # nobody is there any more
                    self.do(node.name, node.core.broke_off(self.hops[ticket], self.now_s))
            case SendBoundary(hop, slot, loss):
                if (
                    hop.place == 1
                    and hop.direction is Direction.FORWARD
                    and node.name in self.origins
                ):
                    self.named[hop.microbatch] = (node.name, slot)
                self.send(node, hop, loss)
            case SendNotice(to, message):
                if isinstance(message, Lost):
                    self.withdraw(node, message)
                self.todo += [partial(self.tell, node, other, message) for other in to]

    def train(self, node, command):
        match command:
            case Filled():
                self.compute(node, command)
            case Drop(number):
                node.books.held.pop(number, None)
                self.out.get(node.name, set()).discard(number)
                self.embed(node)
            case Resend(number):
                if number in node.books.held:
                    again = node.core.produced(Direction.FORWARD, number, number, None, self.now_s)
                    self.do(node.name, again)
            case Finish():
                node.books.steps.append(node.books.in_step)
                node.books.in_step = 0
                stage = self.stage_of(node.name)
                self.applied.update((stage, self.named[each]) for each in node.books.pending)
                node.books.pending.clear()
                assert not node.books.held, "a step while forwards wait for their gradients"
                self.do(node.name, node.core.stepped(self.now_s))

    def tell(self, node, name, message):
        """Say something; what a data peer says of a microbatch may fail to come."""
        other, answer = self.nodes[name], None
        may_fail = isinstance(message, Lost) and node.name in self.origins
        if not self.is_here(node) and isinstance(message, Announcement):
            return
        if other.alive and not (may_fail and self.random.random() < self.failing):
            if isinstance(message, Lost) and name not in self.origins:
                self.withdraw(other, message)
            answer, commands = other.core.on_message(node.name, message, self.now_s)
            self.do(name, commands)
        if node.name in self.origins and isinstance(answer, Noted):
            self.do(node.name, node.core.noted(name, message, answer))

    def compute(self, node, command):
        direction, number, books, core = command.direction, command.number, node.books, node.core
        if node.name in self.origins:
            assert number in books.held
            if direction is Direction.FORWARD:
                books.held[number] = "finished"
                self.do(
                    node.name, core.produced(Direction.BACKWARD, number, number, 1.0, self.now_s)
                )
                return
            del books.held[number]
            books.added[number] += 1
            self.out[node.name].discard(number)
            self.do(node.name, core.returned(number, self.now_s))
            self.embed(node)
            return
        if direction is Direction.FORWARD:
            assert number not in books.held
            books.held[number] = "forwarded"
            self.forwards[node.name] += 1
            self.do(node.name, core.produced(direction, number, number, None, self.now_s))
            return
        if direction is Direction.SCORE:
            self.forwards[node.name] += 1
            self.do(node.name, core.produced(direction, number, number, None, self.now_s))
            return
        assert books.held.pop(number) == "forwarded"
        if command.adds:
            books.added[number] += 1
            books.in_step += 1
            held = core.numbered(number)
            if held is not None:  # the iteration has not ended without it
                books.pending.append(held.hop.microbatch)
        self.do(node.name, core.produced(direction, number, number, command.loss, self.now_s))
        self.do(node.name, core.returned(number, self.now_s))

    def send(self, node, hop, loss):
        """Offer, and bring it when it is welcome; some hops fail."""
        other = self.nodes[hop.receiver]
        if not other.alive or self.random.random() < self.failing:
            self.do(node.name, node.core.sent(hop, self.now_s, taken=False))
            return
        ahead, life = self.ahead.pop((node, hop), None) or self.offer(node, hop), node.life
        other = ahead.receiver

        def answered(refusal):
            is_asked_for = self.is_here(node) and life == node.life
            if not is_asked_for:
                if refusal is None and self.is_here(other):
                    self.do(other.name, other.core.broke_off(hop, self.now_s))
                self.fail(node, hop)
            elif refusal is None:
                self.todo.append(lambda: self.bring(node, life, ahead, hop, loss))
            else:
                self.do(node.name, node.core.sent(hop, self.now_s, taken=False))

        ahead.when_answered(answered)

    def fail(self, node, hop):
        """What a trainer had made is gone with it."""
        if self.is_here(node):
            self.do(node.name, node.core.sent(hop, self.now_s, taken=False))

    def offer(self, node, hop):
        """Ask the receiver."""
        other = self.nodes[hop.receiver]
        ticket, self.tickets = self.tickets, self.tickets + 1
        ahead = Ahead(ticket, other)
        self.offers[ticket] = ahead.answered
        self.hops[ticket] = hop
        self.asked[ticket] = (node, node.life, other)
        self.do(other.name, other.core.offered(ticket, hop))
        return ahead

    def offer_ahead(self, node, hop):
        """Ask the receiver before there is anything to send, unless it is lost already."""
        is_known = hop.attempt > self.forgotten.get((node.name, hop.microbatch), -1)
        there = self.is_here(node) and self.nodes[hop.receiver].alive
        if is_known and there and (node, hop) not in self.ahead:
            self.ahead[node, hop] = self.offer(node, hop)

    def withdraw(self, node, lost):
        """What was offered ahead will not come: its stream is closed."""
        key = node.name, lost.microbatch
        self.forgotten[key] = max(lost.attempt, self.forgotten.get(key, 0))
        for asker, hop in list(self.ahead):
            is_lost = hop.microbatch == lost.microbatch and hop.attempt <= lost.attempt
            if asker is node and is_lost:
                self.take_back(node, hop)

    def take_back(self, node, hop):
        ahead = self.ahead.pop((node, hop))
        other = ahead.receiver
        if self.offers.pop(ahead.ticket, None) is not None:
            self.do(other.name, other.core.withdrawn(ahead.ticket))
        elif ahead.answers == [None] and self.is_here(other):
            self.do(other.name, other.core.broke_off(hop, self.now_s))

    def bring(self, node, life, ahead, hop, loss):
        other = ahead.receiver
        if not self.is_here(node) or life != node.life:
            if self.is_here(other):
                self.do(other.name, other.core.broke_off(hop, self.now_s))
            self.fail(node, hop)
            return
        taken = self.is_here(other) and other.life == ahead.life
        if taken and self.is_refused(hop):
            taken = False
            self.do(other.name, other.core.broke_off(hop, self.now_s, refused=True))
        elif taken:
            self.taken.add((hop.direction, hop.place))
            self.path = hop.path.relays
            if (onward := hop.next_hop()) is not None:
                self.offer_ahead(other, onward)
            self.do(other.name, other.core.arrived(hop, 0, loss))
        self.do(node.name, node.core.sent(hop, self.now_s, taken=taken))

    def break_streams(self, node):
        """A peer is gone, or its trainer: who asked it hears so, and whom it asked."""
        for asker, hop in list(self.ahead):
            if asker is node:
                self.take_back(node, hop)
        for ticket, (asker, life, other) in list(self.asked.items()):
            if ticket not in self.offers:
                del self.asked[ticket]
            elif other is node and not node.alive:
                self.offers.pop(ticket)(RefusalReason.UNAVAILABLE)
            elif asker is node and (not node.alive or life != node.life):
                del self.offers[ticket]
                self.do(other.name, other.core.withdrawn(ticket))
                self.fail(node, self.hops[ticket])
