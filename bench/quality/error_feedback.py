"""Error feedback: what a code rounded away goes out with the next vector.

Idea. A peer sends a vector per round, delta, through a coarse code. It adds what earlier codes left
out, and keeps what this one leaves out:

    u    = delta + beta * e
    code = encode(u)
    e    = u - decode(code)

With beta = 1 the sum of all decoded vectors is the sum of all deltas less the last e: rounding
delays, and nothing is lost. With beta < 1 old errors fade, which helps where they no longer point
the right way (SparseLoCo has 0.95; arXiv 2508.15706). For outer gradients only: weights that are
sent whole have nothing to add up (`peer.training.snapshot` has another way there).

Rule: a vector that is refused changes nothing of e.
"""

import torch

from peer.codec import TILE, Codec


class ErrorFeedback:
    """The errors of one sender through one codec.

    Attributes:
        error_P: fp32 [P], what is still owed; zeros at first.
    """

    def __init__(self, codec: Codec, num_values: int, beta: float = 1.0) -> None:
        """Raises ValueError unless 0 <= beta <= 1."""
        if not 0 <= beta <= 1:
            raise ValueError(f"beta is {beta}: not between 0 and 1")
        self.error_P = torch.zeros(num_values, dtype=torch.float32)
        self._codec, self._beta = codec, beta

    def __repr__(self) -> str:
        return f"ErrorFeedback({self._codec.name}, P={self.error_P.numel()}, beta={self._beta:g})"

    def encode(self, delta_P: torch.Tensor, out_codes: torch.Tensor) -> None:
        """Write the codes of delta and what is owed into `out_codes`.

        Args:
            delta_P: fp32 [P]; overwritten with u, so that no further vector is needed.
            out_codes: uint8 [code_bytes(P)].

        Raises:
            ValueError: u is not finite, or lengths do not fit; what is owed stays as it was.
        """
        if delta_P.shape != self.error_P.shape:
            raise ValueError(f"delta has {delta_P.numel()} values, not {self.error_P.numel()}")
        u_P = delta_P.add_(self.error_P, alpha=self._beta)
        self._codec.encode(u_P, out_codes)
        for start in range(0, u_P.numel(), TILE):
            stop = min(start + TILE, u_P.numel())
            error = self.error_P[start:stop]
            self._codec.decode_range(out_codes, start, stop, error)
            torch.sub(u_P[start:stop], error, out=error)
