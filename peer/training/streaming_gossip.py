"""Streaming gossip, the trainer's side: each fragment is sent at its own moment, and merged later.

The idea. Gossip in pairs sends the whole model at the close of a round. Here it is cut into
fragments, and each leaves at a moment of its own, so that the line carries a little all the time.
What comes back is merged as a difference, so it may come at any time, and training never waits:

    send p       snapshot := theta[p]                     its codes go to p's partner
    (training goes on)
    Merge(p)     theta[p] := theta[p] + (phi'[p] - decoded)

The values, and why it says `decoded`, are those of snapshot.py. Source of the merge: LOSCAR-SGD
(arXiv 2605.20866), for a slice of the model; the moments are Streaming DiLoCo's
(protocol/fragment/fragments.py, rule 2), in the nominal steps of this peer.

Rules
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from peer.codec import Codec, get_codec
from protocol.diloco.trainer_messages import (
    ONE_CHUNK,
    FragmentMerged,
    FragmentSent,
    Merge,
)
from protocol.fragment.fragments import Fragment, fragments_of_run, offset, sends_between
from protocol.run.layout import Layout
from protocol.run.run_spec import RunSpec

from .errors import NonFinite, WrongCommand
from .messages import (
    SyncCommand,
    SyncEvent,
    TrainRound,
)
from .schedule import total_steps_of
from .shared import CodeRegions
from .snapshot import DeltaMerge
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
        self._merge = DeltaMerge(model, slow_P, regions, codec)

    def load(self) -> None:
        """theta := phi."""
        self._merge.load()

    def send(self, fragment: int, cycle: int) -> str:
        """Write the codes of a fragment to its region. Returns their digest. Raises NonFinite."""
        try:
            return self._merge.send(fragment, cycle, self.fragments[fragment].spans)
        except ValueError as error:
            raise NonFinite(f"weights at send {cycle} of fragment {fragment}: {error}") from error

    def merge(self, fragment: int) -> None:
        """Take over how phi of a fragment has moved since its send."""
        self._merge.merge(fragment, self.fragments[fragment].spans)


@dataclass(slots=True)
class _Lane:
    """One fragment.

    Attributes:
        sends: so far; the number of the next one.
        in_flight: the last send has not been merged.
        is_due: its moment has come.
        steps, tokens: trained since its last send.
    """

    sends: int = 0
    in_flight: bool = False
    is_due: bool = False
    steps: int = 0
    tokens: int = 0

    @property
    def can_send(self) -> bool:
        return self.is_due and not self.in_flight


class FragmentGossip:
    """See the top of the file. Implements `peer.training.sync.Sync`."""

    def __init__(
        self,
        spec: RunSpec,
        deltas: FragmentDeltas,
        emit: Callable[[SyncEvent], None],
        clock_s: Callable[[], float],
    ) -> None:
        self._inner_steps = spec.sync.round_steps
        self._spec = spec
        self._deltas = deltas
        self._emit = emit
        self._clock_s = clock_s
        self._reset()

    def _reset(self) -> None:
        self._lanes = [_Lane() for _ in self._deltas.fragments]
        self._step = 0.0
        self._in_round = False

    @property
    def holds_training(self) -> bool:
        """Never."""
        return False

    @property
    def holds_close(self) -> bool:
        """Never."""
        return False

    @property
    def is_send_due(self) -> bool:
        """Whether `advance` will send."""
        return self._in_round and any(lane.can_send for lane in self._lanes)

    def steps_to_event(self, order: TrainRound, steps: int) -> float:
        """Steps, after the round's `steps`-th, to the next moment of a fragment."""
        step = order.start_step + order.stride * steps
        moments = (
            1 + (offset(each, len(self._lanes), self._inner_steps) - _whole(step) - 1)
            % self._inner_steps
            for each in range(len(self._lanes))
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
        if order.quota == 0:
            for lane in self._lanes:
                lane.is_due = True

    def stepped(self, order: TrainRound, steps: int, tokens: int) -> None:
        """Count a step, and what falls due with it."""
        before, self._step = self._step, order.start_step + order.stride * steps
        for lane in self._lanes:
            lane.steps += 1
            lane.tokens += tokens
        if _whole(self._step) >= total_steps_of(self._spec, order):
            for lane in self._lanes:
                lane.is_due = False
            return
        passed = sends_between(
            _whole(before), _whole(self._step), len(self._lanes), self._inner_steps
        )
        for fragment, _ in passed:
            self._lanes[fragment].is_due = True

    def advance(self) -> None:
        """Send what is due. Raises NonFinite."""
        for fragment, lane in enumerate(self._lanes):
            if self._in_round and lane.can_send:
                self._send(fragment, lane)

    def close(self, order: TrainRound) -> None:
        """A round is over: what is due was sent, or is in flight."""
        self._in_round = False

    def obey(self, command: SyncCommand) -> None:
        """Take `Merge`. Raises WrongCommand."""
        if not isinstance(command, Merge):
            raise WrongCommand(f"{command}, but this run averages fragments in pairs")
        if not 0 <= command.fragment < len(self._lanes):
            raise WrongCommand(f"{command}: there are {len(self._lanes)} fragments")
        lane = self._lanes[command.fragment]
        if not lane.in_flight or command.cycle != lane.sends - 1:
            raise WrongCommand(f"{command}, but its fragment's lane is {lane}")
        if (command.stepped, command.moved) != (ONE_CHUNK, ()):
            raise WrongCommand(f"{command}: a fragment is one chunk, and always stepped")
        self._deltas.merge(command.fragment)
        lane.in_flight = False
        self._emit(FragmentMerged(command.fragment, command.cycle, waited_s=0.0))

    def _send(self, fragment: int, lane: _Lane) -> None:
        started_s = self._clock_s()
        digest = self._deltas.send(fragment, lane.sends)
        self._emit(
            FragmentSent(
                fragment=fragment,
                cycle=lane.sends,
                steps=lane.steps,
                tokens=lane.tokens,
                digest=digest,
                seconds=self._clock_s() - started_s,
                waited_s=0.0,
                step=self._step,
            )
        )
        lane.sends += 1
        lane.in_flight, lane.is_due = True, False
        lane.steps = lane.tokens = 0


def _whole(step: float) -> int:
    """The whole nominal steps that are done."""
    return math.floor(step + _EPSILON)


def _fragments(spec: RunSpec, layout: Layout) -> tuple[Fragment, ...]:
    assert spec.sync.streaming is not None
    return fragments_of_run(spec.sync.streaming, layout)


def regions_of(spec: RunSpec, layout: Layout) -> tuple[int, ...]:
    """A region for the codes of each fragment."""
    codec = get_codec(spec.sync.codec, part_of=layout.padded_parameters)
    return tuple(codec.code_bytes(fragment.size) for fragment in _fragments(spec, layout))


def snapshots_of(
    spec: RunSpec, weights: FastWeights, slow_P: torch.Tensor, regions: CodeRegions
) -> FragmentDeltas:
    """The values of each fragment."""
    codec = get_codec(spec.sync.codec, part_of=weights.layout.padded_parameters)
    return FragmentDeltas(weights, slow_P, regions, codec, _fragments(spec, weights.layout))


def sync_of(
    spec: RunSpec,
    snapshots: FragmentDeltas,
    emit: Callable[[SyncEvent], None],
    clock_s: Callable[[], float],
    overlap_steps: int | None,  # noqa: ARG001 - all ways have one shape (sync.py)
) -> FragmentGossip:
    """What sends each fragment at its own moment."""
    return FragmentGossip(spec, snapshots, emit, clock_s)
