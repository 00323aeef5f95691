"""Codes of blocks through compiled loops, shared out among threads (`peer.codec.compiled`)."""

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .base import BLOCK, LARGEST_MAGNITUDE, NOT_FINITE, Array
from .compiled import in_chunks

_LARGEST_MAGNITUDE_BITS: Final = int(np.float32(LARGEST_MAGNITUDE).view(np.int32))


class Kernels(Protocol):
    """The loops of one code over blocks first .. last - 1; `scales` are the bits of bf16 numbers.

    A module of kernels is one, as numba compiles it.
    """

    def encode_blocks(
        self, x_P: Array, x_bits: Array, codes: Array, scales: Array, first: int, last: int, /
    ) -> int:
        """Code the blocks. Returns the bits of the largest magnitude met."""

    def decode_blocks(
        self, codes: Array, scales: Array, out: Array, out_first: int, first: int, last: int, /
    ) -> None:
        """Write the values of the blocks into `out`, which begins at block `out_first`."""

    def are_valid(self, codes: Array, scales: Array, first: int, last: int, /) -> bool:
        """Whether the codes and scales of the blocks are what `encode_blocks` can write."""


class CompiledLoops:
    """Compiled loops for tensors in main memory; their bytes are those of `blocks_plain`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def encode(self, x_P: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write codes and scales. Raises ValueError if not finite."""
        x = x_P.detach().numpy()
        arrays = x, x.view(np.int32), codes.numpy(), scale_bits(scales)
        largest = in_chunks(
            lambda first, last: self._kernels.encode_blocks(*arrays, first, last), scales.numel()
        )
        if max(largest, default=0) > _LARGEST_MAGNITUDE_BITS:
            raise ValueError(NOT_FINITE)

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, start: int, out: torch.Tensor
    ) -> None:
        """Write the values from `start` on into `out`."""
        arrays, out_first = (
            (codes.numpy(), scale_bits(scales), out.detach().numpy()),
            start // BLOCK,
        )
        in_chunks(
            lambda first, last: self._kernels.decode_blocks(
                *arrays, out_first, out_first + first, out_first + last
            ),
            out.numel() // BLOCK,
        )

    def are_valid(self, codes: torch.Tensor, scales: torch.Tensor) -> bool:
        """Whether the codes and scales are what `encode` can write."""
        arrays = codes.numpy(), scale_bits(scales)
        return all(
            in_chunks(
                lambda first, last: self._kernels.are_valid(*arrays, first, last), scales.numel()
            )
        )


def scale_bits(scales: torch.Tensor) -> npt.NDArray[np.uint16]:
    """The memory of bf16 scales as integers: numpy has no bf16."""
    bits: npt.NDArray[np.uint16] = scales.view(torch.int16).numpy()
    return bits.view(np.uint16)
