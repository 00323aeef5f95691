"""Codes of blocks in torch's operations, tile by tile: on every device, what the others equal."""

from abc import ABC, abstractmethod
from typing import Final

import torch

from .base import BLOCK, LARGEST_MAGNITUDE, NOT_FINITE, TILE
from .blocks import BlockFormat

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
