"""A pipeline in virtual time: real cores, links and trainers that only take their time.

Time passes in a heap of events, and a seed says which relay is killed when. A kill takes a relay's
trainer, memory and streams at once; those at the other ends see their streams break, and that it is
gone after `notice_s`. It comes back as a newcomer that knows nothing.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random

from protocol.microbatch.core import AnswerOffer, Command, SendBoundary, SendNotice
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.relay import RelayCore
from protocol.microbatch.trainer_messages import Drop, Filled, Finish, Resend
from protocol.outcomes import RefusalReason
from protocol.pipeline.problem import PathRules
from protocol.routing.routers import RandomRouter
from protocol.wire.stage_messages import Direction, Hop, Microbatch, Noted, Notice

from .policies import Policy
from .setting import LOOK_S, PATIENCE_S, SLOTS, Machine, Name, Setting


class ChurnWorld:
    """A pipeline of cores in virtual time, on machines that a seed kills.

    Attributes:
        applied: how often a stage has stepped with a microbatch's gradient.
        begun: microbatches that set out.
        hung_s: longest time from a microbatch's beginning to its end.
    """

    def __init__(self, setting: Setting, policy: Policy, seed: int) -> None:
        self.setting = setting
        self.policy = policy
        self.draws = Random(seed)
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.applied: Counter[tuple[int, Name]] = Counter()
        self.begun: set[Name] = set()
        self.since_s: dict[Name, float] = {}
        self.hung_s = 0.0
        self.kills = 0
        self.named: dict[Microbatch, Name] = {}
        self.offers: dict[int, tuple[Machine, Machine, Hop, float | None]] = {}
        self.tickets = count()
        self.machines: dict[str, Machine] = {}
        self.stages = [
            [f"relay-{stage}-{i}" for i in range(setting.replicas)]
            for stage in range(1, setting.relay_stages + 1)
        ]
        self.known = {name for stage in self.stages for name in stage}
        visited = setting.relay_stages + 1
        for i in range(setting.data_peers):
            name = f"data-{i}"
            core = policy.core(name, RandomRouter(name, seed, visited, PathRules()), PATIENCE_S)
            self.machines[name] = Machine(name, core, i % setting.replicas)
        for name in sorted(self.known):
            self.machines[name] = Machine(name, RelayCore(SLOTS, PATIENCE_S), 0)

    # --- time -------------------------------------------------------------------------------------
    def later(self, delay_s: float, job: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now_s + delay_s, next(self.order), job))

    def run(self) -> None:
        """Let so many seconds pass, with kills; then none begins anew, and what is there ends."""
        self.look_around()
        self.later(self.setting.every_s, self.kill_one)
        for machine in self.origins:
            self.begin(machine)
        end_s = self.setting.seconds + PATIENCE_S
        while self.events and self.events[0][0] < end_s and not self.is_over:
            self.now_s, _, job = heapq.heappop(self.events)
            job()
        for name in self.known:
            self.step(self.machines[name])

    @property
    def origins(self) -> list[Machine]:
        """The data peers."""
        return [m for m in self.machines.values() if isinstance(m.core, DataPeerCore)]

    @property
    def is_over(self) -> bool:
        """Whether the time is up, and nothing is under way."""
        return self.now_s > self.setting.seconds and not any(m.out for m in self.origins)

    def look_around(self) -> None:
        """Everybody sees who is there."""
        relays = tuple(tuple(n for n in stage if n in self.known) for stage in self.stages)
        for machine in self.living():
            core = machine.core
            origins = [m.name for m in self.origins if self.policy.serves(machine.name, m.column)]
            if isinstance(core, DataPeerCore):
                seen = self.policy.seen(relays, machine.column)
                self.do(machine, core.peers_changed(seen, self.now_s, trained=True))
            else:
                self.do(machine, core.peers_changed(origins, self.now_s, ended=False))
            self.do(machine, core.ticked(self.now_s))
        self.later(LOOK_S, self.look_around)

    def living(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.is_alive]

    # --- churn ------------------------------------------------------------------------------------
    def kill_one(self) -> None:
        if self.now_s >= self.setting.seconds:
            return
        self.later(self.setting.every_s, self.kill_one)
        relays = [m for m in self.living() if isinstance(m.core, RelayCore)]
        if not relays:
            return
        machine = self.draws.choice(relays)
        machine.is_alive = False
        self.kills += 1
        for ticket in [t for t, (_, to, _, _) in self.offers.items() if to is machine]:
            sender, _, hop, _ = self.offers.pop(ticket)
            self.later(self.setting.latency_s, partial(self.not_taken, sender, hop))
        for ticket in [t for t, (by, _, _, _) in self.offers.items() if by is machine]:
            _, asked, _, _ = self.offers.pop(ticket)
            self.do(asked, asked.core.withdrawn(ticket))
        self.later(self.setting.notice_s, partial(self.known.discard, machine.name))
        self.later(self.setting.away_s, partial(self.come_back, machine.name))

    def come_back(self, name: str) -> None:
        self.machines[name] = Machine(name, RelayCore(SLOTS, PATIENCE_S), 0)
        self.known.add(name)

    # --- data peers -------------------------------------------------------------------------------
    def begin(self, machine: Machine) -> None:
        """A data peer's trainer begins an iteration."""
        assert isinstance(machine.core, DataPeerCore)
        if self.now_s >= self.setting.seconds:
            return
        machine.begun += 1
        first = machine.begun * 1000
        machine.out = set(range(first, first + self.setting.microbatches))
        self.do(machine, machine.core.begun(len(machine.out), self.now_s))
        for number in sorted(machine.out):
            self.do(
                machine, machine.core.produced(Direction.FORWARD, number, number, None, self.now_s)
            )

    def end(self, machine: Machine, number: int) -> None:
        """A data peer's microbatch has come to its end."""
        machine.out.discard(number)
        name = (machine.name, number)
        if name in self.since_s:
            self.hung_s = max(self.hung_s, self.now_s - self.since_s.pop(name))
        if not machine.out:
            self.later(self.setting.backward_s, partial(self.begin, machine))

    # --- commands ---------------------------------------------------------------------------------
    def do(self, machine: Machine, commands: list[Command]) -> None:
        for command in commands:
            self.obey(machine, command)

    def obey(self, machine: Machine, command: Command) -> None:
        match command:
            case Filled(direction=Direction.BACKWARD):
                self.put_first(machine, command)
            case Filled() | Drop() | Resend() | Finish():
                machine.work.append(command)
                self.work_on(machine)
            case SendBoundary(hop, slot, loss):
                self.offer(machine, hop, slot, loss)
            case AnswerOffer(ticket, refusal):
                self.answer(ticket, refusal)
            case SendNotice(to, message):
                for other in to:
                    told = partial(self.tell, machine, other, message)
                    self.later(self.setting.latency_s, told)

    def put_first(self, machine: Machine, command: Filled) -> None:
        """Gradients go first, behind the forward that they belong to, as in a trainer."""
        before = [
            each
            for each in machine.work
            if isinstance(each, Filled) and each.number == command.number
        ]
        for each in before:
            machine.work.remove(each)
        machine.work.extendleft([command, *reversed(before)])
        self.work_on(machine)

    def tell(self, machine: Machine, other: str, message: Notice) -> None:
        """Something said arrives; a data peer hears what came of it."""
        to, answer = self.machines[other], None
        if to.is_alive and machine.is_alive:
            answer, commands = to.core.on_message(machine.name, message, self.now_s)
            self.do(to, commands)
        if isinstance(machine.core, DataPeerCore) and isinstance(answer, Noted):
            told = partial(machine.core.noted, other, message, answer)
            self.later(self.setting.latency_s, lambda: self.do(machine, told()))

    # --- streams ----------------------------------------------------------------------------------
    def offer(self, machine: Machine, hop: Hop, slot: int, loss: float | None) -> None:
        if isinstance(machine.core, DataPeerCore) and hop.direction is Direction.FORWARD:
            name = (machine.name, slot)
            self.named[hop.microbatch] = name
            self.begun.add(name)
            self.since_s.setdefault(name, self.now_s)

        def ask() -> None:
            to = self.machines[hop.receiver]
            if not machine.is_alive:
                return
            if not to.is_alive:
                self.not_taken(machine, hop)
                return
            ticket = next(self.tickets)
            self.offers[ticket] = (machine, to, hop, loss)
            self.do(to, to.core.offered(ticket, hop))

        self.later(self.setting.latency_s, ask)

    def answer(self, ticket: int, refusal: RefusalReason | None) -> None:
        if ticket not in self.offers:
            return
        sender, to, hop, loss = self.offers.pop(ticket)
        if refusal is not None:
            self.later(self.setting.latency_s, partial(self.not_taken, sender, hop))
        else:
            self.later(self.setting.hop_s, partial(self.bring, sender, to, hop, loss))

    def bring(self, sender: Machine, to: Machine, hop: Hop, loss: float | None) -> None:
        if sender.is_alive and to.is_alive:
            self.do(to, to.core.arrived(hop, 0, loss))
            self.do(sender, sender.core.sent(hop, self.now_s, taken=True))
        elif to.is_alive:
            self.do(to, to.core.broke_off(hop, self.now_s))
        else:
            self.not_taken(sender, hop)

    def not_taken(self, sender: Machine, hop: Hop) -> None:
        if sender.is_alive:
            self.do(sender, sender.core.sent(hop, self.now_s, taken=False))

    # --- trainers ---------------------------------------------------------------------------------
    def work_on(self, machine: Machine) -> None:
        """Take the next piece of work, gradients first."""
        if machine.is_busy or not machine.work or not machine.is_alive:
            return
        command = machine.work.popleft()
        machine.is_busy = True
        self.later(self.duration_s(command), partial(self.finish, machine, command))

    def duration_s(self, command: Command) -> float:
        match command:
            case Filled(direction=Direction.BACKWARD):
                return self.setting.backward_s
            case Filled():
                return self.setting.forward_s
        return 0.0

    def finish(self, machine: Machine, command: Command) -> None:
        machine.is_busy = False
        if not machine.is_alive:
            return
        core = machine.core
        match command:
            case Filled(direction, number, _, loss, adds):
                self.computed(machine, direction, number, loss, adds=adds)
            case Drop(number):
                machine.held.discard(number)
                if number in machine.out:
                    self.end(machine, number)
            case Resend(number) if number in machine.held or number in machine.out:
                self.do(machine, core.produced(Direction.FORWARD, number, number, None, self.now_s))
            case Finish():
                self.step(machine)
                assert isinstance(core, RelayCore)
                self.do(machine, core.stepped(self.now_s))
        self.work_on(machine)

    def computed(
        self, machine: Machine, direction: Direction, number: int, loss: float | None, *, adds: bool
    ) -> None:
        core, now_s = machine.core, self.now_s
        if isinstance(core, DataPeerCore):
            if direction is Direction.FORWARD:
                self.do(machine, core.produced(Direction.BACKWARD, number, number, 1.0, now_s))
            else:
                self.applied[0, (machine.name, number)] += 1
                self.do(machine, core.returned(number, now_s))
                self.end(machine, number)
            return
        if direction is Direction.BACKWARD and number not in machine.held:
            return
        if direction is Direction.FORWARD:
            machine.held.add(number)
            self.do(machine, core.produced(direction, number, number, None, now_s))
            return
        machine.held.discard(number)
        held = core.numbered(number)
        if adds and held is not None:
            machine.added.append(self.named[held.hop.microbatch])
        self.do(machine, core.produced(direction, number, number, loss, now_s))
        self.do(machine, core.returned(number, now_s))

    def step(self, machine: Machine) -> None:
        """Move a relay's weights by the gradients that it has added."""
        if machine.is_alive and machine.added:
            stage = int(machine.name.split("-")[1])
            self.applied.update((stage, name) for name in machine.added)
            machine.added.clear()

    # --- what came of it --------------------------------------------------------------------------
    def goodput(self) -> list[float]:
        """Gradients that moved weights over those begun, for each stage."""
        return [
            sum(of_stage == stage for of_stage, _ in self.applied) / max(1, len(self.begun))
            for stage in range(self.setting.relay_stages + 1)
        ]

    @property
    def iterations(self) -> int:
        """Iterations that the data peer ahead of all has begun."""
        return max(machine.begun for machine in self.origins)

    @property
    def twice(self) -> int:
        """Gradients that a stage has counted more than once."""
        return sum(times > 1 for times in self.applied.values())
