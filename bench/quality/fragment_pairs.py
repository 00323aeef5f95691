"""Replicas that average their fragments in pairs, in one process, without lines.

Each replica's side is the trainer's (peer/training/fragments.py), the moments are the
protocol's (protocol/fragment/fragments.py), the outer step is the daemon's
(peer/averaging/gossip/outer_step.py). What lies between them is left out: here every send finds a
partner, drawn for each fragment and cycle as for a round, and comes back after `delay` steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peer.averaging.gossip.outer_step import NolocoFactors, outer_step
from peer.codec import codes_as_tensor, get_codec
from peer.training.fragments import FragmentDeltas
from peer.training.model import FlatModel
from peer.training.shared import CodeRegions
from protocol.fragment.fragments import cut_fragments, sends_between

from .pairing import groups_of_round


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    fragment: int
    cycle: int
    due_step: int


class FragmentPairs:
    """Averages the weights of some models; their training is the caller's.

    Args:
        phis, deltas: slow weights and momentum of each replica, fp32 [P].
        blocks_per_fragment: at most so many transformer blocks in one.
        code: name of the codec.
        delay: steps between a send and its merge.

    Attributes:
        sent_bytes: by all replicas.
    """

    def __init__(
        self,
        models: Sequence[FlatModel],
        phis: Sequence[torch.Tensor],
        deltas: Sequence[torch.Tensor],
        *,
        blocks_per_fragment: int,
        inner_steps: int,
        code: str,
        factors: NolocoFactors,
        delay: int,
        run_id: str,
    ) -> None:
        layout = models[0].layout
        self.fragments = cut_fragments(layout, "strided", blocks_per_fragment)
        self.sent_bytes = 0.0
        self._inner_steps, self._delay, self._run_id = inner_steps, delay, run_id
        self._codec = get_codec(code)
        sizes = [self._codec.code_bytes(fragment.size) for fragment in self.fragments]
        self._regions = [CodeRegions(-1, sizes, writable=True) for _ in models]
        self._replicas = [
            FragmentDeltas(model, phi_P, regions, self._codec, self.fragments)
            for model, phi_P, regions in zip(models, phis, self._regions, strict=True)
        ]
        self._phis, self._deltas, self._factors = phis, deltas, factors
        self._cycles = [0] * len(self.fragments)
        self._on_their_way: list[_OnItsWay] = []

    def after_step(self, step: int) -> None:
        """Send what is due after this inner step (the first is 1), and take in what is back."""
        for fragment, _ in sends_between(step - 1, step, len(self.fragments), self._inner_steps):
            self._send(fragment, step)
        self._take_in(step)

    def flush(self, step: int) -> None:
        """Take in all that is on its way, then send every fragment, and take that in."""
        self._take_in(None)
        for fragment in range(len(self.fragments)):
            self._send(fragment, step)
        self._take_in(None)

    def _send(self, fragment: int, step: int) -> None:
        cycle, self._cycles[fragment] = self._cycles[fragment], self._cycles[fragment] + 1
        for replica, regions in zip(self._replicas, self._regions, strict=True):
            replica.send(fragment, cycle)
            self.sent_bytes += len(regions.codes(fragment))
        self._on_their_way.append(_OnItsWay(fragment, cycle, step + self._delay))

    def _take_in(self, step: int | None) -> None:
        for sent in tuple(self._on_their_way):
            if step is None or sent.due_step <= step:
                self._on_their_way.remove(sent)
                self._average(sent)

    def _average(self, sent: _OnItsWay) -> None:
        group = f"{self._run_id}/fragment/{sent.fragment}"
        for pair in groups_of_round("pairs", group, sent.cycle, len(self._replicas)):
            for own in pair:
                self._step(own, pair, sent.fragment)
        for replica in self._replicas:
            replica.merge(sent.fragment)

    def _step(self, own: int, pair: tuple[int, ...], fragment: int) -> None:
        phi_P, delta_P = self._phis[own], self._deltas[own]
        spans = self.fragments[fragment].spans
        phi, delta = (
            torch.cat([vector_P[start:stop] for start, stop in spans])
            for vector_P in (phi_P, delta_P)
        )
        members = (own, *(each for each in pair if each != own))
        codes = [
            codes_as_tensor(self._regions[each].codes(fragment)).to(phi_P.device)
            for each in members
        ]
        outer_step(phi, delta, codes, self._codec, self._factors)
        begin = 0
        for start, stop in spans:
            end = begin + stop - start
            phi_P[start:stop], delta_P[start:stop] = phi[begin:end], delta[begin:end]
            begin = end
