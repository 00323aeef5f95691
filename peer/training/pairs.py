"""Averaging in pairs, the trainer's side: fragments are sent, and merged when they come back.

The whole model is one fragment, which leaves at the close of each round. Or it is cut, and each
fragment leaves at a moment of its own, so that the line carries a little all the time. What comes
back is merged as a difference, so it may come at any time, and training goes on meanwhile:

    send p       snapshot := theta[p]                     its codes go to p's partner
    (training goes on)
    Merge(p)     theta[p] := theta[p] + (phi'[p] - decoded)

phi' are the slow weights after the outer step, `decoded` is what our codes stand for. What was
trained since the send stays in theta. With an exact code, decoded = snapshot, and with nothing
trained meanwhile the line is theta := phi'. (LOSCAR-SGD, arXiv 2605.20866, for a slice of a model;
the moments are Streaming DiLoCo's, protocol/fragment/fragments.py, rule 2, in the nominal steps of
this peer.)

That it says `decoded` and not `snapshot` is error feedback: the outer step has averaged our decoded
codes, rounding error snapshot - decoded left out; the line leaves just that in our fast weights, so
that it is sent again with the next send. Nothing is lost in the long run. With `snapshot` in its
place an error of the size of the code's step would stay in the weights in each round, and they
would take a random walk (tests/numerics/test_coding_noise.py shows both).

Rules of a whole model
  1. It is sent at the close of a round. While it is in flight no round is closed.
  2. With `overlap` off, nothing is trained while it is in flight.

Rules of fragments
  1. After each step every fragment is sent whose moment has passed. (A jump of the nominal step
     passes none: nothing was trained.)
  2. A fragment whose moment comes while it is in flight is sent as soon as it is merged: once,
     however many moments have passed. Between two rounds nothing is sent: the next one may be one
     of no steps, for which everything must be here.
  3. From the run's last nominal step on, nothing has a moment. A round of no steps sends every
     fragment: that is how what was trained since the last moments goes out, and how the final
     averaging gets its snapshots.
  4. Nothing holds up training, or the close of a round.

Invariant: of a fragment at most one send is in flight; its region and its phi lie still from the
send to the merge but for what the daemon writes to phi before it says `Merge`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import blake3
import torch

from peer.codec import Codec, codes_as_tensor, codes_on, get_codec
from protocol.fragment.fragments import Fragment, Span, fragments_of_run, offset, sends_between
from protocol.run.layout import Layout
from protocol.run.run_spec import RunSpec

from .errors import NonFinite, WrongCommand
from .messages import (
    ONE_CHUNK,
    FragmentMerged,
    FragmentSent,
    Merge,
    SyncCommand,
    SyncEvent,
    TrainRound,
)
from .schedule import total_steps_of
from .shared import CodeRegions
from .weights import FastWeights

_EPSILON: Final = 1e-6
"""Three thirds of a step are one."""


class FragmentDeltas:
    """The values: codes of fragments of the fast weights, and the moves of the slow ones."""

    def __init__(
        self,
        model: FastWeights,
        slow_P: torch.Tensor,
        regions: CodeRegions,
        codec: Codec,
        fragments: Sequence[Fragment],
    ) -> None:
        self.fragments = tuple(fragments)
        self._model = model
        self._slow_P = slow_P
        self._regions = regions
        self._codec = codec

    def load(self) -> None:
        """theta := phi."""
        self._model.theta_P.copy_(self._slow_P)

    def send(self, fragment: int, cycle: int) -> str:
        """Write the codes of a fragment to its region. Returns their digest.

        Raises:
            NonFinite: theta holds a NaN or an infinity; nothing is committed.
        """
        memory = self._regions.begin(fragment)
        try:
            self._encode(self.fragments[fragment].spans, memory)
        except ValueError as error:
            raise NonFinite(f"weights at send {cycle} of fragment {fragment}: {error}") from error
        digest = blake3.blake3(memory).hexdigest(length=16)
        self._regions.commit(fragment, cycle, digest)
        return digest

    def merge(self, fragment: int) -> None:
        """theta += phi' - decoded: take over how phi of a fragment has moved since its send."""
        spans = self.fragments[fragment].spans
        move = self._scratch(spans)
        codes = codes_as_tensor(self._regions.codes(fragment))
        self._codec.decode(codes.to(self._model.device), move)
        move.neg_()
        for own, span in _places(spans):
            move[own].add_(self._slow_P[span].to(self._model.device))
            self._model.theta_P[span].add_(move[own])
        move.zero_()

    def _encode(self, spans: Sequence[Span], memory: memoryview) -> None:
        with codes_on(self._model.device, memory) as codes:
            if len(spans) == 1:
                self._codec.encode(self._model.theta_P[slice(*spans[0])], codes)
                return
            values = self._scratch(spans)
            try:
                for own, span in _places(spans):
                    values[own] = self._model.theta_P[span]
                self._codec.encode(values, codes)
            finally:
                values.zero_()

    def _scratch(self, spans: Sequence[Span]) -> torch.Tensor:
        # The gradient is zero and idle between two steps: its memory serves as scratch.
        return self._model.gradient_P[: sum(stop - start for start, stop in spans)]


def _places(spans: Sequence[Span]) -> Iterator[tuple[slice, slice]]:
    """Where the values of each span lie: one span after another, and in the flat vector."""
    begin = 0
    for start, stop in spans:
        yield slice(begin, begin + stop - start), slice(start, stop)
        begin += stop - start


@dataclass(slots=True)
class _Flight:
    """One fragment.

    Attributes:
        sends: so far; the number of the next one.
        in_flight: the last send has not been merged.
        is_due: its moment has come.
        steps, tokens: trained since its last send.
        sending_s: how long training stood still for that.
    """

    sends: int = 0
    in_flight: bool = False
    is_due: bool = False
    steps: int = 0
    tokens: int = 0
    sending_s: float = 0.0

    @property
    def can_send(self) -> bool:
        return self.is_due and not self.in_flight


class PairSync:
    """Sends fragments of the weights, and merges the pair's averages.

    Implements `peer.training.sync.Sync`.
    """

    def __init__(
        self,
        spec: RunSpec,
        deltas: FragmentDeltas,
        emit: Callable[[SyncEvent], None],
        clock_s: Callable[[], float],
    ) -> None:
        self._inner_steps = spec.sync.round_steps
        self._is_whole = spec.sync.pairs.is_whole
        self._overlap = spec.sync.overlap
        self._spec = spec
        self._deltas = deltas
        self._emit = emit
        self._clock_s = clock_s
        self._reset()

    def _reset(self) -> None:
        self._flights = [_Flight() for _ in self._deltas.fragments]
        self._step = 0.0
        self._in_round = False

    @property
    def holds_training(self) -> bool:
        """Whether nothing may be trained now (rule 2 of a whole model)."""
        return not self._overlap and self.holds_close

    @property
    def holds_close(self) -> bool:
        """Whether the whole model is in flight."""
        return self._is_whole and self._flights[0].in_flight

    @property
    def is_send_due(self) -> bool:
        """Whether `advance` will send."""
        return self._in_round and any(flight.can_send for flight in self._flights)

    def steps_to_event(self, order: TrainRound, steps: int) -> float:
        """Steps, after the round's `steps`-th, to the next moment of a fragment."""
        if self._is_whole:
            return math.inf
        step = order.start_step + order.stride * steps
        moments = (
            1 + (offset(each, len(self._flights), self._inner_steps) - _whole(step) - 1)
            % self._inner_steps
            for each in range(len(self._flights))
        )  # fmt: skip
        to_moment = _whole(step) + min(moments) - step
        return max(1, math.ceil(to_moment / order.stride - _EPSILON))

    def load(self) -> None:
        """theta := phi, nothing is in flight or due."""
        self._deltas.load()
        self._reset()

    def begin(self, order: TrainRound) -> None:
        """Go on at the nominal step at which the round begins."""
        self._step, self._in_round = order.start_step, True
        for flight in self._flights:
            flight.is_due |= order.quota == 0 and not self._is_whole

    def stepped(self, order: TrainRound, steps: int, tokens: int) -> None:
        """Count a step, and what falls due with it."""
        before, self._step = self._step, order.start_step + order.stride * steps
        for flight in self._flights:
            flight.steps += 1
            flight.tokens += tokens
        if self._is_whole:
            return
        if _whole(self._step) >= total_steps_of(self._spec, order):
            for flight in self._flights:
                flight.is_due = False
            return
        passed = sends_between(
            _whole(before), _whole(self._step), len(self._flights), self._inner_steps
        )
        for fragment, _ in passed:
            self._flights[fragment].is_due = True

    def advance(self) -> None:
        """Send what is due. Raises NonFinite."""
        for fragment, flight in enumerate(self._flights):
            if self._in_round and flight.can_send:
                self._send(fragment, flight)

    def close(self, order: TrainRound) -> None:
        """A round is over: a whole model is sent now. Raises NonFinite."""
        if self._is_whole:
            self._send(0, self._flights[0])
        self._in_round = False

    def obey(self, command: SyncCommand) -> None:
        """Take `Merge`. Raises WrongCommand."""
        if not isinstance(command, Merge):
            raise WrongCommand(f"{command}, but this run averages in pairs")
        if not 0 <= command.fragment < len(self._flights):
            raise WrongCommand(f"{command}: there are {len(self._flights)} fragments")
        flight = self._flights[command.fragment]
        if not flight.in_flight or command.cycle != flight.sends - 1:
            raise WrongCommand(f"{command}, but its fragment's flight is {flight}")
        if (command.stepped, command.moved) != (ONE_CHUNK, ()):
            raise WrongCommand(f"{command}: a fragment is one chunk, and always stepped")
        started_s = self._clock_s()
        self._deltas.merge(command.fragment)
        flight.in_flight = False
        waited_s = flight.sending_s + self._clock_s() - started_s
        self._emit(FragmentMerged(command.fragment, command.cycle, waited_s))

    def _send(self, fragment: int, flight: _Flight) -> None:
        started_s = self._clock_s()
        digest = self._deltas.send(fragment, flight.sends)
        flight.sending_s = self._clock_s() - started_s
        self._emit(
            FragmentSent(
                fragment=fragment,
                cycle=flight.sends,
                steps=flight.steps,
                tokens=flight.tokens,
                digest=digest,
                seconds=flight.sending_s,
                waited_s=0.0,
                step=self._step,
            )
        )
        flight.sends += 1
        flight.in_flight, flight.is_due = True, False
        flight.steps = flight.tokens = 0


def _whole(step: float) -> int:
    """The whole nominal steps that are done."""
    return math.floor(step + _EPSILON)


def regions_of(spec: RunSpec, layout: Layout) -> tuple[int, ...]:
    """A region for the codes of each fragment."""
    codec = get_codec(spec.sync.codec, part_of=layout.padded_parameters)
    fragments = fragments_of_run(spec.sync.pairs, layout)
    return tuple(codec.code_bytes(fragment.size) for fragment in fragments)


def snapshots_of(
    spec: RunSpec, weights: FastWeights, slow_P: torch.Tensor, regions: CodeRegions
) -> FragmentDeltas:
    """The values of each fragment."""
    codec = get_codec(spec.sync.codec, part_of=weights.layout.padded_parameters)
    fragments = fragments_of_run(spec.sync.pairs, weights.layout)
    return FragmentDeltas(weights, slow_P, regions, codec, fragments)


def sync_of(
    spec: RunSpec,
    snapshots: FragmentDeltas,
    emit: Callable[[SyncEvent], None],
    clock_s: Callable[[], float],
) -> PairSync:
    """What sends each fragment at its moment."""
    return PairSync(spec, snapshots, emit, clock_s)
