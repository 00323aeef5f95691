"""The moments at which fragments of the fast weights are sent, and merged when they come back.

What is sent, and what merging does, stands in fragments.py. The round machine asks here at every
turn. There are two schedules:

`PairSync`: the whole model is one fragment, which leaves at the close of each round. Or it is cut,
and each fragment leaves at a moment of its own (protocol/fragment/fragments.py, rule 2, in the
nominal steps of this peer), so that the line carries a little all the time. What comes back is
merged at once.

  1. A whole model is sent at the close of a round. While it is in flight no round is closed; and
     nothing is trained, with `overlap` off.
  2. After each step every fragment is sent whose moment has passed. (A jump of the nominal step
     passes none: nothing was trained.)
  3. A fragment whose moment comes while it is in flight is sent as soon as it is merged: once,
     however many moments have passed. Between two rounds nothing is sent: the next one may be one
     of no steps, for which everything must be here.
  4. From the run's last nominal step on, nothing has a moment. A round of no steps sends every
     fragment: so the rest of what was trained goes out, and the final averaging gets its snapshots.
  5. Fragments hold up neither training nor the close of a round.

`FragmentSync`: all peers average, and send at the same nominal steps, from round * H to
(round + 1) * H. (tau: `overlap_steps`, the run's unless this peer has its own; steps are our own.)

  1. After each step every fragment whose moment has passed is sent; at the close of a round those
     of its end. A round of no steps sends every fragment whose moment lies in it, at once.
  2. A fragment is merged tau steps after its send. A `Merge` that came earlier is held, but no
     longer than to the fragment's next moment: a slow peer may do fewer than tau steps between two.
     In and after a round of no steps no step will come, so nothing is held.
  3. A `Merge` that has not come after tau steps: with `late = "wait"` nothing is trained until it
     does; with "skip" training goes on, and it is taken when it comes.
  4. A fragment whose moment has come while it is in flight, or yielded, is sent when it no longer
     is; nothing is trained meanwhile.
  5. A `Yield` that meets a fragment in flight has crossed a `FragmentSent`, and is void: there is
     no `Yielded`. While a `Merge` is held, `Yielded` follows `FragmentMerged`.

Invariant of both: of a fragment at most one send is in flight; its region and its phi lie still
from the send to the merge, except for what the daemon writes to phi before it says `Merge`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from protocol.fragment.fragments import offset, sends_between
from protocol.limits import EPSILON
from protocol.run.run_spec import RunSpec
from protocol.trainer_messages import (
    ONE_CHUNK,
    FragmentMerged,
    FragmentSent,
    Merge,
    TrainerTime,
    Try,
    Yield,
    Yielded,
)

from .fragments import FragmentDeltas, FragmentSnapshots
from .messages import SyncCommand, SyncEvent, TrainRound
from .ports import WrongCommand
from .schedule import total_steps_of

# --- what both share ------------------------------------------------------------------------------


class TimeSpent:
    """Time of a trainer by its use: each moment counts for one, so the parts add up.

    Time outside every `on` counts as training.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self.clock_s = clock_s
        self._into = TrainerTime.TRAIN
        self._since_s = clock_s()
        self._spent_s = dict.fromkeys(TrainerTime, 0.0)

    @contextmanager
    def on(self, into: TrainerTime) -> Iterator[None]:
        """Count what passes inside for this, and for nothing around it."""
        before, self._into = self._turn(), into
        try:
            yield
        finally:
            self._turn()
            self._into = before

    def taken(self) -> dict[TrainerTime, float]:
        """The time since the last call, by its use."""
        self._turn()
        taken, self._spent_s = self._spent_s, dict.fromkeys(TrainerTime, 0.0)
        return taken

    def _turn(self) -> TrainerTime:
        """Count until now. Returns for what."""
        now_s = self.clock_s()
        self._spent_s[self._into] += now_s - self._since_s
        self._since_s = now_s
        return self._into


@dataclass(slots=True)
class _Standstill:
    """Time for which training stood still for one fragment."""

    since_s: float | None = None
    total_s: float = 0.0

    def note(self, now_s: float, *, stands: bool) -> None:
        """Note whether training stands still from now on."""
        if self.since_s is not None:
            self.total_s += now_s - self.since_s
        self.since_s = now_s if stands else None

    def taken_s(self, now_s: float) -> float:
        """The time since the last call."""
        self.note(now_s, stands=False)
        taken_s, self.total_s = self.total_s, 0.0
        return taken_s


@dataclass(slots=True)
class FragmentState:
    """Where the sends and merges of one fragment are.

    Attributes:
        cycle: of its last send.
        steps, tokens: trained since then.
        is_due: its moment has come (in pairs).
        sending_s: how long training stood still for its last send.
        merge_at_step: of all steps since `Load`, up to which a `Merge` is held.
        merge: one that is held.
        yielded, yield_asked: phi is not read there; it will not be, once `merge` is done.
    """

    cycle: int = -1
    steps: int = 0
    tokens: int = 0
    in_flight: bool = False
    is_due: bool = False
    sending_s: float = 0.0
    merge_at_step: int = 0
    merge: Merge | None = None
    yielded: bool = False
    yield_asked: bool = False
    standstill: _Standstill = field(default_factory=_Standstill)


@dataclass(eq=False)
class Sync(ABC):
    """Fragments on their way: answers `SyncCommand` with `SyncEvent`."""

    _spec: RunSpec
    _values: FragmentDeltas | FragmentSnapshots
    _emit: Callable[[SyncEvent], None]
    _ledger: TimeSpent

    def __post_init__(self) -> None:
        self._clock_s = self._ledger.clock_s
        self._reset()

    def _reset(self) -> None:
        self._inner_steps = self._spec.sync.round_steps
        self._states = [FragmentState() for _ in self._values.fragments]
        self._steps = 0
        self._in_round = False

    def load(self) -> None:
        self._values.load()
        self._reset()

    @property
    @abstractmethod
    def holds_training(self) -> bool:
        """Whether nothing may be trained now."""

    @property
    def holds_close(self) -> bool:
        """Whether a round that is due must stay open."""
        return False

    @property
    @abstractmethod
    def is_send_due(self) -> bool:
        """Whether `advance` will send: the weights must be known to be sound before."""

    @abstractmethod
    def obey(self, command: SyncCommand) -> None:
        """Raises WrongCommand."""

    @abstractmethod
    def begin(self, order: TrainRound) -> None: ...

    def stepped(self, order: TrainRound, steps: int, tokens: int) -> None:
        """Count a step of `tokens` tokens: the round's `steps`-th."""
        self._steps += 1
        for state in self._states:
            state.steps += 1
            state.tokens += tokens

    @abstractmethod
    def advance(self) -> None: ...

    @abstractmethod
    def close(self, order: TrainRound) -> None:
        """Send what goes with the end of a round. Raises NonFinite."""

    def _state_of(self, command: SyncCommand) -> FragmentState:
        if not 0 <= command.fragment < len(self._states):
            raise WrongCommand(f"{command}: there are {len(self._states)} fragments")
        state = self._states[command.fragment]
        cycle = None if isinstance(command, Yield) else command.cycle
        if cycle is not None and (not state.in_flight or state.cycle != cycle or state.merge):
            raise WrongCommand(f"{command}, but its fragment is {state}")
        return state

    def _passed(self, before: int, now: int) -> Iterator[tuple[int, int]]:
        """Fragments and cycles whose moments lie between two nominal steps."""
        return sends_between(before, now, len(self._states), self._inner_steps)

    def _send(self, fragment: int, cycle: int, step: float) -> None:
        state, started_s = self._states[fragment], self._clock_s()
        with self._ledger.on(TrainerTime.ENCODE):
            digest = self._values.send(fragment, cycle)
        state.sending_s = self._clock_s() - started_s
        waited_s = state.standstill.taken_s(started_s)
        self._emit(FragmentSent(fragment, cycle, state.steps, state.tokens, digest, waited_s, step))
        state.cycle, state.in_flight, state.is_due = cycle, True, False
        state.steps = state.tokens = 0


# --- in pairs -------------------------------------------------------------------------------------


class PairSync(Sync):
    """Sends fragments of the weights, and merges the pair's averages."""

    _values: FragmentDeltas

    def _reset(self) -> None:
        super()._reset()
        self._is_whole = self._spec.sync.pairs.is_whole
        self._step = 0.0

    @property
    def holds_training(self) -> bool:
        """Whether a whole model is in flight, without overlap (rule 1)."""
        return not self._spec.sync.overlap and self.holds_close

    @property
    def holds_close(self) -> bool:
        return self._is_whole and self._states[0].in_flight

    @property
    def is_send_due(self) -> bool:
        return self._in_round and any(
            state.is_due and not state.in_flight for state in self._states
        )

    def begin(self, order: TrainRound) -> None:
        self._step, self._in_round = order.start_step, True
        for state in self._states:
            state.is_due |= order.quota == 0 and not self._is_whole

    def stepped(self, order: TrainRound, steps: int, tokens: int) -> None:
        super().stepped(order, steps, tokens)
        before, self._step = self._step, order.start_step + order.stride * steps
        if self._is_whole:
            return
        if _floor_step(self._step) >= total_steps_of(self._spec, order):
            for state in self._states:
                state.is_due = False
            return
        for fragment, _ in self._passed(_floor_step(before), _floor_step(self._step)):
            self._states[fragment].is_due = True

    def advance(self) -> None:
        for fragment, state in enumerate(self._states):
            if self._in_round and state.is_due and not state.in_flight:
                self._send(fragment, state.cycle + 1, self._step)

    def close(self, order: TrainRound) -> None:
        if self._is_whole:
            self._send(0, self._states[0].cycle + 1, self._step)
        self._in_round = False

    def obey(self, command: SyncCommand) -> None:
        """A `Try` is the driver's to measure: here it must fit."""
        state = self._state_of(command)
        if isinstance(command, Try):
            return
        if not isinstance(command, Merge) or command.cycle is None:
            raise WrongCommand(f"{command}, but this run averages in pairs")
        if command != Merge(command.fragment, state.cycle, ONE_CHUNK):
            raise WrongCommand(f"{command}: a fragment is one chunk, and always stepped")
        started_s = self._clock_s()
        with self._ledger.on(TrainerTime.MERGE):
            self._values.merge(command.fragment)
        state.in_flight = False
        waited_s = state.sending_s + self._clock_s() - started_s
        self._emit(FragmentMerged(command.fragment, command.cycle, waited_s))


def _floor_step(step: float) -> int:
    return math.floor(step + EPSILON)


# --- all average ----------------------------------------------------------------------------------


class FragmentSync(Sync):
    """Sends fragments at the swarm's moments, and merges the outer steps tau steps later."""

    _values: FragmentSnapshots

    def _reset(self) -> None:
        super()._reset()
        diloco = self._spec.sync.diloco
        assert diloco is not None
        self._overlap_steps, self._waits = diloco.overlap_steps, diloco.late == "wait"
        self._nominal = 0
        self._due: list[tuple[int, int]] = []
        self._flushes = False

    @property
    def holds_training(self) -> bool:
        """Whether a fragment is late (rules 3 and 4)."""
        return any(True for _ in self._blocking())

    @property
    def is_send_due(self) -> bool:
        return bool(self._due)

    def begin(self, order: TrainRound) -> None:
        self._nominal = order.round * self._inner_steps
        self._in_round = order.quota > 0
        self._flushes = not self._in_round
        if self._flushes:
            self._count_to(self._nominal + self._inner_steps - 1)

    def stepped(self, order: TrainRound, steps: int, tokens: int) -> None:
        super().stepped(order, steps, tokens)
        of_round = self._inner_steps * min(steps, order.quota) // order.quota
        self._count_to(order.round * self._inner_steps + of_round)

    def close(self, order: TrainRound) -> None:
        if order.quota > 0:
            self._count_to((order.round + 1) * self._inner_steps)
        self.advance()
        self._in_round = False
        self._note_standstill()

    def advance(self) -> None:
        for fragment, state in enumerate(self._states):
            if state.merge is not None:
                has_moment = any(fragment == due for due, _ in self._due)
                if self._steps >= state.merge_at_step or has_moment or self._flushes:
                    self._land(state, state.merge)
        late = []
        for fragment, cycle in self._due:
            state = self._states[fragment]
            if state.in_flight or state.yielded:
                late.append((fragment, cycle))
                continue
            of_round = offset(fragment, len(self._states), self._inner_steps)
            self._send(fragment, cycle, float(cycle * self._inner_steps + of_round))
            state.merge_at_step = self._steps + self._overlap_steps
        self._due = late
        self._note_standstill()

    def _count_to(self, nominal: int) -> None:
        self._due += self._passed(self._nominal, nominal)
        self._nominal = nominal

    def _land(self, state: FragmentState, merge: Merge) -> None:
        with self._ledger.on(TrainerTime.MERGE):
            self._values.merge(merge.fragment, merge.stepped, merge.moved)
        state.in_flight, state.merge = False, None
        waited_s = state.standstill.taken_s(self._clock_s())
        self._emit(FragmentMerged(merge.fragment, state.cycle, waited_s))
        if state.yield_asked:
            self._hold(merge.fragment, state)

    def _hold(self, fragment: int, state: FragmentState) -> None:
        self._values.hold(fragment)
        state.yielded, state.yield_asked = True, False
        self._emit(Yielded(fragment))

    def _blocking(self) -> Iterator[int]:
        """Fragments that training waits for."""
        yield from (fragment for fragment, _ in self._due)
        for fragment, state in enumerate(self._states if self._waits else ()):
            if state.in_flight and state.merge is None and self._steps >= state.merge_at_step:
                yield fragment

    def _note_standstill(self) -> None:
        now_s = self._clock_s()
        blocking = set(self._blocking()) if self._in_round else set()
        for fragment, state in enumerate(self._states):
            state.standstill.note(now_s, stands=fragment in blocking)

    def obey(self, command: SyncCommand) -> None:
        state = self._state_of(command)
        match command:
            case Merge(fragment, cycle, stepped, moved, redone):
                known = range(len(self._values.fragments[fragment].chunks))
                named = (*stepped, *moved, *redone)
                if len(set(named)) != len(named) or not set(known).issuperset(named):
                    raise WrongCommand(f"{command}: chunks named twice, or not of {list(known)}")
                if cycle is not None:
                    state.merge = command
                elif state.yielded:
                    with self._ledger.on(TrainerTime.MERGE):
                        self._values.merge(fragment, stepped, moved, redone)
                    state.yielded = False
                else:
                    raise WrongCommand(f"{command}, but nothing was yielded")
            case Yield():
                if state.yielded or state.yield_asked:
                    raise WrongCommand(f"{command}, but that is yielded already")
                if not state.in_flight:
                    self._hold(command.fragment, state)
                elif state.merge is not None:
                    state.yield_asked = True
            case Try():
                raise WrongCommand(f"{command}, but all average in this run")


def sync_of(
    spec: RunSpec,
    values: FragmentDeltas | FragmentSnapshots,
    emit: Callable[[SyncEvent], None],
    ledger: TimeSpent,
) -> Sync:
    if isinstance(values, FragmentSnapshots):
        return FragmentSync(spec, values, emit, ledger)
    return PairSync(spec, values, emit, ledger)
