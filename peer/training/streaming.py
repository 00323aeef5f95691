"""Streaming, the trainer's side: each fragment is sent at its own moment, and merged later.

The schedule is that of protocol/fragment/fragments.py, the values are those of fragments.py.

Rules (tau: `overlap_steps`, the run's unless this peer has its own: peers send at the same nominal
steps and may merge at different ones; steps are our own, the schedule counts nominal ones, from
round * H to (round + 1) * H)
  1. After each step every fragment whose moment has passed is sent; at the close of a round those
     of its end. A round of no steps sends every fragment whose moment lies in it, at once.
  2. What was sent is merged tau steps later. A `Merge` that came earlier is held, but no longer
     than to the fragment's next moment: a slow peer may do fewer than tau steps between two. In
     and after a round of no steps no step will come, so nothing is held.
  3. A `Merge` that has not come after tau steps: with `late = "wait"` nothing is trained until it
     does; with "skip" training goes on, and it is taken when it comes.
  4. A fragment whose moment has come while it is in flight, or yielded, is sent when it no longer
     is; nothing is trained meanwhile.
  5. While a fragment is yielded, phi is not read there.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from peer.codec import get_codec
from protocol.fragment.fragments import fragments_of_run, offset, sends_between
from protocol.run.layout import Layout
from protocol.run.run_spec import RunSpec

from .errors import WrongCommand
from .fragments import FragmentSnapshots
from .messages import (
    Amend,
    FragmentMerged,
    FragmentSent,
    Merge,
    SyncCommand,
    SyncEvent,
    TrainRound,
    Yield,
    Yielded,
)
from .shared import CodeRegions, region_bytes
from .weights import FastWeights


@dataclass(slots=True)
class _Flight:
    """A fragment on its way; `merge` is held until `due_at_step`, of all steps since `Load`."""

    cycle: int
    due_at_step: int
    merge: Merge | None = None


@dataclass(slots=True)
class _Standstill:
    """How long training stood still for one fragment."""

    since_s: float | None = None
    total_s: float = 0.0

    def note(self, now_s: float, *, stands: bool) -> None:
        """From now on training stands still, or does not."""
        if self.since_s is not None:
            self.total_s += now_s - self.since_s
        self.since_s = now_s if stands else None

    def taken_s(self, now_s: float) -> float:
        """The time so far; it begins anew."""
        self.note(now_s, stands=False)
        taken_s, self.total_s = self.total_s, 0.0
        return taken_s


@dataclass(slots=True)
class _FragmentState:
    """One fragment. `steps` and `tokens` were trained since its last send."""

    chunks: frozenset[int]
    steps: int = 0
    tokens: int = 0
    flight: _Flight | None = None
    yielded: bool = False
    yield_asked: bool = False
    standstill: _Standstill = field(default_factory=_Standstill)


class FragmentSync:
    """See the rules above. Implements `peer.training.sync.Sync`."""

    def __init__(
        self,
        spec: RunSpec,
        snapshots: FragmentSnapshots,
        emit: Callable[[SyncEvent], None],
        clock_s: Callable[[], float],
    ) -> None:
        assert spec.sync.diloco is not None
        self._inner_steps = spec.sync.round_steps
        self._overlap_steps = spec.sync.diloco.overlap_steps
        self._waits = spec.sync.diloco.late == "wait"
        self._snapshots = snapshots
        self._emit = emit
        self._clock_s = clock_s
        self._reset()

    def _reset(self) -> None:
        self._lanes = [
            _FragmentState(frozenset(range(len(fragment.chunks))))
            for fragment in self._snapshots.fragments
        ]
        self._steps = 0
        self._nominal = 0
        self._due: list[tuple[int, int]] = []
        self._in_round = False
        self._flushes = False

    @property
    def holds_training(self) -> bool:
        """Whether a fragment is late (rules 3 and 4)."""
        return any(True for _ in self._blocking())

    @property
    def holds_close(self) -> bool:
        """Never."""
        return False

    @property
    def is_send_due(self) -> bool:
        """Whether the moment of a fragment has come."""
        return bool(self._due)

    def steps_to_event(self, order: TrainRound, steps: int) -> float:
        """Steps, after the round's `steps`-th, until a send or a held merge is due."""
        sends = (
            1
            + (offset(fragment, len(self._lanes), self._inner_steps) - self._nominal - 1)
            % self._inner_steps
            for fragment in range(len(self._lanes))
        )
        nominal = self._nominal + min(sends) - order.round * self._inner_steps
        to_send = -(-nominal * order.quota // self._inner_steps) - steps
        flights = (lane.flight for lane in self._lanes if lane.flight and lane.flight.merge)
        return min([to_send, *(flight.due_at_step - self._steps for flight in flights)])

    def load(self) -> None:
        """theta := phi, nothing is in flight, yielded or due."""
        self._snapshots.load()
        self._reset()

    def begin(self, order: TrainRound) -> None:
        """Count from the round's first nominal step."""
        self._nominal = order.round * self._inner_steps
        self._in_round = order.quota > 0
        self._flushes = not self._in_round
        if self._flushes:
            self._count_to(self._nominal + self._inner_steps - 1)

    def stepped(self, order: TrainRound, steps: int, tokens: int) -> None:
        """Count a step, and what falls due with it."""
        self._steps += 1
        for lane in self._lanes:
            lane.steps += 1
            lane.tokens += tokens
        of_round = self._inner_steps * min(steps, order.quota) // order.quota
        self._count_to(order.round * self._inner_steps + of_round)

    def close(self, order: TrainRound) -> None:
        """Send what falls due at the round's end. Raises NonFinite."""
        if order.quota > 0:
            self._count_to((order.round + 1) * self._inner_steps)
        self.advance()
        self._in_round = False
        self._note_standstill()

    def advance(self) -> None:
        """Merge and send what is due. Raises NonFinite."""
        for fragment, lane in enumerate(self._lanes):
            if lane.flight is not None and lane.flight.merge is not None:
                self._land(lane, lane.flight, lane.flight.merge, self._moments(fragment))
        late = []
        for fragment, cycle in self._due:
            lane = self._lanes[fragment]
            if lane.flight is None and not lane.yielded:
                self._send(fragment, cycle, lane)
            else:
                late.append((fragment, cycle))
        self._due = late
        self._note_standstill()

    def _count_to(self, nominal: int) -> None:
        self._due += sends_between(self._nominal, nominal, len(self._lanes), self._inner_steps)
        self._nominal = nominal

    def _moments(self, fragment: int) -> int:
        """How many sends of a fragment are due."""
        return sum(fragment == due for due, _ in self._due)

    # --- one fragment ---------------------------------------------------------------------------

    def _send(self, fragment: int, cycle: int, lane: _FragmentState) -> None:
        started_s = self._clock_s()
        digest = self._snapshots.send(fragment, cycle)
        now_s = self._clock_s()
        self._emit(
            FragmentSent(
                fragment=fragment,
                cycle=cycle,
                steps=lane.steps,
                tokens=lane.tokens,
                digest=digest,
                seconds=now_s - started_s,
                waited_s=lane.standstill.taken_s(started_s),
                step=float(
                    cycle * self._inner_steps
                    + offset(fragment, len(self._lanes), self._inner_steps)
                ),
            )
        )
        lane.steps = lane.tokens = 0
        lane.flight = _Flight(cycle, self._steps + self._overlap_steps)

    def _land(self, lane: _FragmentState, flight: _Flight, merge: Merge, moments: int) -> None:
        """Merge, if it is time (rule 2)."""
        if self._steps < flight.due_at_step and not moments and not self._flushes:
            return
        self._snapshots.merge(merge.fragment, merge.stepped, merge.moved)
        lane.flight = None
        waited_s = lane.standstill.taken_s(self._clock_s())
        self._emit(FragmentMerged(merge.fragment, merge.cycle, waited_s))
        if lane.yield_asked:
            self._hold(merge.fragment, lane)

    def _hold(self, fragment: int, lane: _FragmentState) -> None:
        self._snapshots.hold(fragment)
        lane.yielded, lane.yield_asked = True, False
        self._emit(Yielded(fragment))

    def _blocking(self) -> Iterator[int]:
        """Fragments that training waits for."""
        yield from (fragment for fragment, _ in self._due)
        if not self._waits:
            return
        for fragment, lane in enumerate(self._lanes):
            flight = lane.flight
            if flight and flight.merge is None and self._steps >= flight.due_at_step:
                yield fragment

    def _note_standstill(self) -> None:
        now_s = self._clock_s()
        blocking = set(self._blocking()) if self._in_round else set()
        for fragment, lane in enumerate(self._lanes):
            lane.standstill.note(now_s, stands=fragment in blocking)

    # --- commands -------------------------------------------------------------------------------

    def obey(self, command: SyncCommand) -> None:
        """Take `Merge`, `Yield` and `Amend`. Raises WrongCommand."""
        match command:
            case Merge():
                self._obey_merge(command)
            case Yield():
                self._obey_yield(command)
            case Amend():
                self._obey_amend(command)
            case _:
                raise WrongCommand(f"{command}, but this run averages fragments")

    def _lane(self, command: Merge | Yield | Amend) -> _FragmentState:
        if not 0 <= command.fragment < len(self._lanes):
            raise WrongCommand(f"{command}: there are {len(self._lanes)} fragments")
        return self._lanes[command.fragment]

    def _obey_merge(self, merge: Merge) -> None:
        lane = self._lane(merge)
        flight = lane.flight
        if flight is None or flight.cycle != merge.cycle or flight.merge is not None:
            raise WrongCommand(f"{merge}, but its fragment's flight is {flight}")
        _check_chunks(merge, lane.chunks, (*merge.stepped, *merge.moved))
        flight.merge = merge

    def _obey_yield(self, command: Yield) -> None:
        lane = self._lane(command)
        if lane.yielded or lane.yield_asked:
            raise WrongCommand(f"{command}, but that is yielded already")
        if lane.flight is None:
            self._hold(command.fragment, lane)
        elif lane.flight.merge is not None:
            lane.yield_asked = True
        # Else it has crossed our FragmentSent, which gives the daemon what it asked for.

    def _obey_amend(self, amend: Amend) -> None:
        lane = self._lane(amend)
        if not lane.yielded:
            raise WrongCommand(f"{amend}, but nothing was yielded")
        _check_chunks(amend, lane.chunks, (*amend.merged, *amend.redone, *amend.moved))
        self._snapshots.amend(amend.fragment, amend.merged, amend.redone, amend.moved)
        lane.yielded = False


def _check_chunks(command: SyncCommand, known: Iterable[int], named: tuple[int, ...]) -> None:
    if len(set(named)) != len(named) or not set(known).issuperset(named):
        raise WrongCommand(f"{command}: chunks named twice, or not of {sorted(known)}")


def regions_of(spec: RunSpec, layout: Layout) -> tuple[int, ...]:
    """A region for the codes of each fragment."""
    assert spec.sync.diloco is not None
    return region_bytes(fragments_of_run(spec.sync.diloco, layout), get_codec(spec.sync.codec))


def snapshots_of(
    spec: RunSpec, weights: FastWeights, slow_P: torch.Tensor, regions: CodeRegions
) -> FragmentSnapshots:
    """The values of each fragment."""
    diloco = spec.sync.diloco
    assert diloco is not None
    fragments = fragments_of_run(diloco, weights.layout)
    codec = get_codec(spec.sync.codec)
    return FragmentSnapshots(weights, slow_P, regions, codec, fragments, diloco)


def sync_of(
    spec: RunSpec,
    snapshots: FragmentSnapshots,
    emit: Callable[[SyncEvent], None],
    clock_s: Callable[[], float],
) -> FragmentSync:
    """What sends each fragment at its own moment."""
    return FragmentSync(spec, snapshots, emit, clock_s)
