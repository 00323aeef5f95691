"""The event simulator: what an iteration of given paths takes, to the microsecond.

Idea: a microbatch on the path d, p1 .. pm is a chain of 2m + 3 pieces of work: forward at d, p1 ..
pm, the loss at d, backward at pm .. p1, d. A piece arrives at its machine when the one before has
ended and its result has travelled; there it waits for the machine, and a forward also for a slot.
These rules alone decide what is run, so a schedule is a consequence of paths:

1. A machine does one piece at a time, and stays busy for a gap after it.
2. It takes what arrived first (ARRIVAL), or backwards and losses before forwards
   (BACKWARD_FIRST, the rule of 1F1B; the slots bound what is in flight). A forward without a free
   slot is passed over.
3. A forward takes a slot; its backward gives it back.
4. With `input_permille` below 1000 a backward has two parts. The gradient leaves after the first;
   the second (gradients of the weights) runs when the machine has nothing else to do, and only
   then is the slot free.
5. With `queued_links` a link carries one boundary after another.

Pieces that arrive at the same moment are taken in the order of sending. Paths that block each
other's slots in a circle never end: such an iteration is `stuck`.

Events are plain tuples, not objects, because the planner runs the loop thousands of times.

Source: the model of SkipPipe's schedulers/com_sym.py, restated; rules 4 and 5 are ours. Its four
published times come out within 0.4%.

A plan says which machine holds which stage, and the path of each microbatch. A data peer sends its
microbatches in the order of its paths, on as many tracks as it has slots: microbatch i goes on
track i modulo slots, and starts when the one before it on that track has come home. The tracks
start one forward after another.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Final, NamedTuple

import blake3

from .problem import THOUSAND, Problem, RelayNumbers, canonical

# --- simulator ------------------------------------------------------------------------------------


class Job(NamedTuple):
    """A microbatch, not started before a moment, and before another job has come home."""

    origin: int
    relays: RelayNumbers
    release_us: int = 0
    after: int | None = None


class Order(Enum):
    ARRIVAL = "arrival"
    BACKWARD_FIRST = "backward_first"


class WorkPiece(NamedTuple):
    """A piece of work in the chain of a microbatch.

    Attributes:
        work_us: until its result can leave.
        later_us: work left for later, the second part of a split backward.
        gap_us: how long the machine stays busy afterwards.
        transfer_us: how long the result occupies the link to the next machine.
        flight_us: from leaving the link to being there.
        next: where the result goes; -1 at the end.
    """

    machine: int
    kind: int
    work_us: int
    later_us: int
    gap_us: int
    transfer_us: int
    flight_us: int
    next: int


FORWARD, LOSS, BACKWARD, LATER = range(4)
"""Kinds of work; forwards wait apart from all others, so theirs is 0."""
WAKE: Final = -1
"""In place of a job's index: the machine, which stands in place of the place, is free again."""
Waiting = tuple[int, int, int, int]
"""An event: its moment, a running number, the job's index (or WAKE), the place."""
Route = tuple[WorkPiece, ...]


class BusyInterval(NamedTuple):
    machine: int
    job: int
    kind: int
    start_us: int
    end_us: int


class Outcome(NamedTuple):
    """The time of an iteration.

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
        self.order = order
        self.route = cache(self._route)
        self._piece = cache(self._new_piece)

    def _route(self, origin: int, relays: RelayNumbers) -> Route:
        path = (origin, *relays)
        there = [*path, origin, *reversed(path), -1]
        kinds = [*([FORWARD] * len(path)), LOSS, *([BACKWARD] * len(path))]
        return tuple(
            self._piece(there[place], kind, there[place + 1], place == 0)
            for place, kind in enumerate(kinds)
        )

    def _new_piece(self, machine: int, kind: int, then: int, first: bool) -> WorkPiece:
        problem, work = self.problem, self.problem.work
        permille = (THOUSAND, work.loss_permille, work.backward_permille)[kind]
        whole_us = problem.peers[machine].forward_us * permille // THOUSAND
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

    def run(self, jobs: Sequence[Job], record: list[BusyInterval] | None = None) -> Outcome:
        """Simulate one iteration; `record` gets every piece of work as it was done."""
        iteration = _Iteration(self, jobs, record)
        iteration.play()
        stuck = -1 in iteration.done
        return Outcome(None if stuck else iteration.end, tuple(iteration.done))


class _Iteration:
    def __init__(
        self, simulator: Simulator, jobs: Sequence[Job], record: list[BusyInterval] | None
    ) -> None:
        peers = simulator.problem.peers
        number = len(peers)
        self.jobs = list(jobs)
        self.routes = [simulator.route(job.origin, job.relays) for job in jobs]
        self.slots = [peer.slots for peer in peers]
        self.backward_first = simulator.order is Order.BACKWARD_FIRST
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

    def send(self, moment: int, index: int, place: int) -> None:
        self.sent += 1
        heapq.heappush(self.events, (moment, self.sent, index, place))

    def wake(self, machine: int) -> None:
        self.wakes[machine] = True
        self.send(self.busy_until[machine], WAKE, machine)

    def _start(self, machine: int, now: int) -> None:
        """Let an idle machine take what is next, and see to it that it wakes for what is left."""
        forwards, others = self.forwards[machine], self.others[machine]
        can_forward = forwards and self.slots[machine] > 0
        if others and (self.backward_first or not can_forward or others[0] < forwards[0]):
            self._work(machine, now, others.popleft())
        elif can_forward:
            self._work(machine, now, forwards.popleft())
        elif self.laters[machine]:
            self._catch_up(machine, now)
        else:
            return
        if not self.wakes[machine] and (forwards or others or self.laters[machine]):
            self.wake(machine)

    def _work(self, machine: int, now: int, event: Waiting) -> None:
        _, _, index, place = event
        _, kind, work_us, later_us, gap_us, transfer_us, flight_us, then = self.routes[index][place]
        end = now + work_us
        self.busy_until[machine] = end + gap_us
        if self.record is not None:
            self.record.append(BusyInterval(machine, index, kind, now, end))
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
            self.record.append(BusyInterval(machine, index, LATER, now, end))

    def _come_home(self, index: int, moment: int) -> None:
        self.done[index] = moment
        if (successor := self.successors.get(index)) is not None:
            self.send(max(moment, self.jobs[successor].release_us), successor, 0)


# --- plan -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Plan:
    """The stage of each machine, and the paths of the microbatches that it sends."""

    stages: tuple[int, ...]
    paths: tuple[tuple[RelayNumbers, ...], ...]

    def data_peers(self) -> list[int]:
        return [machine for machine, stage in enumerate(self.stages) if stage == 0]

    def each(self) -> Iterator[tuple[int, int, RelayNumbers]]:
        """Data peer, place in its order, and path of every microbatch."""
        for origin, paths in enumerate(self.paths):
            for place, path in enumerate(paths):
                yield origin, place, path

    def with_paths(self, changed: Mapping[int, Iterable[RelayNumbers]]) -> "Plan":
        paths = list(self.paths)
        for origin, own in changed.items():
            paths[origin] = tuple(own)
        return Plan(self.stages, tuple(paths))

    def to_json(self, problem: Problem) -> dict[str, Any]:
        names = [peer.name for peer in problem.peers]
        named = {
            names[origin]: [[names[relay] for relay in path] for path in self.paths[origin]]
            for origin in self.data_peers()
        }
        return {"arrangement": dict(zip(names, self.stages, strict=True)), "paths": named}

    def digest(self, problem: Problem) -> str:
        tree = {"problem": problem.digest(), **self.to_json(problem)}
        return blake3.blake3(canonical(tree)).hexdigest(length=16)


def jobs_of(problem: Problem, plan: Plan) -> list[Job]:
    jobs: list[Job] = []
    for origin, paths in enumerate(plan.paths):
        peer, first = problem.peers[origin], len(jobs)
        for place, relays in enumerate(paths):
            track = place % peer.slots
            after = first + place - peer.slots if place >= peer.slots else None
            jobs.append(Job(origin, relays, track * peer.forward_us, after))
    return jobs
