"""Fragments of the fast weights: what is sent of them, and how averages come back.

The method is Streaming DiLoCo (arXiv 2501.18512, algorithm 2). phi is the outer copy of the model,
equal on all peers and moved by the outer steps alone; theta are the fast weights. For the values of
a fragment p:

    send      u := phi - theta           its codes go to the chunks' owners
    (training goes on)
    merge     theta := a theta + (1 - a) phi'       where the outer step is in phi'

u is the pseudo-gradient: the way from phi, which the owners average. a is `merge` of the run spec:
1/2 keeps half of what was trained since the send, 0 none of it.

Rules
  1. u is coded chunk by chunk, the codes of the chunks one after another.
  2. A chunk whose outer step did not come is left alone: theta is as far from phi as before, so the
     next send covers its whole way since the old phi. A chunk that was stepped without our codes,
     or was taken over from another peer, moves theta by as much as phi ("moved"): again our whole
     way stays, and goes out with the next send. Nothing that was trained is lost.
  3. An outer step can be taken back and redone, in the outer copy that the daemon holds. theta
     follows: from result A to B by (1 - a) (phi_B - phi_A), which gives what merging B at once
     would have given. `held` is the phi_A of a fragment whose phi is, or may be, written: from its
     send to its merge, and while it is yielded.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import blake3
import torch

from peer.codec import Codec, codes_on
from protocol.fragment.fragments import Fragment
from protocol.run.sections import DilocoSection

from .errors import NonFinite
from .shared import CodeRegions
from .weights import FastWeights


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Where a chunk's values lie in the flat vector and in the fragment, and its codes."""

    spans: tuple[slice, ...]
    own: slice
    codes: slice

    @property
    def size(self) -> int:
        return int(self.own.stop - self.own.start)


class FragmentSnapshots:
    """Sends fragments of the fast weights, and merges the outer steps into them.

    It keeps the values; when what is due is the business of whoever calls.
    """

    def __init__(
        self,
        model: FastWeights,
        outer_P: torch.Tensor,
        regions: CodeRegions,
        codec: Codec,
        fragments: Sequence[Fragment],
        diloco: DilocoSection,
    ) -> None:
        self.fragments = tuple(fragments)
        self._model = model
        self._outer_P = outer_P
        self._regions = regions
        self._codec = codec
        self._share = 1.0 - diloco.merge
        self._chunks = [_chunks(fragment, codec) for fragment in fragments]
        self._held: dict[int, torch.Tensor] = {}

    def load(self) -> None:
        """theta := phi; nothing is held."""
        self._model.theta_P.copy_(self._outer_P)
        self._held.clear()

    def codes(self, fragment: int) -> memoryview:
        """Codes of the fragment's last send, valid until its next one."""
        return self._regions.codes(fragment)

    def send(self, fragment: int, cycle: int) -> str:
        """Write the codes of a fragment's pseudo-gradient to its region. Returns their digest.

        Raises:
            NonFinite: theta holds a NaN or an infinity; nothing is committed.
        """
        memory = self._regions.begin(fragment)
        self.hold(fragment)
        try:
            self._encode(fragment, memory)
        except ValueError as error:
            raise NonFinite(f"weights at send {cycle} of fragment {fragment}: {error}") from error
        digest = blake3.blake3(memory).hexdigest(length=16)
        self._regions.commit(fragment, cycle, digest)
        return digest

    def merge(self, fragment: int, stepped: Iterable[int], moved: Iterable[int] = ()) -> None:
        """Take over what was written to phi of a fragment since it was sent.

        Args:
            stepped: chunks whose outer step, with our codes, is in phi.
            moved: chunks that were written without our codes.
        """
        self.amend(fragment, merged=stepped, moved=moved)

    def hold(self, fragment: int) -> None:
        """From now on phi of this fragment may be written: keep it as it is."""
        spans = self.fragments[fragment].spans
        self._held[fragment] = torch.cat([self._outer_P[start:stop] for start, stop in spans])

    def amend(
        self,
        fragment: int,
        merged: Iterable[int] = (),
        redone: Iterable[int] = (),
        moved: Iterable[int] = (),
    ) -> None:
        """Take over what was written to phi of a fragment since `hold`.

        Args:
            merged: chunks that were stepped now, with our codes.
            redone: chunks whose step was taken back, and taken again with another result.
            moved: chunks that were written without our codes.
        """
        held = self._held.pop(fragment)
        self._mix(fragment, merged)
        self._shift(fragment, redone, held, self._share)
        self._shift(fragment, moved, held, 1.0)

    # --- the values -----------------------------------------------------------------------------

    def _encode(self, fragment: int, memory: memoryview) -> None:
        with codes_on(self._model.device, memory) as codes:
            try:
                for chunk in self._chunks[fragment]:
                    self._codec.encode(self._pseudo_gradient(chunk), codes[chunk.codes])
            finally:
                self._scratch(self._largest(fragment)).zero_()

    def _pseudo_gradient(self, chunk: _Chunk) -> torch.Tensor:
        """phi - theta of a chunk, in scratch memory."""
        u, theta_P, begin = self._scratch(chunk.size), self._model.theta_P, 0
        for span in chunk.spans:
            end = begin + span.stop - span.start
            torch.sub(self._outer(span), theta_P[span], out=u[begin:end])
            begin = end
        return u

    def _mix(self, fragment: int, chunks: Iterable[int]) -> None:
        for span in self._spans(fragment, chunks):
            self._model.theta_P[span].lerp_(self._outer(span), self._share)

    def _shift(
        self, fragment: int, chunks: Iterable[int], held: torch.Tensor, share: float
    ) -> None:
        """theta += share (phi - held)."""
        for chunk in (self._chunks[fragment][index] for index in chunks):
            begin = chunk.own.start
            for span in chunk.spans:
                end = begin + span.stop - span.start
                move = self._outer_P[span] - held[begin:end]
                self._model.theta_P[span].add_(move.to(self._model.device), alpha=share)
                begin = end

    def _outer(self, span: slice) -> torch.Tensor:
        return self._outer_P[span].to(self._model.device)

    def _spans(self, fragment: int, chunks: Iterable[int]) -> Iterator[slice]:
        return itertools.chain.from_iterable(
            self._chunks[fragment][index].spans for index in chunks
        )

    def _scratch(self, size: int) -> torch.Tensor:
        # The gradient is zero and idle between two steps: its memory serves as scratch.
        return self._model.gradient_P[:size]

    def _largest(self, fragment: int) -> int:
        return max(chunk.size for chunk in self._chunks[fragment])


def _chunks(fragment: Fragment, codec: Codec) -> list[_Chunk]:
    sizes = [codec.code_bytes(stop - start) for start, stop in fragment.chunks]
    ends = list(itertools.accumulate(sizes, initial=0))
    return [
        _Chunk(
            tuple(slice(*span) for span in fragment.chunk_spans(index)),
            slice(*fragment.chunks[index]),
            slice(ends[index], ends[index + 1]),
        )
        for index in range(len(fragment.chunks))
    ]
