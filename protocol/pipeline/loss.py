"""The loss of a relay in the middle of an iteration: what it costs, by what is done about it.

Idea: the iteration is simulated up to the moment at which the relay is gone, its state is changed,
and it goes on. What the relay had in hand is gone: pieces in work, pieces that wait, results of
which not every byte has left, and the activations between a microbatch's forward and its backward.
Nobody knows of it until it is detected, so what is sent to the relay meanwhile is sent for nothing.

With f and b the relay's forward and backward of a microbatch, where the microbatch stands decides:

    before f        nothing is lost; from the detection on the path has a replica in the relay's
                    place
    at f            its sender keeps the input, and sends it again, to the replica
    between, at b   the forward is done, its activations are gone. The sender sends the input to the
                    replica, which runs the forward again and passes nothing on; the backward waits
                    for that and for the gradient, which is sent again if it was sent to the relay
    after b         all is well, but the gradient of the relay's weights dies with it: `untrained`
                    counts these microbatches, which no policy saves

    REPLACE         as above: replicas take over, the rest of a path is not run again
    RETURN          the same with the relay itself, when it is back with empty hands
    DROP            microbatches on their way that still need the relay are dropped at the
                    detection; others give their slots back, and their data peers send the next.
                    Those not begun yet get a replica

A replica is, for each microbatch by itself, the one with the cheapest path and the fewest taken
over. It needs a free slot, also to run a forward again.

Source: REPLACE is GWTF's repair of a backward path (arXiv 2509.21221), DROP is Agora's policy.
"""

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from protocol.errors import LocalProtocolError

from .problem import THOUSAND
from .simulator import (
    FIRST_BYTE,
    FORWARD,
    WAKE,
    Iteration,
    Job,
    Piece,
    Relays,
    Simulator,
    Stretch,
    Waiting,
)

NEVER_US: Final = 1 << 60


class Policy(Enum):
    """What is done about a relay that is gone."""

    REPLACE = "replace"
    DROP = "drop"
    RETURN = "return"


@dataclass(frozen=True, slots=True)
class Loss:
    """A relay that is gone.

    Attributes:
        at_us: nothing that would have been done by then or later is done.
        after_us: how long until the others know, or until it is back.
        replicas: others that hold its stage.
    """

    relay: int
    at_us: int
    after_us: int
    policy: Policy = Policy.REPLACE
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AfterLoss:
    """What became of the iteration.

    Attributes:
        makespan_us: until the last piece of work has ended; None when it is stuck.
        done_us: when each microbatch came home; -1 where it did not.
        dropped: microbatches given up.
        untrained: microbatches whose gradient of the relay's weights is gone.
        wasted_us: work done that counts for nothing or is done again.
    """

    makespan_us: int | None
    done_us: tuple[int, ...]
    dropped: tuple[int, ...]
    untrained: int
    wasted_us: int


def lose(simulator: Simulator, jobs: Sequence[Job], loss: Loss) -> AfterLoss:
    """Simulate an iteration in which a relay is lost.

    Raises:
        LocalProtocolError: the machine is a data peer, or nobody can take its place.
    """
    if any(job.origin == loss.relay for job in jobs):
        raise LocalProtocolError("a data peer takes its microbatches with it; lose a relay")
    if loss.policy is not Policy.RETURN and not loss.replicas:
        raise LocalProtocolError("nobody holds the lost relay's stage; plan again")
    return _LossyIteration(simulator, jobs, loss).run()


@dataclass(slots=True)
class _Token:
    """Where a microbatch stands.

    Attributes:
        place: of the next piece, or of the one that was lost.
        sent_us: when the result of the piece before begins or began to leave.
    """

    place: int
    sent_us: int


class _LossyIteration:
    """One iteration with a loss."""

    def __init__(self, simulator: Simulator, jobs: Sequence[Job], loss: Loss) -> None:
        self.simulator = simulator
        self.loss = loss
        self.number = len(jobs)
        self.record: list[Stretch] = []
        self.iteration = Iteration(simulator, jobs, self.record)
        self.lost: dict[int, _Token] = {}
        self.dropped: set[int] = set()
        self.redone: set[int] = set()
        self.gates: dict[int, tuple[int, int, tuple[Piece, ...]]] = {}
        self.taken: Counter[int] = Counter()
        self.untrained = 0

    def run(self) -> AfterLoss:
        going, loss = self.iteration, self.loss
        going.pause_at(loss.at_us)
        if going.go_on() and not self._is_over():
            self._fall()
            going.pause_at(loss.at_us + loss.after_us)
            if going.go_on():
                self._heal(loss.at_us + loss.after_us)
                self._run_gated(loss.at_us + loss.after_us)
            going.go_on()
        return self._told()

    def _is_over(self) -> bool:
        """Whether the iteration had ended before the loss."""
        return -1 not in self.iteration.done and self.iteration.end <= self.loss.at_us

    def _run_gated(self, now: int) -> None:
        """Run on, one moment after the other, until all backwards that wait are let through."""
        going = self.iteration
        while self.gates:
            self._open_gates(now)
            if not going.events:
                break
            now = going.events[0][0] + 1
            going.pause_at(now)
            going.go_on()

    # --- the relay is gone ---

    def _fall(self) -> None:
        """Take away all that the relay has in hand, and let it start nothing more."""
        going, relay, now = self.iteration, self.loss.relay, self.loss.at_us
        for index, token in self._tokens().items():
            if self._on_way_from(index, token, relay) and self._still_leaving(index, token, now):
                self._forget(index)
                self.lost[index] = _Token(token.place - 1, now)
        going.events[:] = [e for e in going.events if not (e[2] == WAKE and e[3] == relay)]
        heapq.heapify(going.events)
        going.busy_until[relay], going.wakes[relay] = NEVER_US, True
        going.laters[relay].clear()
        self.record[:] = [
            each._replace(end_us=min(each.end_us, now)) if each.machine == relay else each
            for each in self.record
        ]
        tokens = self._tokens() | self.lost
        for index in self._visitors():
            place = tokens[index].place if index in tokens else 0
            if going.done[index] >= 0 or place > self._backward(index):
                self.untrained += 1

    def _on_way_from(self, index: int, token: _Token, machine: int) -> bool:
        return token.place > 0 and self.iteration.routes[index][token.place - 1].machine == machine

    def _still_leaving(self, index: int, token: _Token, now: int) -> bool:
        piece = self.iteration.routes[index][token.place - 1]
        return token.sent_us + piece.transfer_us > now

    # --- the others know ---

    def _heal(self, now: int) -> None:
        """Send again what was lost, to replicas, or drop it."""
        tokens = self._tokens() | self.lost
        if self.loss.policy is Policy.RETURN:
            self._come_back(now)
        for index in self._visitors():
            if self.iteration.done[index] >= 0:
                continue
            token = tokens.get(index)
            if token is None or token.place < self._forward(index):
                if token and token.place > 0 and self.loss.policy is Policy.DROP:
                    self._drop(index, token, now)
                else:
                    self.iteration.routes[index] = self._healed(index)
            elif token.place <= self._backward(index):
                if self.loss.policy is Policy.DROP:
                    self._drop(index, token, now)
                else:
                    self._resume(index, token, now)

    def _come_back(self, now: int) -> None:
        going, relay = self.iteration, self.loss.relay
        going.busy_until[relay], going.wakes[relay] = now, False
        going.slots[relay] = self.simulator.problem.peers[relay].slots

    def _resume(self, index: int, token: _Token, now: int) -> None:
        """Let a replica do what is left of the relay's part."""
        forward, backward = self._forward(index), self._backward(index)
        going, route = self.iteration, self._healed(index)
        self.redone.add(index)
        if token.place > forward:
            again = self._run_again(index, route, forward, now)
            limbo = self._limbo()
            self.gates[index] = again, backward, route
            waits = route[backward]._replace(machine=limbo)
            route = (*route[:backward], waits, *route[backward + 1 :])
        going.routes[index] = route
        if token.place in (forward, backward):
            self._forget(index)
            going.carry(max(now, token.sent_us), index, token.place - 1)

    def _run_again(self, index: int, route: tuple[Piece, ...], forward: int, now: int) -> int:
        """A job of its own: the input comes again, the forward is run, nothing is passed on."""
        going = self.iteration
        again = len(going.routes)
        last = route[forward]._replace(next=-1, transfer_us=0, flight_us=0)
        going.jobs.append(going.jobs[index])
        going.routes.append((route[forward - 1], last))
        going.done.append(-1)
        going.carry(now, again, 0)
        return again

    def _open_gates(self, now: int) -> None:
        """Let backwards through whose forward has begun to be run again: they come after it."""
        going = self.iteration
        for index, (again, backward, route) in list(self.gates.items()):
            if going.done[again] < 0:
                continue
            del self.gates[index]
            going.routes[index] = route
            waits = going.others[-1]
            for event in [e for e in waits if e[2] == index]:
                waits.remove(event)
                going.send(max(now, event[0]), index, backward)

    def _limbo(self) -> int:
        """A machine that never works, where backwards wait for their forward."""
        going = self.iteration
        if len(going.slots) == len(self.simulator.problem.peers):
            going.forwards.append(deque())
            going.others.append(deque())
            going.laters.append(deque())
            going.slots.append(0)
            going.busy_until.append(NEVER_US)
            going.wakes.append(True)
        return len(going.slots) - 1

    def _drop(self, index: int, token: _Token, now: int) -> None:
        """Give a microbatch up: slots come back, its data peer sends the next."""
        going, route = self.iteration, self.iteration.routes[index]
        self.dropped.add(index)
        self._forget(index)
        for place in range(token.place):
            machine = route[place].machine
            if route[place].kind == FORWARD and len(route) - 1 - place >= token.place:
                going.slots[machine] += machine != self.loss.relay
                if not going.wakes[machine]:
                    going.busy_until[machine] = max(going.busy_until[machine], now)
                    going.wake(machine)
        if (successor := going.successors.get(index)) is not None:
            going.send(max(now, going.jobs[successor].release_us), successor, 0)

    # --- where things are ---

    def _visitors(self) -> list[int]:
        jobs = self.iteration.jobs[: self.number]
        return [index for index, job in enumerate(jobs) if self.loss.relay in job.relays]

    def _forward(self, index: int) -> int:
        return 1 + self.iteration.jobs[index].relays.index(self.loss.relay)

    def _backward(self, index: int) -> int:
        return len(self.iteration.routes[index]) - 1 - self._forward(index)

    def _tokens(self) -> dict[int, _Token]:
        """The microbatches that are on their way, or wait at a machine."""
        going, found = self.iteration, {}
        for moment, _, index, place in going.events:
            if index >= 0:
                found[index] = _Token(place, moment - self._way(index, place))
            elif index <= FIRST_BYTE:
                job = FIRST_BYTE - index
                found[job] = _Token(place, moment - going.routes[job][place - 1].flight_us)
        for queue in (*going.forwards, *going.others):
            for moment, _, index, place in queue:
                found[index] = _Token(place, moment - self._way(index, place))
        return found

    def _way(self, index: int, place: int) -> int:
        piece = self.iteration.routes[index][place - 1]
        return piece.transfer_us + piece.flight_us if place else 0

    def _forget(self, index: int) -> None:
        """Take a microbatch off its way, or out of the queue in which it waits."""
        going = self.iteration
        self.lost.pop(index, None)

        def other(event: Waiting) -> bool:
            return index not in (event[2], FIRST_BYTE - event[2])

        going.events[:] = filter(other, going.events)
        heapq.heapify(going.events)
        for queue in (*going.forwards, *going.others):
            for event in [e for e in queue if not other(e)]:
                queue.remove(event)

    def _healed(self, index: int) -> tuple[Piece, ...]:
        """The chain of a microbatch with a replica in the relay's place."""
        if self.loss.policy is Policy.RETURN:
            return self.iteration.routes[index]
        job = self.iteration.jobs[index]
        at = job.relays.index(self.loss.relay)

        def relays(replica: int) -> Relays:
            return (*job.relays[:at], replica, *job.relays[at + 1 :])

        def cost(replica: int) -> tuple[int, int]:
            problem = self.simulator.problem
            permille = THOUSAND + problem.work.backward_permille
            work_us = problem.peers[replica].forward_us * permille // THOUSAND
            alone_us = self.simulator.unloaded_us(job.origin, relays(replica))
            return alone_us + self.taken[replica] * work_us, replica

        replica = min(self.loss.replicas, key=cost)
        self.taken[replica] += 1
        return self.simulator.route(job.origin, relays(replica))

    # --- what came of it ---

    def _told(self) -> AfterLoss:
        done = tuple(self.iteration.done[: self.number])
        stuck = any(us < 0 for index, us in enumerate(done) if index not in self.dropped)
        end = max((stretch.end_us for stretch in self.record), default=0)
        wasted = sum(
            stretch.end_us - stretch.start_us for stretch in self.record if self._is_wasted(stretch)
        )
        dropped = tuple(sorted(self.dropped))
        return AfterLoss(None if stuck else end, done, dropped, self.untrained, wasted)

    def _is_wasted(self, stretch: Stretch) -> bool:
        if stretch.job in self.dropped:
            return True
        gone = stretch.machine == self.loss.relay and stretch.start_us < self.loss.at_us
        return gone and stretch.job in self.redone
