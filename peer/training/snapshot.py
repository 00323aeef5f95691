"""The snapshot at the close of a round, and how the slow weights' move comes back.

    close of round r      theta_s := theta                  its codes go to the partner
    (training goes on)
    Apply(r)              theta := theta + (phi' - decoded)

phi' are the slow weights after the outer step of round r, `decoded` is what our codes stand for.
What was trained since the snapshot stays in theta. With an exact code, decoded = theta_s, and with
nothing trained meanwhile the line is theta := phi'.

That it says `decoded` and not `theta_s` is error feedback: the outer step has averaged our decoded
codes, rounding error theta_s - decoded left out; the line leaves just that in our fast weights, so
that it is sent again with the next snapshot. Nothing is lost in the long run. With theta_s in its
place an error of the size of the code's step would stay in the weights in each round, and they
would take a random walk (tests/numerics/test_coding_noise.py shows both).

The same two lines, for some of the values alone, send and merge a fragment (streaming_gossip.py).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import blake3
import torch

from peer.codec import Codec, codes_as_tensor, codes_on
from protocol.fragment.fragments import Span

from .errors import NonFinite
from .shared import NUM_SLOTS, CodeRegions
from .weights import FastWeights


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where the codes of a closed round lie."""

    round: int
    slot: int
    digest: str


class DeltaMerge:
    """Sends values of the fast weights as codes, and takes over how the slow ones have moved since.

    Spans say where the values lie in the flat vector; their codes are those of one vector.
    """

    def __init__(
        self, model: FastWeights, slow_P: torch.Tensor, regions: CodeRegions, codec: Codec
    ) -> None:
        self._model = model
        self._slow_P = slow_P
        self._regions = regions
        self._codec = codec

    def load(self) -> None:
        """theta := phi."""
        self._model.theta_P.copy_(self._slow_P)

    def send(self, region: int, number: int, spans: Sequence[Span]) -> str:
        """Write the codes of theta in these spans to a region. Returns their digest.

        Raises:
            ValueError: theta holds a NaN or an infinity; nothing is committed.
        """
        memory = self._regions.begin(region)
        self._encode(spans, memory)
        digest = blake3.blake3(memory).hexdigest(length=16)
        self._regions.commit(region, number, digest)
        return digest

    def merge(self, region: int, spans: Sequence[Span]) -> float:
        """theta += phi' - decoded, in the spans whose codes are in the region.

        Returns:
            Length of that move, as a vector.
        """
        move = self._scratch(spans)
        codes = codes_as_tensor(self._regions.codes(region))
        self._codec.decode(codes.to(self._model.device), move)
        move.neg_()
        for own, span in _places(spans):
            move[own].add_(self._slow_P[span].to(self._model.device))
            self._model.theta_P[span].add_(move[own])
        distance = float(torch.linalg.vector_norm(move))
        move.zero_()
        return distance

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


class Snapshots:
    """Takes snapshots, and applies the moves of the slow weights; at most one is pending."""

    def __init__(
        self, model: FastWeights, slow_P: torch.Tensor, slots: CodeRegions, codec: Codec
    ) -> None:
        self._whole = ((0, model.theta_P.numel()),)
        self._parameters = model.layout.parameters
        self._merge = DeltaMerge(model, slow_P, slots, codec)
        self._next_slot = 0
        self.pending: Snapshot | None = None

    def load(self) -> None:
        """theta := phi; a pending snapshot is dropped."""
        self._merge.load()
        self.pending = None

    def take(self, round_: int) -> Snapshot:
        """Write the codes of theta to the next slot.

        Raises:
            NonFinite: theta holds a NaN or an infinity; nothing is committed.
        """
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % NUM_SLOTS
        try:
            digest = self._merge.send(slot, round_, self._whole)
        except ValueError as error:
            raise NonFinite(f"weights at the close of round {round_}: {error}") from error
        self.pending = Snapshot(round_, slot, digest)
        return self.pending

    def apply(self) -> float:
        """Take over the move of the slow weights since the pending snapshot.

        Returns:
            Root mean square of phi' - decoded per parameter.
        """
        snapshot, self.pending = self.pending, None
        if snapshot is None:
            raise RuntimeError("no snapshot is pending")
        distance = self._merge.merge(snapshot.slot, self._whole)
        return distance / math.sqrt(self._parameters)
