"""The codecs: int8 and int4, with one scale per block of 128 values; bf16 and fp32 to compare with.

Codes of P values in int8 or int4 are the codes of every block, then P / 128 scales in bf16. For a
block with largest magnitude m and largest level L (127 or 7):

    scale = m / L, rounded up to bf16            (0 where that is below `smallest_scale`)
    value = a level from -L to L, times the scale, which is exact in fp32

Rules for both:

- The scale is rounded *before* values are coded with it, and upwards: nothing is clipped.
- bf16 has fp32's range, so small blocks keep their precision. A block whose scale would lead to
  subnormal numbers becomes zeros, because devices disagree about those.
- A value that is not finite, or beyond `LARGEST_MAGNITUDE`, is refused.
- Each operation is one correctly rounded IEEE operation, so CPU and CUDA give equal bytes. The
  largest level divides as a tensor: CUDA multiplies by the reciprocal of a scalar divisor.

int8 takes 1.0156 bytes per value. A code is the level round_half_even(x / scale); the error is at
most scale / 2. A decoded block gives its codes again if its largest code is 127. Where rounding up
left 126, the second coding has a scale one bf16 step smaller, and values move by at most half the
scale again.

int4, for outer gradients, takes 4.125 bits per value. Its relative L2 error on values spread as
Gauss is 0.12, as Laplace 0.16, as Student with 3 degrees 0.22; outer gradients have no longer tails
than Gauss's (docs/log.md).

- A value goes to the nearest level; one midway goes to the smaller magnitude. A midpoint times a
  scale is exact in fp32 too, so nothing is divided or rounded.
- A code is the level's magnitude, and 8 more for negative. Code 8, a negative zero, is never
  written and not accepted. With the smallest scale the smallest midpoint is a normal number.
- Byte i of a block holds value i in its low half and value i + 64 in its high half: no loop has to
  take neighbours apart.
- Decoded values give their codes again: the largest magnitude always takes level 7.

Torch's operations, tile by tile, define the codes on every device; compiled loops make the same
bytes of long vectors in main memory (`CompiledLoops`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch

from protocol.run.ways import CODECS

from . import (
    BLOCK,
    LARGEST_MAGNITUDE,
    LARGEST_MAGNITUDE_BITS,
    NOT_FINITE,
    TILE,
    Codec,
    FusedLoops,
    compiled,
)
from .compiled import in_chunks, kernels_of, loops_named

_LOW_HALF: Final = 0xFFFF


class CompiledLoops:
    """The methods of `BlockCodec` that go over blocks, compiled, for tensors in main memory."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels

    def encode_blocks(self, x_P: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
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
        arrays, begin = (codes.numpy(), scale_bits(scales), out.detach().numpy()), start // BLOCK
        in_chunks(
            lambda first, last: self._kernels.decode_blocks(
                *arrays, begin, begin + first, begin + last
            ),
            out.numel() // BLOCK,
        )

    def are_blocks_valid(self, codes: torch.Tensor, scales: torch.Tensor) -> bool:
        arrays = codes.numpy(), scale_bits(scales)
        return all(
            in_chunks(
                lambda first, last: self._kernels.are_valid(*arrays, first, last), scales.numel()
            )
        )


def scale_bits(scales: torch.Tensor) -> npt.NDArray[np.uint16]:
    """bf16 scales as integers, not copied: numpy has no bf16."""
    bits: npt.NDArray[np.uint16] = scales.view(torch.int16).numpy()
    return bits.view(np.uint16)


class BlockCodec(Codec):
    """A codec of blocks with scales.

    Attributes:
        block_bytes: of a block's codes, without its scale.
        smallest_scale: below it a scale becomes 0.
        largest_scale: above it a scale is refused.
        kernels_module: of compiled loops.
    """

    block_bytes: ClassVar[int]
    code_type: ClassVar[torch.dtype]
    largest_level: ClassVar[float]
    smallest_scale: ClassVar[float]
    largest_scale: ClassVar[float]
    kernels_module: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.planes = cls.block_bytes, torch.bfloat16.itemsize

    def __init__(self, part_of: int = 0) -> None:
        super().__init__(part_of)
        self._scratch_P = self._divisors = torch.empty(0, device="meta")
        self._gone_over = 0

    def split(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the codes of all blocks, and of their bf16 scales [P / 128]."""
        scales_from = codes.numel() // sum(self.planes) * self.block_bytes
        return codes[:scales_from].view(self.code_type), codes[scales_from:].view(torch.bfloat16)

    # --- which loops ------------------------------------------------------------------------------
    def _encode(self, x_P: torch.Tensor, codes: torch.Tensor) -> None:
        block_codes, scales = self.split(codes)
        self._loops(scales, x_P).encode_blocks(x_P, block_codes, scales)

    def _decode(self, codes: torch.Tensor, start: int, out: torch.Tensor) -> None:
        block_codes, scales = self.split(codes)
        self._loops(scales, out).decode_blocks(block_codes, scales, start, out)

    def _are_valid(self, codes: torch.Tensor) -> bool:
        block_codes, scales = self.split(codes)
        return self._loops(scales).are_blocks_valid(block_codes, scales)

    def loops_for(self, num_values: int, device: torch.device) -> str:
        if self._is_long(num_values, device):
            return loops_named(self.kernels_module)
        return "plain"

    def _is_long(self, num_values: int, device: torch.device) -> bool:
        """Whether a vector, or what it is part of, is worth compiled loops, and in their reach."""
        is_worth_it = max(num_values, self._part_of) >= compiled.COMPILED_FROM
        is_worth_it = is_worth_it or self._gone_over >= compiled.COMPILED_AFTER
        return device.type == "cpu" and is_worth_it and num_values % BLOCK == 0

    def _compiled(
        self, module: str, num_values: int, tensors: Sequence[torch.Tensor]
    ) -> ModuleType | None:
        """Compiled loops, if worth it, for tensors that are aligned; payloads may not be."""
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

    def _loops(self, scales: torch.Tensor, *values: torch.Tensor) -> "BlockCodec | CompiledLoops":
        num_values = scales.numel() * BLOCK
        self._gone_over += values[0].numel() if values else num_values  # perhaps a tile of them
        kernels = self._compiled(self.kernels_module, num_values, (scales, *values))
        return CompiledLoops(kernels) if kernels else self

    # --- loops in torch's operations, tile by tile; the caller has checked lengths and types ------
    @abstractmethod
    def _write_codes(
        self, x: torch.Tensor, scale: torch.Tensor, work: torch.Tensor, codes: torch.Tensor
    ) -> None:
        """Write codes [blocks, ...] of x [blocks, 128], given scales [blocks, 1] that are not 0.

        `work` is scratch of the shape of `x`, and holds its magnitudes.
        """

    @abstractmethod
    def _read_levels(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of `codes` [blocks, ...] in scales into `out` [blocks, 128]."""

    @abstractmethod
    def _are_codes_valid(self, codes: torch.Tensor) -> bool:
        """Whether `encode_blocks` can write each of these codes."""

    def encode_blocks(self, x_P: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the codes of all blocks, and their scales. Raises ValueError."""
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
        for first, last in _tiles(out):
            blocks = slice((start + first) // BLOCK, (start + last) // BLOCK)
            tile = out[first:last].view(-1, BLOCK)
            self._read_levels(self._rows(codes)[blocks], tile)
            tile.mul_(scales[blocks].to(torch.float32).unsqueeze(1))

    def are_blocks_valid(self, codes: torch.Tensor, scales: torch.Tensor) -> bool:
        """Whether each scale is +0 or within its bounds, and each code can be written."""
        within = (scales >= self.smallest_scale) & (scales <= self.largest_scale)
        return bool((within | (scales.view(torch.int16) == 0)).all()) and all(
            self._are_codes_valid(tile) for tile in codes.split(TILE) if tile.numel()
        )

    def _rows(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(-1, self.block_bytes)

    def _scratch(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of the shape of x, and the largest level for each of its blocks."""
        if self._scratch_P.device != x.device:
            rows = _tile_on(x.device) // BLOCK
            self._scratch_P = torch.empty((rows, BLOCK), device=x.device)
            self._divisors = torch.full((rows,), self.largest_level, device=x.device)
        return self._scratch_P[: len(x)], self._divisors[: len(x)]


def _tile_on(device: torch.device) -> int:
    return 64 * TILE if device.type == "cuda" else TILE


def _tiles(vector: torch.Tensor) -> list[tuple[int, int]]:
    size, tile = vector.numel(), _tile_on(vector.device)
    return [(start, min(start + tile, size)) for start in range(0, size, tile)]


# --- int8 -----------------------------------------------------------------------------------------
LARGEST_CODE: Final = 127


class Int8Codec(BlockCodec):
    name: ClassVar[str] = "int8"
    block_bytes: ClassVar[int] = BLOCK
    code_type: ClassVar[torch.dtype] = torch.int8
    largest_level: ClassVar[float] = float(LARGEST_CODE)
    smallest_scale: ClassVar[float] = 2.0**-126
    largest_scale: ClassVar[float] = LARGEST_MAGNITUDE / (LARGEST_CODE - 1)
    kernels_module: ClassVar[str] = "peer.codec.int8_kernels"

    def _write_codes(
        self, x: torch.Tensor, scale: torch.Tensor, work: torch.Tensor, codes: torch.Tensor
    ) -> None:
        torch.div(x, scale, out=work)
        codes.copy_(work.round_())

    def _read_levels(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(codes)

    def _are_codes_valid(self, codes: torch.Tensor) -> bool:
        """Whether no code is -128, which `encode` never writes."""
        return int(codes.min()) >= -LARGEST_CODE


class Int8DiffCodec(Int8Codec):
    """The codes of int8; pairs send them as differences (`peer.codec.differences`)."""

    name: ClassVar[str] = "int8-diff"


# --- int4 -----------------------------------------------------------------------------------------
LEVELS: Final = tuple(sign * float(level) for sign in (1, -1) for level in range(8))
"""The levels of the 16 codes; code 8 is not used."""
MIDPOINTS: Final = tuple(level + 0.5 for level in range(7))
HALF: Final = BLOCK // 2


class Int4Codec(BlockCodec):
    name: ClassVar[str] = "int4"
    block_bytes: ClassVar[int] = HALF
    code_type: ClassVar[torch.dtype] = torch.uint8
    largest_level: ClassVar[float] = 7.0
    smallest_scale: ClassVar[float] = 2.0**-125
    largest_scale: ClassVar[float] = 147 * 2.0**110  # LARGEST_MAGNITUDE / 7, rounded up to bf16
    kernels_module: ClassVar[str] = "peer.codec.int4_kernels"

    def _write_codes(
        self, x: torch.Tensor, scale: torch.Tensor, work: torch.Tensor, codes: torch.Tensor
    ) -> None:
        magnitudes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
        for midpoint in MIDPOINTS:
            magnitudes += work > scale * midpoint
        negative = (x < 0) & (magnitudes > 0)
        nibbles = magnitudes | (negative.to(torch.uint8) << 3)
        torch.bitwise_or(nibbles[:, :HALF], nibbles[:, HALF:] << 4, out=codes)

    def _read_levels(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        levels = torch.tensor(LEVELS, device=codes.device)
        out[:, :HALF] = levels[(codes & 15).int()]
        out[:, HALF:] = levels[(codes >> 4).int()]

    def _are_codes_valid(self, codes: torch.Tensor) -> bool:
        """Whether no code is a negative zero, which `encode` never writes."""
        return not bool((((codes & 0x0F) == 0x08) | ((codes & 0xF0) == 0x80)).any())


# --- bf16 and fp32 --------------------------------------------------------------------------------
class PlainCodec(Codec):
    """The values themselves in `dtype`, little-endian, rounded to nearest, ties to even."""

    dtype: ClassVar[torch.dtype]

    def __init_subclass__(cls) -> None:
        cls.planes = (BLOCK * cls.dtype.itemsize,)

    def _encode(self, x_P: torch.Tensor, codes: torch.Tensor) -> None:
        out = codes.view(self.dtype)
        for start, end in _tiles(x_P):
            tile = out[start:end]
            tile.copy_(x_P[start:end])
            if not _in_range(tile):
                raise ValueError(NOT_FINITE)

    def _decode(self, codes: torch.Tensor, start: int, out: torch.Tensor) -> None:
        out.copy_(codes.view(self.dtype)[start : start + out.numel()])

    def _are_valid(self, codes: torch.Tensor) -> bool:
        return all(_in_range(tile) for tile in codes.view(self.dtype).split(TILE))


def _in_range(values: torch.Tensor) -> bool:
    return bool((values.abs() <= LARGEST_MAGNITUDE).all())


class Bf16Codec(PlainCodec):
    name = "bf16"
    dtype = torch.bfloat16


class Fp32Codec(PlainCodec):
    name = "fp32"
    dtype = torch.float32
