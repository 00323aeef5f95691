"""The int8 code in torch's operations, tile by tile: on every device, and what the others equal."""

from typing import Final

import torch

from .base import BLOCK, LARGEST_MAGNITUDE, TILE

LARGEST_CODE: Final = 127
SMALLEST_SCALE: Final = 2.0**-126
NOT_FINITE: Final = "not finite: the vector holds a NaN or a value beyond 2**120"
_CUDA_TILE: Final = 64 * TILE
_LOW_HALF: Final = 0xFFFF


class PlainLoops:
    """Holds scratch memory for one tile: use one per thread."""

    def __init__(self) -> None:
        self._scratch: _Scratch | None = None

    def encode(self, x_P: torch.Tensor, codes_P: torch.Tensor, scales: torch.Tensor) -> None:
        """Write int8 codes [P] and bf16 scales [P / 128]. Raises ValueError if not finite."""
        scratch = self._scratch_on(x_P.device)
        for start in range(0, x_P.numel(), scratch.tile):
            stop = min(start + scratch.tile, x_P.numel())
            _encode_tile(
                x_P[start:stop].view(-1, BLOCK),
                codes_P[start:stop].view(-1, BLOCK),
                scales[start // BLOCK : stop // BLOCK],
                scratch,
            )

    def decode(
        self, codes_P: torch.Tensor, scales: torch.Tensor, start: int, out: torch.Tensor
    ) -> None:
        """Write the values from `start` on into `out`."""
        stop, tile_values = start + out.numel(), _tile_on(out.device)
        for at in range(start, stop, tile_values):
            end = min(at + tile_values, stop)
            tile = out[at - start : end - start].view(-1, BLOCK)
            tile.copy_(codes_P[at:end].view(-1, BLOCK))
            tile.mul_(scales[at // BLOCK : end // BLOCK].to(torch.float32).unsqueeze(1))

    def are_valid(self, codes_P: torch.Tensor, scales: torch.Tensor) -> bool:
        """Whether the codes and scales are what `encode` can write."""
        return _scales_valid(scales) and _codes_valid(codes_P)

    def _scratch_on(self, device: torch.device) -> "_Scratch":
        if self._scratch is None or self._scratch.tile_P.device != device:
            self._scratch = _Scratch(device)
        return self._scratch


class _Scratch:
    """Memory for one tile of encoding, allocated once."""

    def __init__(self, device: torch.device) -> None:
        self.tile = _tile_on(device)
        self.tile_P = torch.empty(self.tile, dtype=torch.float32, device=device).view(-1, BLOCK)
        self.divisors = torch.full((self.tile // BLOCK,), float(LARGEST_CODE), device=device)


def _tile_on(device: torch.device) -> int:
    return _CUDA_TILE if device.type == "cuda" else TILE


def _encode_tile(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: _Scratch
) -> None:
    """Encode x [blocks, 128] into int8 `codes` of the same shape and bf16 `scales` [blocks]."""
    blocks = x.shape[0]
    work = scratch.tile_P[:blocks]
    torch.abs(x, out=work)
    absmax = torch.amax(work, dim=1)
    if not bool((absmax <= LARGEST_MAGNITUDE).all()):
        raise ValueError(NOT_FINITE)
    scale = _rounded_up(absmax.div_(scratch.divisors[:blocks]))
    scales.copy_(scale)
    torch.div(x, scale.masked_fill_(scale == 0, 1.0).unsqueeze(1), out=work)
    codes.copy_(work.round_())


def _rounded_up(scale: torch.Tensor) -> torch.Tensor:
    """`scale` (fp32, not negative) rounded up in place to bf16; too small ones become 0."""
    scale.masked_fill_(scale < SMALLEST_SCALE, 0.0)
    scale.view(torch.int32).add_(_LOW_HALF).bitwise_and_(~_LOW_HALF)
    return scale


def _scales_valid(scales: torch.Tensor) -> bool:
    """Whether each scale is +0, or normal and small enough."""
    if not scales.numel():
        return True
    bits = scales.view(torch.int16)
    normal = (scales >= SMALLEST_SCALE) & (scales <= LARGEST_MAGNITUDE / (LARGEST_CODE - 1))
    return bool((normal | (bits == 0)).all())


def _codes_valid(codes_P: torch.Tensor) -> bool:
    """Whether no code is -128, which `encode` never writes."""
    return all(int(tile.min()) >= -LARGEST_CODE for tile in codes_P.split(TILE) if tile.numel())
