"""What all codes with one scale per block share: where bytes lie, checks, and which loops do it.

Codes of P values: the codes of every block, then P / 128 scales in bf16. A block's scale is

    scale = largest magnitude / largest level, rounded up to bf16    (0 when that is too small)

and a value is a level times the scale. What the levels are is said by each code (`int8`, `int4`).
Rules for all:

- The scale is rounded *before* values are coded with it, and upwards, so no value passes the
  largest level and nothing is clipped.
- bf16 has fp32's range, so small blocks keep their precision. A block whose scale would lead to
  subnormal numbers becomes zeros, because devices disagree about those.
- A value that is not finite, or beyond `LARGEST_MAGNITUDE`, is refused.
- Each operation is one correctly rounded IEEE operation, so CPU and CUDA give equal bytes. Division
  by the largest level takes a tensor as divisor: CUDA multiplies by the reciprocal of a scalar one.

Ways to the same bytes: torch's operations, tile by tile, on every device, which say what a code is
(the codec's own loops); compiled loops for long vectors in main memory (`CompiledLoops`); and on
CUDA what a code brings along.
"""

from abc import abstractmethod
from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar, Final, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from protocol.run.ways import CODECS

from . import compiled
from .base import (
    BLOCK,
    LARGEST_MAGNITUDE,
    LARGEST_MAGNITUDE_BITS,
    NOT_FINITE,
    TILE,
    Codec,
    FusedLoops,
)
from .compiled import in_chunks, kernels_of, loops_named

_SCALE_BYTES: Final = 2
_CUDA_TILE: Final = 64 * TILE
_LOW_HALF: Final = 0xFFFF


class BlockLoops(Protocol):
    """Loops over blocks, in one of the ways; the caller has checked lengths and types."""

    def encode_blocks(self, x_P: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the codes of all blocks, and their scales. Raises ValueError if not finite."""

    def decode_blocks(
        self, codes: torch.Tensor, scales: torch.Tensor, start: int, out: torch.Tensor
    ) -> None:
        """Write the values from `start` on into `out`."""

    def are_blocks_valid(self, codes: torch.Tensor, scales: torch.Tensor) -> bool:
        """Whether the codes and scales are what `encode_blocks` can write."""


class CompiledLoops(BlockLoops):
    """Compiled loops for tensors in main memory, shared out among threads (compiled.py).

    Args:
        kernels: the module of a code's loops over blocks (int8_kernels.py).
    """

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels

    def encode_blocks(self, x_P: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write codes and scales."""
        x = x_P.detach().numpy()
        arrays = x, x.view(np.int32), codes.numpy(), scale_bits(scales)
        largest = in_chunks(
            lambda first, last: self._kernels.encode_blocks(*arrays, first, last), scales.numel()
        )
        if max(largest, default=0) > LARGEST_MAGNITUDE_BITS:
            raise ValueError(NOT_FINITE)

    def decode_blocks(
        self, codes: torch.Tensor, scales: torch.Tensor, start: int, out: torch.Tensor
    ) -> None:
        """Write the values from `start` on."""
        arrays, begin = (codes.numpy(), scale_bits(scales), out.detach().numpy()), start // BLOCK
        in_chunks(
            lambda first, last: self._kernels.decode_blocks(
                *arrays, begin, begin + first, begin + last
            ),
            out.numel() // BLOCK,
        )

    def are_blocks_valid(self, codes: torch.Tensor, scales: torch.Tensor) -> bool:
        """Whether `encode_blocks` can write them."""
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


class BlockCodec(Codec, BlockLoops):
    """A codec of blocks with scales. Holds scratch memory for one tile: use one per thread.

    Attributes:
        block_bytes: of a block's codes, without its scale.
        code_type: of the elements that codes are made of.
        largest_level: what the largest magnitude of a block is coded as, in scales.
        smallest_scale: below it a scale becomes 0.
        largest_scale: above it a scale is refused.
        kernels_module: full name of the module of compiled loops.
        triton_module: of that with loops for CUDA, if there is one.
    """

    block_bytes: ClassVar[int]
    code_type: ClassVar[torch.dtype]
    largest_level: ClassVar[float]
    smallest_scale: ClassVar[float]
    largest_scale: ClassVar[float]
    kernels_module: ClassVar[str]
    triton_module: ClassVar[str | None] = None

    def __init_subclass__(cls) -> None:
        cls.planes = cls.block_bytes, _SCALE_BYTES

    def __init__(self, part_of: int = 0) -> None:
        super().__init__(part_of)
        self._scratch_P = self._divisors = torch.empty(0, device="meta")

    def split(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes of all blocks and their bf16 scales [P / 128] inside `codes`, as views."""
        scales_from = codes.numel() // sum(self.planes) * self.block_bytes
        return codes[:scales_from].view(self.code_type), codes[scales_from:].view(torch.bfloat16)

    # --- which loops ------------------------------------------------------------------------------

    def _encode(self, x_P: torch.Tensor, codes: torch.Tensor) -> None:
        block_codes, scales = self.split(codes)
        self._loops(block_codes, scales, x_P).encode_blocks(x_P, block_codes, scales)

    def _decode(self, codes: torch.Tensor, start: int, out: torch.Tensor) -> None:
        block_codes, scales = self.split(codes)
        self._loops(block_codes, scales, out).decode_blocks(block_codes, scales, start, out)

    def _are_valid(self, codes: torch.Tensor) -> bool:
        block_codes, scales = self.split(codes)
        loops: BlockLoops = self if codes.is_cuda else self._loops(block_codes, scales)
        return loops.are_blocks_valid(block_codes, scales)

    def loops_for(self, num_values: int, device: torch.device) -> str:
        """What codes a vector of so many values there, as `Codec` has it."""
        if device.type == "cuda" and self.triton_module is not None:
            return loops_named("triton", self.triton_module)
        if self._is_long(num_values, device):
            return loops_named("compiled", self.kernels_module)
        return "plain"

    def _is_long(self, num_values: int, device: torch.device) -> bool:
        """Whether a vector, or what it is a part of, is worth compiled loops that can reach it."""
        is_worth_it = max(num_values, self._part_of) >= compiled.COMPILED_FROM
        return device.type == "cpu" and is_worth_it and num_values % BLOCK == 0

    def _compiled(
        self, module: str, num_values: int, tensors: Sequence[torch.Tensor]
    ) -> ModuleType | None:
        """Compiled loops, if they are worth it and can reach these tensors of the vector.

        Each tensor has to begin where its elements may lie; payloads can begin anywhere.
        """
        can_reach = all(
            self._is_long(num_values, tensor.device)
            and tensor.data_ptr() % tensor.element_size() == 0
            for tensor in tensors
        )
        return kernels_of(module) if can_reach else None

    def fused_loops(
        self,
        way: str,
        all_codes: Sequence[torch.Tensor],
        vectors: Sequence[torch.Tensor],
        start: int = 0,
    ) -> FusedLoops | None:
        """Loops that take a way's outer step from these codes, as `Codec` has it."""
        module = CODECS[self.name].fused.get(way)
        if module is None or any(n % BLOCK for n in (start, *(v.numel() for v in vectors))):
            return None
        parts = [self.split(codes) for codes in all_codes]
        num_values, block = self.num_values(all_codes[0].numel()), start // BLOCK
        kernels = self._compiled(module, num_values, [*vectors, *(scales for _, scales in parts)])
        if kernels is None:
            return None
        first = block * self.block_bytes // self.code_type.itemsize
        arrays = ((codes[first:].numpy(), scale_bits(scales[block:])) for codes, scales in parts)
        return FusedLoops(kernels, tuple(arrays))

    def _loops(
        self, codes: torch.Tensor, scales: torch.Tensor, *values: torch.Tensor
    ) -> BlockLoops:
        """The fastest way for these tensors."""
        if codes.is_cuda:
            triton = self.triton_module and kernels_of(self.triton_module)
            return cast("BlockLoops", triton) if triton else self
        kernels = self._compiled(self.kernels_module, scales.numel() * BLOCK, (scales, *values))
        return CompiledLoops(kernels) if kernels else self

    # --- loops in torch's operations, tile by tile ------------------------------------------------

    @abstractmethod
    def _write_codes(
        self, x: torch.Tensor, scale: torch.Tensor, work: torch.Tensor, codes: torch.Tensor
    ) -> None:
        """Write the codes of x [blocks, 128], given scales [blocks, 1] that are not 0.

        Args:
            work: scratch of the shape of `x`; holds its magnitudes.
            codes: [blocks, bytes or elements of a block].
        """

    @abstractmethod
    def _read_levels(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of `codes` [blocks, ...] in scales into `out` [blocks, 128]."""

    @abstractmethod
    def _are_codes_valid(self, codes: torch.Tensor) -> bool:
        """Whether `encode_blocks` can write each of these codes."""

    def encode_blocks(self, x_P: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write codes and scales."""
        for start, stop in _tiles(x_P):
            blocks = slice(start // BLOCK, stop // BLOCK)
            x = x_P[start:stop].view(-1, BLOCK)
            work, divisors = self._scratch(x)
            torch.abs(x, out=work)
            absmax = torch.amax(work, dim=1)
            if not bool((absmax <= LARGEST_MAGNITUDE).all()):
                raise ValueError(NOT_FINITE)
            scale = absmax.div_(divisors)
            scale.masked_fill_(scale < self.smallest_scale, 0.0)
            scale.view(torch.int32).add_(_LOW_HALF).bitwise_and_(~_LOW_HALF)  # up to bf16
            scales[blocks].copy_(scale)
            divisor = scale.masked_fill_(scale == 0, 1.0).unsqueeze(1)
            self._write_codes(x, divisor, work, self._rows(codes)[blocks])

    def decode_blocks(
        self, codes: torch.Tensor, scales: torch.Tensor, start: int, out: torch.Tensor
    ) -> None:
        """Write the values from `start` on."""
        for first, last in _tiles(out):
            blocks = slice((start + first) // BLOCK, (start + last) // BLOCK)
            tile = out[first:last].view(-1, BLOCK)
            self._read_levels(self._rows(codes)[blocks], tile)
            tile.mul_(scales[blocks].to(torch.float32).unsqueeze(1))

    def are_blocks_valid(self, codes: torch.Tensor, scales: torch.Tensor) -> bool:
        """Whether each scale is +0, or large and small enough, and `encode_blocks` writes codes."""
        within = (scales >= self.smallest_scale) & (scales <= self.largest_scale)
        return bool((within | (scales.view(torch.int16) == 0)).all()) and all(
            self._are_codes_valid(tile) for tile in codes.split(TILE) if tile.numel()
        )

    def _rows(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(-1, self.block_bytes)

    def _scratch(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of the shape of a tile, and the largest level for each of its blocks."""
        if self._scratch_P.device != x.device:
            rows = _tile_on(x.device) // BLOCK
            self._scratch_P = torch.empty((rows, BLOCK), device=x.device)
            self._divisors = torch.full((rows,), self.largest_level, device=x.device)
        return self._scratch_P[: len(x)], self._divisors[: len(x)]


def _tile_on(device: torch.device) -> int:
    return _CUDA_TILE if device.type == "cuda" else TILE


def _tiles(vector: torch.Tensor) -> list[tuple[int, int]]:
    """Start and stop of each tile of a vector."""
    size, tile = vector.numel(), _tile_on(vector.device)
    return [(start, min(start + tile, size)) for start in range(0, size, tile)]
