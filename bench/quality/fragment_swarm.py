"""Replicas that average their fragments, in one process: who sends what when, and the outer step.

Each replica's side is the trainer's (peer/training/fragments.py), the schedule the protocol's
(protocol/fragment/fragments.py), the average and the step the daemon's
(peer/averaging/diloco/nesterov.py). What lies between them is left out: here every send arrives,
and comes back after tau steps. So phi and v are the same on all replicas, and held once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peer.averaging.diloco.nesterov import (
    PLAIN_AVERAGE,
    ChunkValues,
    NesterovFactors,
    WeightedCodes,
    average_codes,
    step_pieces,
)
from peer.codec import Codec, codes_as_tensor, get_codec
from peer.training.fragments import FragmentSnapshots
from peer.training.model import FlatModel
from peer.training.shared import CodeRegions
from protocol.fragment.fragments import Span, fragments_of_run, sends_between
from protocol.run.sections import DilocoSection


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    fragment: int
    cycle: int
    due_step: int


class FragmentSwarm:
    """Averages the weights of some models; their training is the caller's.

    Attributes:
        phi_P, v_P: slow weights and outer momentum, the same on all replicas.
        sent_bytes: by one replica, on average.
        largest_send_bytes: by one replica for one fragment, the most so far.
    """

    def __init__(
        self,
        models: Sequence[FlatModel],
        diloco: DilocoSection,
        inner_steps: int,
        codec_name: str,
        *,
        heavy_ball: bool = False,
        last_cycle: int | None = None,
    ) -> None:
        """All models hold the same weights.

        Args:
            heavy_ball: v moves phi, without Nesterov's look ahead.
            last_cycle: is averaged plainly, as at the end of a run.
        """
        self.fragments = fragments_of_run(diloco, models[0].layout)
        self.phi_P = models[0].theta_P.clone()
        self.v_P = torch.zeros_like(self.phi_P)
        self.sent_bytes = self.largest_send_bytes = 0.0
        self._codec = get_codec(codec_name)
        self._factors = NesterovFactors(diloco.learning_rate, diloco.momentum)
        self._heavy_ball = heavy_ball
        self._last_cycle = last_cycle
        self._inner_steps, self._overlap_steps = inner_steps, diloco.overlap_steps
        sizes = [self._codec.code_bytes(fragment.size) for fragment in self.fragments]
        self._replicas = [
            FragmentSnapshots(
                model,
                self.phi_P,
                CodeRegions(-1, sizes, writable=True),
                self._codec,
                self.fragments,
                1.0 - diloco.merge,
            )
            for model in models
        ]
        self._on_their_way: list[_OnItsWay] = []

    def after_step(self, step: int) -> None:
        """Send what is due after this inner step (the first is 1), and take in what is back."""
        for fragment, cycle in sends_between(
            step - 1, step, len(self.fragments), self._inner_steps
        ):
            self._send(fragment, cycle)
            self._on_their_way.append(_OnItsWay(fragment, cycle, step + self._overlap_steps))
        self._take_in(step)

    def settle(self) -> None:
        """Take in all that is on its way, without training on."""
        self._take_in(None)

    def average_all(self, cycle: int) -> None:
        """Send every fragment, and take all in: a round of no inner steps."""
        for fragment in range(len(self.fragments)):
            self._send(fragment, cycle)
            self._step_fragment(fragment, cycle)

    def _send(self, fragment: int, cycle: int) -> None:
        for replica in self._replicas:
            replica.send(fragment, cycle)
        self._count_bytes(fragment)

    def _take_in(self, step: int | None) -> None:
        for sent in tuple(self._on_their_way):
            if step is None or sent.due_step <= step:
                self._on_their_way.remove(sent)
                self._step_fragment(sent.fragment, sent.cycle)

    def _step_fragment(self, index: int, cycle: int) -> None:
        fragment, begin = self.fragments[index], 0
        factors = PLAIN_AVERAGE if cycle == self._last_cycle else self._factors
        for chunk, (start, stop) in enumerate(fragment.chunks):
            end = begin + self._codec.code_bytes(stop - start)
            self._step_chunk(fragment.chunk_spans(chunk), index, slice(begin, end), factors)
            begin = end
        for replica in self._replicas:
            replica.merge(index, range(len(fragment.chunks)))

    def _step_chunk(
        self, spans: Sequence[Span], fragment: int, part: slice, factors: NesterovFactors
    ) -> None:
        before = ChunkValues(_gathered(self.phi_P, spans), _gathered(self.v_P, spans))
        given = [
            WeightedCodes(codes_as_tensor(replica.codes(fragment)[part]).to(self.phi_P.device))
            for replica in self._replicas
        ]
        result = torch.empty_like(given[0].codes)
        average_codes(given, self._codec, before.phi_C.numel(), result)
        if self._heavy_ball:
            after = heavy_ball_step(before, result, self._codec, factors)
        else:
            after = before
            step_pieces([(before, after)], result, self._codec, factors)
        _scatter(after.phi_C, self.phi_P, spans)
        _scatter(after.v_C, self.v_P, spans)

    def _count_bytes(self, fragment: int) -> None:
        """Codes to the owners of the chunks, and results from the owners to all others.

        Of M replicas each owns 1 / M of a fragment: it sends (M - 1) / M of its own codes, and its
        share of the results M - 1 times.
        """
        others = len(self._replicas) - 1
        codes = sum(self._codec.code_bytes(b - a) for a, b in self.fragments[fragment].chunks)
        sent = 2.0 * codes * others / len(self._replicas)
        self.sent_bytes += sent
        self.largest_send_bytes = max(self.largest_send_bytes, sent)


def heavy_ball_step(
    before: ChunkValues, result_codes: torch.Tensor, codec: Codec, factors: NesterovFactors
) -> ChunkValues:
    """v <- mu v + D; phi <- phi - lr v."""
    D = torch.empty_like(before.phi_C)
    codec.decode(result_codes, D)
    v_C = before.v_C * factors.momentum + D
    return ChunkValues(before.phi_C - v_C * factors.learning_rate, v_C)


def _gathered(vector_P: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    return torch.cat([vector_P[start:stop] for start, stop in spans])


def _scatter(values_C: torch.Tensor, vector_P: torch.Tensor, spans: Sequence[Span]) -> None:
    begin = 0
    for start, stop in spans:
        vector_P[start:stop] = values_C[begin : begin + stop - start]
        begin += stop - start
