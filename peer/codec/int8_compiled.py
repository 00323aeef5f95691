"""The int8 code through compiled loops, shared out among threads (`peer.codec.compiled`)."""

from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from .base import BLOCK
from .compiled import in_chunks, is_aligned, is_long, kernels_of
from .int8_plain import NOT_FINITE


class CompiledLoops:
    """For tensors in main memory; the same bytes as `PlainLoops`."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels

    def encode(self, x_P: torch.Tensor, codes_P: torch.Tensor, scales: torch.Tensor) -> None:
        """Write int8 codes [P] and bf16 scales [P / 128]. Raises ValueError if not finite."""
        x = x_P.detach().numpy()
        arrays = x, x.view(np.int32), codes_P.numpy(), scale_bits(scales)
        largest = in_chunks(
            lambda first, last: self._kernels.encode_blocks(*arrays, first, last), scales.numel()
        )
        if max(largest, default=0) > self._kernels.LARGEST_MAGNITUDE_BITS:
            raise ValueError(NOT_FINITE)

    def decode(
        self, codes_P: torch.Tensor, scales: torch.Tensor, start: int, out: torch.Tensor
    ) -> None:
        """Write the values from `start` on into `out`."""
        arrays, out_first = (
            (codes_P.numpy(), scale_bits(scales), out.detach().numpy()),
            start // BLOCK,
        )
        in_chunks(
            lambda first, last: self._kernels.decode_blocks(
                *arrays, out_first, out_first + first, out_first + last
            ),
            out.numel() // BLOCK,
        )

    def are_valid(self, codes_P: torch.Tensor, scales: torch.Tensor) -> bool:
        """Whether the codes and scales are what `encode` can write."""
        arrays = codes_P.numpy(), scale_bits(scales)
        return all(
            in_chunks(
                lambda first, last: self._kernels.are_valid(*arrays, first, last), scales.numel()
            )
        )


def compiled_loops(*tensors: torch.Tensor, num_values: int) -> CompiledLoops | None:
    """Compiled loops if the vector is long, all `tensors` are in reach, and numba works."""
    if not (is_long(num_values, tensors[0].device) and is_aligned(*tensors)):
        return None
    kernels = kernels_of("peer.codec.int8_kernels")
    return CompiledLoops(kernels) if kernels else None


def scale_bits(scales: torch.Tensor) -> npt.NDArray[np.uint16]:
    """The memory of bf16 scales as integers: numpy has no bf16."""
    bits: npt.NDArray[np.uint16] = scales.view(torch.int16).numpy()
    return bits.view(np.uint16)
