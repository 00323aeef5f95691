"""Fragments of the fast weights: what is sent of them, and how averages come back.

phi are the slow weights, theta the fast ones. A merge keeps what was trained since the send, so
training need not wait. For the values of a fragment p, between peers that average in pairs
(LOSCAR-SGD, arXiv 2605.20866, for a slice of a model; a whole model is one such):

    send p       snapshot := theta[p]                     its codes go to p's partner
    (training goes on)
    merge p      theta[p] := theta[p] + (phi'[p] - decoded)

phi' are the slow weights after the outer step, `decoded` are the values of our codes. Subtracting
`decoded` and not `snapshot` is error feedback: the outer step has averaged our decoded codes, and
the rounding error, snapshot - decoded, stays in our fast weights and goes out with the next send.
With `snapshot` each round would leave an error of the size of the code's step in the weights, and
they would take a random walk (tests/numerics/test_coding_noise.py shows both).

Where all average a fragment (Streaming DiLoCo, arXiv 2501.18512, algorithm 2), phi is equal on all
peers and moved by the outer steps alone:

    send p       u := phi[p] - theta[p]                   its codes go to the chunks' owners
    (training goes on)
    merge p      theta[p] := a theta[p] + (1 - a) phi'[p]

u is the pseudo-gradient, which the owners average. a is `merge` of the run spec: 1/2 keeps half of
what was trained since the send, 0 none of it.

Rules where all average
  1. u is coded chunk by chunk, the codes of the chunks one after another.
  2. A chunk whose outer step did not come is left alone: theta is as far from phi as before, so the
     next send holds all that was trained since the old phi. A chunk that was stepped without our
     codes, or was taken over from another peer, moves theta by as much as phi ("moved"): all that
     was trained stays here too, and goes out with the next send.
  3. An outer step can be taken back and redone by the daemon. theta follows from result A to B by
     (1 - a) (phi_B - phi_A), which gives what merging B at once would have given. `held` is the
     phi_A of a fragment whose phi may be written: from its send to its merge, and while it is
     yielded.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import blake3
import torch

from peer.codec import Codec, codes_as_tensor, codes_on, get_codec
from protocol.fragment.fragments import Fragment, fragments_of_run
from protocol.run.layout import Layout
from protocol.run.run_spec import RunSpec

from .ports import NonFinite
from .shared import CodeRegions


class FastWeights(Protocol):
    """A model as flat vectors, fp32 [P]: its weights, and their gradients.

    The gradient is zero and idle between two steps: its memory serves as scratch, and is left zero.
    A write to the weights is noted in `moved`: other ranks have them, too, and note that they have
    taken them. The vectors may be elsewhere than the device that computes. `notes` says how a step
    is computed, where not plainly, in sentences that are yet to be told.
    """

    theta_P: torch.Tensor
    gradient_P: torch.Tensor
    device: torch.device
    layout: Layout
    moved: bool
    notes: list[str]


@contextmanager
def written_for_a_while(model: FastWeights) -> Iterator[None]:
    """Inside, other weights are in place of these, which are there again in the end."""
    moved, model.moved = model.moved, True
    try:
        yield
    finally:
        taken = not model.moved
        model.moved = moved or taken


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Values that are coded as one: in the flat vector, in the fragment, and their codes."""

    spans: tuple[slice, ...]
    own: slice
    codes: slice
    size: int

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """The place of each span's values in the chunk, and in the flat vector."""
        begin = 0
        for span in self.spans:
            end = begin + span.stop - span.start
            yield slice(begin, end), span
            begin = end


@dataclass(eq=False)
class FragmentValues(ABC):
    """Writes the codes of fragments; sync.py says when. slow_P is phi, as the daemon writes it."""

    model: FastWeights
    slow_P: torch.Tensor
    _regions: CodeRegions
    _codec: Codec
    fragments: Sequence[Fragment]

    def __post_init__(self) -> None:
        self._chunks = [self._chunks_of(fragment) for fragment in self.fragments]
        self._scratched = 0

    def load(self) -> None:
        """theta := phi."""
        self.model.theta_P.copy_(self.slow_P)
        self.model.moved = True

    def send(self, fragment: int, cycle: int) -> str:
        """Write the codes of a fragment to its region; returns their digest. Raises NonFinite."""
        memory = self.codes(fragment)
        try:
            with codes_on(self.model.theta_P.device, memory) as codes:
                for chunk in self._chunks[fragment]:
                    self._codec.encode(self._values(chunk), codes[chunk.codes])
        except ValueError as error:
            raise NonFinite(f"weights at send {cycle} of fragment {fragment}: {error}") from error
        finally:
            self._clear_scratch()
        return blake3.blake3(memory).hexdigest(length=16)

    def codes(self, fragment: int) -> memoryview:
        """Codes of the fragment's last send, valid until its next one."""
        return self._regions.codes(fragment)

    @abstractmethod
    def _chunks_of(self, fragment: Fragment) -> list[_Chunk]: ...

    @abstractmethod
    def _values(self, chunk: _Chunk) -> torch.Tensor: ...

    def _slow(self, span: slice) -> torch.Tensor:
        return self.slow_P[span].to(self.model.theta_P.device)

    def _scratch(self, size: int) -> torch.Tensor:
        self._scratched = max(self._scratched, size)
        return self.model.gradient_P[:size]

    def _clear_scratch(self) -> None:
        self.model.gradient_P[: self._scratched].zero_()
        self._scratched = 0


class FragmentDeltas(FragmentValues):
    """Values in pairs: weights are sent, and merged by how the slow ones have moved."""

    def merge(self, fragment: int) -> None:
        """theta += phi' - decoded: take over how phi of a fragment has moved since its send."""
        (chunk,) = self._chunks[fragment]
        move = self._scratch(chunk.size)
        codes = codes_as_tensor(self.codes(fragment))
        self._codec.decode(codes.to(self.model.theta_P.device), move)
        move.neg_()
        for own, span in chunk.parts():
            move[own].add_(self._slow(span))
            self.model.theta_P[span].add_(move[own])
        self._clear_scratch()
        self.model.moved = True

    @contextmanager
    def merged(self, fragment: int) -> Iterator[None]:
        """Merge it for a while; then the weights are what they were, bit for bit."""
        (chunk,), theta_P = self._chunks[fragment], self.model.theta_P
        kept = [theta_P[span].clone() for span in chunk.spans]
        with written_for_a_while(self.model):
            try:
                self.merge(fragment)
                yield
            finally:
                self._clear_scratch()
                for span, values in zip(chunk.spans, kept, strict=True):
                    theta_P[span] = values

    def _chunks_of(self, fragment: Fragment) -> list[_Chunk]:
        spans, size = tuple(slice(*span) for span in fragment.spans), fragment.size
        return [_Chunk(spans, slice(0, size), slice(0, self._codec.code_bytes(size)), size)]

    def _values(self, chunk: _Chunk) -> torch.Tensor:
        theta_P = self.model.theta_P
        if len(chunk.spans) == 1:
            return theta_P[chunk.spans[0]]
        values = self._scratch(chunk.size)
        for own, span in chunk.parts():
            values[own] = theta_P[span]
        return values


@dataclass(eq=False)
class FragmentSnapshots(FragmentValues):
    """Where all average: pseudo-gradients are sent, and the outer steps are mixed in.

    Attributes:
        merge_share: 1 - `sync.diloco.merge`, what is taken over of phi.
    """

    merge_share: float
    _held: dict[int, torch.Tensor] = field(default_factory=dict)

    def load(self) -> None:
        super().load()
        self._held.clear()

    def send(self, fragment: int, cycle: int) -> str:
        self.hold(fragment)
        return super().send(fragment, cycle)

    def hold(self, fragment: int) -> None:
        """Keep phi of this fragment as it is: from now on it may be written."""
        spans = self.fragments[fragment].spans
        self._held[fragment] = torch.cat([self.slow_P[start:stop] for start, stop in spans])

    def merge(
        self,
        fragment: int,
        stepped: Iterable[int] = (),
        moved: Iterable[int] = (),
        redone: Iterable[int] = (),
    ) -> None:
        """Take over what was written to phi of a fragment since it was sent, or held.

        Args:
            stepped: chunks whose outer step, with our codes, is in phi.
            moved: chunks that were written without our codes.
            redone: chunks whose step was taken back, and taken again with another result.
        """
        held, chunks = self._held.pop(fragment), self._chunks[fragment]
        self.model.moved = True
        for index in stepped:
            for span in chunks[index].spans:
                self.model.theta_P[span].lerp_(self._slow(span), self.merge_share)
        for indices, share in ((redone, self.merge_share), (moved, 1.0)):
            for index in indices:
                before = held[chunks[index].own]
                for own, span in chunks[index].parts():
                    move = self.slow_P[span] - before[own]
                    self.model.theta_P[span].add_(move.to(self.model.theta_P.device), alpha=share)

    def _chunks_of(self, fragment: Fragment) -> list[_Chunk]:
        sizes = [self._codec.code_bytes(stop - start) for start, stop in fragment.chunks]
        ends = list(itertools.accumulate(sizes, initial=0))
        return [
            _Chunk(
                tuple(slice(*span) for span in fragment.chunk_spans(index)),
                slice(start, stop),
                slice(ends[index], ends[index + 1]),
                stop - start,
            )
            for index, (start, stop) in enumerate(fragment.chunks)
        ]

    def _values(self, chunk: _Chunk) -> torch.Tensor:
        """phi - theta of a chunk, in scratch memory."""
        u = self._scratch(chunk.size)
        for own, span in chunk.parts():
            torch.sub(self._slow(span), self.model.theta_P[span], out=u[own])
        return u


def regions_of(spec: RunSpec, layout: Layout) -> tuple[int, ...]:
    """Bytes of the codes of each fragment of a run."""
    codec, sync = get_codec(spec.sync.codec), spec.sync
    fragments = fragments_of_run(sync.diloco or sync.pairs, layout)
    return tuple(codec.code_bytes(fragment.size) for fragment in fragments)


def values_of(
    spec: RunSpec, weights: FastWeights, slow_P: torch.Tensor, regions: CodeRegions
) -> FragmentDeltas | FragmentSnapshots:
    """The codes that are sent of these weights, and the merge of averages into them."""
    codec = get_codec(spec.sync.codec, part_of=weights.layout.padded_parameters)
    diloco = spec.sync.diloco
    fragments = fragments_of_run(diloco or spec.sync.pairs, weights.layout)
    if diloco is None:
        return FragmentDeltas(weights, slow_P, regions, codec, fragments)
    return FragmentSnapshots(weights, slow_P, regions, codec, fragments, 1.0 - diloco.merge)
