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
"""

import math
from dataclasses import dataclass

import blake3
import torch

from peer.codec import Codec, codes_as_tensor

from .errors import NonFinite
from .shared import NUM_SLOTS, CodeRegions
from .weights import FastWeights


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where the codes of a closed round lie."""

    round: int
    slot: int
    digest: str


class Snapshots:
    """Takes snapshots, and applies the moves of the slow weights; at most one is pending."""

    def __init__(
        self, model: FastWeights, slow_P: torch.Tensor, slots: CodeRegions, codec: Codec
    ) -> None:
        self._model = model
        self._slow_P = slow_P
        self._slots = slots
        self._codec = codec
        self._next_slot = 0
        self.pending: Snapshot | None = None

    def __repr__(self) -> str:
        return f"<Snapshots, pending {self.pending}>"

    def load(self) -> None:
        """theta := phi; a pending snapshot is dropped."""
        self._model.theta_P.copy_(self._slow_P)
        self.pending = None

    def take(self, round_: int) -> Snapshot:
        """Write the codes of theta to the next slot.

        Raises:
            NonFinite: theta holds a NaN or an infinity; nothing is committed.
        """
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % NUM_SLOTS
        memory = self._slots.begin(slot)
        try:
            self._encode(memory)
        except ValueError as error:
            raise NonFinite(f"weights at the close of round {round_}: {error}") from error
        digest = blake3.blake3(memory).hexdigest(length=16)
        self._slots.commit(slot, round_, digest)
        self.pending = Snapshot(round_, slot, digest)
        return self.pending

    def _encode(self, memory: memoryview) -> None:
        shared = torch.frombuffer(memory, dtype=torch.uint8)
        if self._model.device.type == "cpu":
            self._codec.encode(self._model.theta_P, shared)
            return
        on_device = torch.empty_like(shared, device=self._model.device)
        self._codec.encode(self._model.theta_P, on_device)
        shared.copy_(on_device)

    def apply(self) -> float:
        """Take over the move of the slow weights since the pending snapshot.

        Returns:
            Root mean square of phi' - decoded per parameter.
        """
        snapshot, self.pending = self.pending, None
        if snapshot is None:
            raise RuntimeError("no snapshot is pending")
        # The gradient is zero and idle between two steps: its memory serves as scratch.
        move_P = self._model.gradient_P
        codes = codes_as_tensor(self._slots.codes(snapshot.slot))
        self._codec.decode(codes.to(self._model.device), move_P)
        move_P.neg_().add_(self._slow_P)
        self._model.theta_P.add_(move_P)
        distance = float(torch.linalg.vector_norm(move_P))
        move_P.zero_()
        return distance / math.sqrt(self._model.layout.parameters)
