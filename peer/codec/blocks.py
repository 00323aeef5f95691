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

Ways to the same bytes: torch's operations (`TiledLoops`), which say what a code is, compiled
loops for long vectors in main memory (`CompiledLoops`), and on CUDA what a code brings along.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, Final, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from protocol.run.ways import CODECS

from .base import (
    BLOCK,
    LARGEST_MAGNITUDE,
    LARGEST_MAGNITUDE_BITS,
    NOT_FINITE,
    TILE,
    Codec,
    FusedLoops,
)
from .compiled import in_chunks, is_aligned, is_long, kernels_of, plain_because

# --- through compiled loops, shared out among threads (compiled.py) -------------------------------


class CompiledLoops:
    """Compiled loops for tensors in main memory; their bytes are those of `TiledLoops`.

    Args:
        kernels: the module of a code's loops over blocks (int8_kernels.py).
    """

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels

    def encode(self, x_P: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write codes and scales. Raises ValueError if not finite."""
        x = x_P.detach().numpy()
        arrays = x, x.view(np.int32), codes.numpy(), scale_bits(scales)
        largest = in_chunks(
            lambda first, last: self._kernels.encode_blocks(*arrays, first, last), scales.numel()
        )
        if max(largest, default=0) > LARGEST_MAGNITUDE_BITS:
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


# --- the form, and the codec ----------------------------------------------------------------------

_SCALE_BYTES: Final = 2


class BlockLoops(Protocol):
    """Loops over blocks, in one of the ways; the caller has checked lengths and types."""

    def encode(self, x_P: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None: ...

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, start: int, out: torch.Tensor
    ) -> None: ...

    def are_valid(self, codes: torch.Tensor, scales: torch.Tensor) -> bool: ...


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The numbers of a code.

    Attributes:
        code_bytes: of a block, without its scale.
        code_type: of the elements that codes are made of.
        largest_level: what the largest magnitude of a block is coded as, in scales.
        smallest_scale: below it a scale becomes 0.
        largest_scale: above it a scale is refused.
    """

    code_bytes: int
    code_type: torch.dtype
    largest_level: float
    smallest_scale: float
    largest_scale: float

    def split(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes of all blocks and their bf16 scales [P / 128] inside `codes`, as views."""
        scales_from = codes.numel() // (self.code_bytes + _SCALE_BYTES) * self.code_bytes
        return codes[:scales_from].view(self.code_type), codes[scales_from:].view(torch.bfloat16)


class BlockCodec(Codec):
    """A codec of blocks with scales.

    Args:
        plain: torch's operations.

    Attributes:
        kernels_module: full name of the module of compiled loops.
        triton_module: of that with loops for CUDA, if there is one.
    """

    format: ClassVar[BlockFormat]
    kernels_module: ClassVar[str]
    triton_module: ClassVar[str | None] = None

    def __init_subclass__(cls) -> None:
        cls.planes = cls.format.code_bytes, _SCALE_BYTES

    def __init__(self, plain: BlockLoops, part_of: int = 0) -> None:
        super().__init__(part_of)
        self._plain = plain

    def _encode(self, x_P: torch.Tensor, codes: torch.Tensor) -> None:
        block_codes, scales = self.format.split(codes)
        self._loops(block_codes, scales, x_P).encode(x_P, block_codes, scales)

    def _decode(self, codes: torch.Tensor, start: int, out: torch.Tensor) -> None:
        block_codes, scales = self.format.split(codes)
        self._loops(block_codes, scales, out).decode(block_codes, scales, start, out)

    def _are_valid(self, codes: torch.Tensor) -> bool:
        block_codes, scales = self.format.split(codes)
        return self._loops(block_codes, scales).are_valid(block_codes, scales)

    def is_compiled_for(self, num_values: int, *tensors: torch.Tensor) -> bool:
        """Whether compiled loops are worth it for a vector, and can reach these tensors of it."""
        in_main_memory = all(tensor.device.type == "cpu" for tensor in tensors)
        long = is_long(num_values, tensors[0].device, self._part_of)
        return long and in_main_memory and is_aligned(*tensors)

    def loops_for(self, num_values: int, device: torch.device) -> str:
        """What codes a vector of so many values there, as `Codec` has it."""
        if device.type == "cuda" and self.triton_module is not None:
            return "triton" if self._cuda_loops() else plain_because(self.triton_module)
        if is_long(num_values, device, self._part_of):
            return "compiled" if self._kernels() else plain_because(self.kernels_module)
        return "plain"

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
        parts = [self.format.split(codes) for codes in all_codes]
        num_values = self.num_values(all_codes[0].numel())
        if not self.is_compiled_for(num_values, *vectors, *(scales for _, scales in parts)):
            return None
        kernels, block = kernels_of(module), start // BLOCK
        if kernels is None:
            return None
        first = block * self.format.code_bytes // self.format.code_type.itemsize
        arrays = ((codes[first:].numpy(), scale_bits(scales[block:])) for codes, scales in parts)
        return FusedLoops(kernels, tuple(arrays))

    def _kernels(self) -> ModuleType | None:
        """Compiled loops; None where numba does not work."""
        return kernels_of(self.kernels_module)

    def _cuda_loops(self) -> BlockLoops | None:
        """Loops made for CUDA; None for torch's operations."""
        triton = None if self.triton_module is None else kernels_of(self.triton_module)
        return None if triton is None else cast("BlockLoops", triton.TritonLoops())

    def _loops(
        self, codes: torch.Tensor, scales: torch.Tensor, *values: torch.Tensor
    ) -> BlockLoops:
        """The fastest way for these tensors."""
        if codes.is_cuda:
            return self._cuda_loops() or self._plain
        if self.is_compiled_for(scales.numel() * BLOCK, scales, *values):
            kernels = self._kernels()
            return CompiledLoops(kernels) if kernels else self._plain
        return self._plain


# --- in torch's operations, tile by tile: on every device, what the others equal ------------------

_CUDA_TILE: Final = 64 * TILE
_LOW_HALF: Final = 0xFFFF


class TiledLoops(ABC):
    """Scales, and the walk over tiles. Holds scratch memory for one tile: use one per thread."""

    def __init__(self, block_format: BlockFormat) -> None:
        self._format = block_format
        self._scratch: _Scratch | None = None

    def encode(self, x_P: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the codes of all blocks, and their scales. Raises ValueError if not finite."""
        scratch = self._scratch_on(x_P.device)
        for start in range(0, x_P.numel(), scratch.tile):
            stop = min(start + scratch.tile, x_P.numel())
            self._encode_tile(
                x_P[start:stop].view(-1, BLOCK),
                self._rows(codes, start, stop),
                scales[start // BLOCK : stop // BLOCK],
                scratch,
            )

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, start: int, out: torch.Tensor
    ) -> None:
        """Write the values from `start` on into `out`."""
        stop, tile_values = start + out.numel(), _tile_on(out.device)
        for at in range(start, stop, tile_values):
            end = min(at + tile_values, stop)
            tile = out[at - start : end - start].view(-1, BLOCK)
            self._read_levels(self._rows(codes, at, end), tile)
            tile.mul_(scales[at // BLOCK : end // BLOCK].to(torch.float32).unsqueeze(1))

    def are_valid(self, codes: torch.Tensor, scales: torch.Tensor) -> bool:
        """Whether the codes and scales are what `encode` can write."""
        return self._scales_valid(scales) and all(
            self._codes_valid(tile) for tile in codes.split(TILE) if tile.numel()
        )

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
    def _codes_valid(self, codes: torch.Tensor) -> bool:
        """Whether `encode` can write each of these codes."""

    def _rows(self, codes: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        width = self._format.code_bytes
        return codes[start // BLOCK * width : stop // BLOCK * width].view(-1, width)

    def _encode_tile(
        self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: "_Scratch"
    ) -> None:
        blocks = x.shape[0]
        work = scratch.tile_P[:blocks]
        torch.abs(x, out=work)
        absmax = torch.amax(work, dim=1)
        if not bool((absmax <= LARGEST_MAGNITUDE).all()):
            raise ValueError(NOT_FINITE)
        scale = self._rounded_up(absmax.div_(scratch.divisors[:blocks]))
        scales.copy_(scale)
        self._write_codes(x, scale.masked_fill_(scale == 0, 1.0).unsqueeze(1), work, codes)

    def _rounded_up(self, scale: torch.Tensor) -> torch.Tensor:
        """`scale` (fp32, not negative) rounded up in place to bf16; too small ones become 0."""
        scale.masked_fill_(scale < self._format.smallest_scale, 0.0)
        scale.view(torch.int32).add_(_LOW_HALF).bitwise_and_(~_LOW_HALF)
        return scale

    def _scales_valid(self, scales: torch.Tensor) -> bool:
        """Whether each scale is +0, or large and small enough."""
        if not scales.numel():
            return True
        bits = scales.view(torch.int16)
        smallest, largest = self._format.smallest_scale, self._format.largest_scale
        within = (scales >= smallest) & (scales <= largest)
        return bool((within | (bits == 0)).all())

    def _scratch_on(self, device: torch.device) -> "_Scratch":
        if self._scratch is None or self._scratch.tile_P.device != device:
            self._scratch = _Scratch(device, self._format.largest_level)
        return self._scratch


class _Scratch:
    """Memory for one tile of encoding, allocated once."""

    def __init__(self, device: torch.device, largest_level: float) -> None:
        self.tile = _tile_on(device)
        self.tile_P = torch.empty(self.tile, dtype=torch.float32, device=device).view(-1, BLOCK)
        self.divisors = torch.full((self.tile // BLOCK,), largest_level, device=device)


def _tile_on(device: torch.device) -> int:
    return _CUDA_TILE if device.type == "cuda" else TILE
