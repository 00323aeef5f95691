"""A boundary as bytes in a slot: activations or their gradient, coded.

Shapes: b sequences of a microbatch, T tokens, D width of the model.
"""

import torch

from peer.codec import Codec, codes_as_tensor, codes_on


class BoundaryCoder:
    """Codes boundaries of one shape.

    Args:
        shape: (b, T, D).
    """

    def __init__(self, codec: Codec, shape: tuple[int, int, int], device: torch.device) -> None:
        self._codec = codec
        self._shape = shape
        self._device = device
        self._num_values = shape[0] * shape[1] * shape[2]

    @property
    def code_bytes(self) -> int:
        """Bytes of one boundary."""
        return self._codec.code_bytes(self._num_values)

    def write(self, boundary_bTD: torch.Tensor, slot: memoryview) -> None:
        """Code a boundary into a slot. Raises ValueError when it holds a NaN or an infinity."""
        with codes_on(self._device, slot) as codes:
            self._codec.encode(boundary_bTD.detach().float().contiguous().view(-1), codes)

    def read(self, slot: memoryview) -> torch.Tensor:
        """The boundary in a slot, fp32 [b, T, D]. Raises ValueError when it is no sound one."""
        codes = codes_as_tensor(slot).to(self._device)
        if not self._codec.validate(codes):
            raise ValueError("a boundary with values that are not finite")
        values = torch.empty(self._num_values, device=self._device)
        self._codec.decode(codes, values)
        return values.view(self._shape)
