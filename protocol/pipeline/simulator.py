"""The event simulator: what an iteration of given paths takes, to the microsecond.

Idea: a microbatch on the path d, p1 .. pm is a chain of 2m + 3 pieces of work, forward at d, p1 ..
pm, the loss at d, backward at pm .. p1, d. A piece of work arrives at its machine when the one
before has ended and its result has travelled; there it waits for the machine, and a forward also
for a slot. What is run is decided by these rules alone, so a schedule is a consequence of paths:

1. A machine does one piece at a time, and stays busy for a gap after it.
2. It takes what arrived first (ARRIVAL), or backwards and losses before forwards
   (BACKWARD_FIRST, the rule of 1F1B; the slots bound what is in flight). A forward without a free
   slot is passed over.
3. A forward takes a slot; its backward gives it back.
4. With `input_permille` below 1000 a backward has two parts. The gradient leaves after the first;
   the second (gradients of the weights) runs when the machine has nothing else to do, and only
   then is the slot free.
5. With `queued_links` a link carries one boundary after another.

Pieces that arrive at the same moment are taken in the order in which they were sent. Paths that
block each other's slots in a circle never end: such an iteration is `stuck`.

An event is a number: the loop has no objects, for the planner calls it thousands of times.

Source: the model of SkipPipe's schedulers/com_sym.py, restated; rules 4 and 5 are ours. Its four
published times come out within 0.4%.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from .problem import THOUSAND, Problem, StageWork

Relays = tuple[int, ...]
"""The machines that a microbatch visits after its data peer, in order."""


class Job(NamedTuple):
    """A microbatch.

    Attributes:
        release_us: not started before.
        after: index of the job that must have come home first, if there is one.
    """

    origin: int
    relays: Relays
    release_us: int = 0
    after: int | None = None


class Order(Enum):
    """What a machine takes first."""

    ARRIVAL = "arrival"
    BACKWARD_FIRST = "backward_first"


class WorkPiece(NamedTuple):
    """A piece of work in the chain of a microbatch.

    Attributes:
        kind: FORWARD, LOSS or BACKWARD.
        work_us: until its result can leave.
        later_us: work left for later, the second part of a split backward.
        gap_us: how long the machine stays busy afterwards.
        transfer_us: how long the result occupies the link to the next machine.
        flight_us: from leaving the link to being there.
        next: the machine to which the result goes; -1 at the end.
    """

    machine: int
    kind: int
    work_us: int
    later_us: int
    gap_us: int
    transfer_us: int
    flight_us: int
    next: int


FORWARD: Final = 0
LOSS: Final = 1
BACKWARD: Final = 2
LATER: Final = 3
WAKE: Final = -1
"""In place of a job's index: the machine, which stands in place of the place, is free again."""
Waiting = tuple[int, int, int, int]
"""An event: its moment, a running number, the job's index (or WAKE), the place."""
Route = tuple[WorkPiece, ...]


class Stretch(NamedTuple):
    """A piece of work as it was done, for pictures and utilisation."""

    machine: int
    job: int
    kind: int
    start_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an iteration took.

    Attributes:
        makespan_us: until the last piece of work has ended; None when it is stuck.
        done_us: when each job came home; -1 where it did not.
    """

    makespan_us: int | None
    done_us: tuple[int, ...]


class Simulator:
    """Prices jobs of one problem; keeps the chains of paths that it has seen."""

    def __init__(self, problem: Problem, order: Order = Order.ARRIVAL) -> None:
        self.problem = problem
        self._slots = [peer.slots for peer in problem.peers]
        self._backward_first = order is Order.BACKWARD_FIRST
        self._pieces: dict[tuple[int, int, int, bool], WorkPiece] = {}
        self._routes: dict[tuple[int, Relays], Route] = {}
        self._unloaded: dict[tuple[int, Relays], int] = {}

    def route(self, origin: int, relays: Relays) -> Route:
        """The chain of work of a microbatch on this path."""
        key = (origin, relays)
        if (found := self._routes.get(key)) is None:
            found = self._routes[key] = self._chain(origin, relays)
        return found

    def unloaded_us(self, origin: int, relays: Relays) -> int:
        """What a microbatch on this path takes when it has the network to itself."""
        key = (origin, relays)
        if (found := self._unloaded.get(key)) is None:
            found = self._unloaded[key] = sum(
                piece.work_us + piece.transfer_us + piece.flight_us for piece in self.route(*key)
            )
        return found

    def _chain(self, origin: int, relays: Relays) -> Route:
        path = (origin, *relays)
        there = [*path, origin, *reversed(path), -1]
        kinds = [*([FORWARD] * len(path)), LOSS, *([BACKWARD] * len(path))]
        return tuple(
            self._piece(there[place], kind, there[place + 1], place == 0)
            for place, kind in enumerate(kinds)
        )

    def _piece(self, machine: int, kind: int, then: int, first: bool) -> WorkPiece:
        key = (machine, kind, then, first)
        if (found := self._pieces.get(key)) is None:
            found = self._pieces[key] = piece_of(self.problem, machine, kind, then, first=first)
        return found

    def run(self, jobs: Sequence[Job], record: list[Stretch] | None = None) -> Outcome:
        """Simulate one iteration.

        Args:
            record: gets every piece of work as it was done.
        """
        iteration = Iteration(self, jobs, record)
        iteration.play()
        return iteration.outcome()


class Iteration:
    """The state of one run."""

    def __init__(
        self, simulator: Simulator, jobs: Sequence[Job], record: list[Stretch] | None
    ) -> None:
        number = len(simulator._slots)
        self.jobs = list(jobs)
        self.routes = [simulator.route(job.origin, job.relays) for job in jobs]
        self.slots = list(simulator._slots)
        self.backward_first = simulator._backward_first
        self.queued = simulator.problem.queued_links
        self.link_free: dict[tuple[int, int], int] = {}
        self.record = record
        self.busy_until = [0] * number
        self.wakes = [False] * number
        self.forwards: list[deque[Waiting]] = [deque() for _ in range(number)]
        self.others: list[deque[Waiting]] = [deque() for _ in range(number)]
        self.laters: list[deque[tuple[int, int]]] = [deque() for _ in range(number)]
        self.done = [-1] * len(jobs)
        self.successors = {job.after: i for i, job in enumerate(jobs) if job.after is not None}
        self.events: list[Waiting] = []
        self.sent = 0
        self.end = 0

        for index, job in enumerate(self.jobs):
            if job.after is None:
                self.send(job.release_us, index, 0)

    def play(self) -> None:
        """Do all that can be done."""
        events, routes, busy_until, wakes = self.events, self.routes, self.busy_until, self.wakes
        pop = heapq.heappop
        while events:
            event = pop(events)
            now, _, index, place = event
            if index == WAKE:
                machine = place
                wakes[machine] = False
            else:
                piece = routes[index][place]
                machine = piece.machine
                (self.others if piece.kind else self.forwards)[machine].append(event)
            if busy_until[machine] <= now:
                self._start(machine, now)
            elif not wakes[machine]:
                self.wake(machine)

    def outcome(self) -> Outcome:
        """What it took."""
        stuck = -1 in self.done
        return Outcome(None if stuck else self.end, tuple(self.done))

    def send(self, moment: int, index: int, place: int) -> None:
        """Let a job arrive at a place of its route, or something else happen."""
        self.sent += 1
        heapq.heappush(self.events, (moment, self.sent, index, place))

    def wake(self, machine: int) -> None:
        """Let a machine look for work when it is free."""
        self.wakes[machine] = True
        self.send(self.busy_until[machine], WAKE, machine)

    def _start(self, machine: int, now: int) -> None:
        """Let an idle machine take what is next, and see to it that it wakes for what is left."""
        forwards, others = self.forwards[machine], self.others[machine]
        can_forward = forwards and self.slots[machine] > 0
        if others and (self.backward_first or not can_forward or others[0] < forwards[0]):
            _, _, index, place = others.popleft()
        elif can_forward:
            _, _, index, place = forwards.popleft()
        elif self.laters[machine]:
            self._catch_up(machine, now)
            return
        else:
            return
        self._work(machine, now, index, place)
        if not self.wakes[machine] and (forwards or others or self.laters[machine]):
            self.wake(machine)

    def _work(self, machine: int, now: int, index: int, place: int) -> None:
        _, kind, work_us, later_us, gap_us, transfer_us, flight_us, then = self.routes[index][place]
        end = now + work_us
        self.busy_until[machine] = end + gap_us
        if self.record is not None:
            self.record.append(Stretch(machine, index, kind, now, end))
        if kind == FORWARD:
            self.slots[machine] -= 1
        elif kind == BACKWARD:
            if later_us:
                self.laters[machine].append((index, later_us))
            else:
                self.slots[machine] += 1  # it can be taken only after the end: one piece at a time
        self.end = max(self.end, end)
        if then < 0:
            self._come_home(index, end)
            return
        leaves = end
        if self.queued:
            link = (machine, then)
            leaves = max(end, self.link_free.get(link, 0))
            self.link_free[link] = leaves + transfer_us
        self.send(leaves + transfer_us + flight_us, index, place + 1)

    def _catch_up(self, machine: int, now: int) -> None:
        """The second part of a backward, which nobody waits for."""
        index, later_us = self.laters[machine].popleft()
        end = now + later_us
        self.busy_until[machine] = end
        self.end = max(self.end, end)
        self.slots[machine] += 1
        if self.record is not None:
            self.record.append(Stretch(machine, index, LATER, now, end))
        if not self.wakes[machine] and (self.forwards[machine] or self.laters[machine]):
            self.wake(machine)

    def _come_home(self, index: int, moment: int) -> None:
        self.done[index] = moment
        if (successor := self.successors.get(index)) is not None:
            self.send(max(moment, self.jobs[successor].release_us), successor, 0)


def piece_of(problem: Problem, machine: int, kind: int, then: int, *, first: bool) -> WorkPiece:
    """A piece of work, and the way of its result to the machine `then` (-1: there is none)."""
    work = problem.work
    whole_us = problem.peers[machine].forward_us * _permille(work, kind) // THOUSAND
    # Nobody waits for the gradient of the first stage's input: the last backward is not split.
    splits = kind == BACKWARD and then >= 0
    work_us = whole_us * work.input_permille // THOUSAND if splits else whole_us
    return WorkPiece(
        machine,
        kind,
        work_us,
        whole_us - work_us,
        work.origin_gap_us if first else work.gap_us,
        problem.transfer_us(machine, then) if then >= 0 else 0,
        problem.latency_us[machine][then] + work.hop_us if then >= 0 else 0,
        then,
    )


def _permille(work: StageWork, kind: int) -> int:
    permilles: Mapping[int, int] = {
        FORWARD: THOUSAND, LOSS: work.loss_permille, BACKWARD: work.backward_permille
    }  # fmt: skip
    return permilles[kind]


def utilisation(stretches: Sequence[Stretch], num_machines: int, makespan_us: int) -> list[float]:
    """The share of the iteration in which each machine worked."""
    worked = [0] * num_machines
    for stretch in stretches:
        worked[stretch.machine] += stretch.end_us - stretch.start_us
    return [us / makespan_us if makespan_us else 0.0 for us in worked]
