"""A pipeline of cores alone: trainers and streams are queues, and a seed says what happens next.

The trainers here compute nothing; they only keep the books: what was forwarded, whose gradient was
added in which step, and that nothing happens to a microbatch that they do not hold.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial

from protocol.microbatch.commands import (
    Announce,
    Answer,
    Command,
    Compute,
    FinishIteration,
    Forget,
    OfferAhead,
    Resend,
    Send,
    TellLost,
)
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.relay import RelayCore
from protocol.microbatch.trip import Leg, Trip
from protocol.pipeline.problem import NO_SWAPS
from protocol.routing.random_paths import RandomRouter

PATIENCE_S = 30.0
SLOTS = 3
IN_FLIGHT = 2


@dataclass
class Books:
    """What a trainer of these tests keeps count of."""

    held: dict[int, object] = field(default_factory=dict)
    added: Counter[object] = field(default_factory=Counter)
    steps: list[int] = field(default_factory=list)
    in_step: int = 0


class Ahead:
    """A trip that was offered before there is anything to send; `told` is who waits for that."""

    def __init__(self, ticket):
        self.ticket = ticket
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


class MicrobatchWorld:
    """Data peers and relays. `step` does one thing, drawn at random."""

    def __init__(
        self,
        seed,
        data_peers=2,
        relays=(2, 2),
        visited=3,
        microbatches=4,
        slots=SLOTS,
        rules=NO_SWAPS,
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
            self.nodes[name] = Node(
                name, DataPeerCore(name, router, PATIENCE_S, in_flight=IN_FLIGHT)
            )
        for name in (n for stage in self.stages for n in stage):
            self.nodes[name] = Node(name, RelayCore(slots, PATIENCE_S))
        self.todo = []
        self.offers = {}
        self.ahead: dict[tuple[str, Trip], Ahead] = {}
        self.tickets = 0
        self.forgotten: set[object] = set()
        self.begun: Counter[str] = Counter()
        self.unborn: dict[str, deque[int]] = {}
        self.out = {}
        self.failing = 0.0

    # --- what happens -----------------------------------------------------------------------------
    def look_around(self):
        living = {name for name, node in self.nodes.items() if node.alive}
        relays = tuple(tuple(n for n in stage if n in living) for stage in self.stages)
        origins = [name for name in self.origins if name in living]
        for name in sorted(living):
            core = self.nodes[name].core
            if name in self.origins:
                self.do(name, core.present(relays, self.now_s))
            else:
                self.do(name, core.present(origins, self.now_s, ended=False))
            self.do(name, core.ticked(self.now_s))

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
            produced = node.core.produced(Leg.FORWARD, number, number, None, self.now_s)
            self.do(node.name, produced)

    def kill(self, name):
        self.nodes[name].alive = False

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
        for command in commands:
            if isinstance(command, Compute | Forget | Resend | FinishIteration):
                # One queue leads to a trainer, so its commands stay in order.
                self.nodes[name].queue.append(command)
                self.todo.append(lambda: self.obey(name, self.nodes[name].queue.popleft()))
            elif isinstance(command, OfferAhead):
                self.obey(name, command)  # it is under way before anything else is done
            else:
                self.todo.append(lambda command=command: self.obey(name, command))

    def obey(self, name, command):
        node = self.nodes[name]
        if not node.alive:
            return
        match command:
            case Compute() | Forget() | Resend() | FinishIteration():
                self.train(node, command)
            case Answer(ticket, refusal):
                self.offers.pop(ticket, lambda _: None)(refusal)
            case Send(trip, _, loss):
                self.send(node, trip, loss)
            case OfferAhead(trip):
                self.offer_ahead(node, trip)
            case Announce(iteration, relays):
                for relay in relays:
                    self.todo.append(partial(self.announce, name, relay, iteration))
            case TellLost(microbatch, to):
                self.withdraw(name, microbatch)
                for other in to or (microbatch.origin,):
                    self.todo.append(partial(self.tell_lost, name, other, microbatch))

    def train(self, node, command):
        match command:
            case Compute(leg, number, slot, loss):
                self.compute(node, leg, number, slot, loss)
            case Forget(number):
                node.books.held.pop(number, None)
                self.out.get(node.name, set()).discard(number)
                self.embed(node)
            case Resend(number):
                assert node.books.held[number] == "embedded"
                again = node.core.produced(Leg.FORWARD, number, number, None, self.now_s)
                self.do(node.name, again)
            case FinishIteration():
                node.books.steps.append(node.books.in_step)
                node.books.in_step = 0
                assert not node.books.held, "a step while forwards wait for their gradients"
                self.do(node.name, node.core.stepped(self.now_s))

    def announce(self, origin, relay, iteration):
        other = self.nodes[relay]
        if other.alive and self.nodes[origin].alive:
            self.do(relay, other.core.announced(origin, iteration, self.now_s))
            self.do(origin, self.nodes[origin].core.heard(other.core.newest))

    def tell_lost(self, name, other, microbatch):
        core = self.nodes[other].core
        if not self.nodes[other].alive:
            return
        self.withdraw(other, microbatch)
        if other in self.origins:
            self.do(other, core.lost(microbatch, name))
        else:
            self.do(other, core.lost(microbatch, name, self.now_s))

    def compute(self, node, leg, number, slot, loss):
        books, core = node.books, node.core
        if node.name in self.origins:
            assert number in books.held
            if leg is Leg.FORWARD:
                books.held[number] = "finished"
                self.do(node.name, core.produced(Leg.BACKWARD, number, number, 1.0, self.now_s))
                return
            del books.held[number]
            books.added[number] += 1
            self.out[node.name].discard(number)
            self.do(node.name, core.returned(number, self.now_s))
            self.embed(node)
            return
        if leg is Leg.FORWARD:
            assert number not in books.held
            books.held[number] = "forwarded"
            self.do(node.name, core.produced(leg, number, number, None, self.now_s))
        else:
            assert books.held.pop(number) == "forwarded"
            books.added[number] += 1
            books.in_step += 1
            self.do(node.name, core.produced(leg, number, number, loss, self.now_s))
            self.do(node.name, core.returned(number, self.now_s))

    def send(self, node, trip, loss):
        """Offer, and bring it when it is welcome; some trips fail."""
        other = self.nodes[trip.receiver]
        if not other.alive or self.random.random() < self.failing:
            self.do(node.name, node.core.sent(trip, self.now_s, taken=False))
            return
        ahead = self.ahead.pop((node.name, trip), None) or self.offer(node, trip)

        def answered(refusal):
            if refusal is None and node.alive:
                self.todo.append(lambda: self.bring(node, other, trip, loss))
            else:
                self.do(node.name, node.core.sent(trip, self.now_s, taken=False))

        ahead.when_answered(answered)

    def offer(self, node, trip):
        """Ask the receiver; what is welcome there is offered ahead to the next one."""
        other = self.nodes[trip.receiver]
        ticket, self.tickets = self.tickets, self.tickets + 1
        ahead = Ahead(ticket)

        def answered(refusal):
            onward = trip.next_move()
            if refusal is None and onward is not None:
                self.offer_ahead(other, onward)
            ahead.answered(refusal)

        self.offers[ticket] = answered
        self.do(other.name, other.core.offered(ticket, trip))
        return ahead

    def offer_ahead(self, node, trip):
        there = node.alive and self.nodes[trip.receiver].alive
        if there and (node.name, trip) not in self.ahead and self.knows(node, trip.microbatch):
            self.ahead[node.name, trip] = self.offer(node, trip)

    def knows(self, node, microbatch):
        """Whether a peer has not been told that a microbatch is lost."""
        return (node.name, microbatch) not in self.forgotten

    def withdraw(self, name, microbatch):
        """What was offered ahead will not come: its stream is closed."""
        self.forgotten.add((name, microbatch))
        for key in [
            key for key in self.ahead if key[0] == name and key[1].microbatch == microbatch
        ]:
            ahead, other = self.ahead.pop(key), self.nodes[key[1].receiver]
            if ahead.ticket in self.offers:
                del self.offers[ahead.ticket]
                self.do(other.name, other.core.withdrawn(ahead.ticket))
            elif ahead.answers == [None]:
                self.do(other.name, other.core.broke_off(key[1], self.now_s))

    def bring(self, node, other, trip, loss):
        if not other.alive:
            self.do(node.name, node.core.sent(trip, self.now_s, taken=False))
            return
        self.do(other.name, other.core.arrived(trip, 0, loss))
        self.do(node.name, node.core.sent(trip, self.now_s, taken=True))
