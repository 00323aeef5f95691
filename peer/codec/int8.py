"""int8 with one bf16 scale per block of 128 values: 1.0156 bytes per value.

Codes of P values: P int8 codes, then P / 128 scales. For a block with largest magnitude m:

    scale = m / 127, rounded up to bf16          (0 when that is below 2**-126)
    code  = round_half_even(x / scale)           in -127 .. 127
    value = code * scale                         exact in fp32: 7 bits times 8 bits

Rules:

- The scale is rounded *before* values are divided by it, and upwards, so no code passes 127 and
  nothing is clipped: |value - x| <= scale / 2, at most m / 127 (m / 252 but for the last bits).
- bf16 has fp32's range, so small blocks keep their precision (fp16 scales would underflow below m =
  7.6e-6). A block whose scale would be subnormal (m < 1.5e-36) becomes zeros, because devices
  disagree about subnormals.
- A value that is not finite, or beyond `LARGEST_MAGNITUDE`, is refused.
- Each operation is one correctly rounded IEEE operation, so CPU and CUDA give equal bytes. Division
  by 127 takes a tensor as divisor: CUDA multiplies by the reciprocal of a scalar one.

A block is coded to itself again if its largest code is 127. Where rounding up left 126, the scale
shrinks by one bf16 step on the second coding, and the values move by at most half the scale again.
"""

from typing import ClassVar, Final

import torch

from .base import BLOCK, LARGEST_MAGNITUDE, TILE, check_codes, check_range, check_values

LARGEST_CODE: Final = 127
SMALLEST_SCALE: Final = 2.0**-126
_SCALE_BYTES: Final = 2
_CUDA_TILE: Final = 64 * TILE
_LOW_HALF: Final = 0xFFFF


class Int8Codec:
    """See the theory above. Holds scratch memory for one tile: use one codec per thread."""

    name: ClassVar[str] = "int8"

    def __init__(self) -> None:
        self._scratch: _Scratch | None = None

    def __repr__(self) -> str:
        return f"Int8Codec(block={BLOCK})"

    def code_bytes(self, num_values: int) -> int:
        """Bytes of the codes of `num_values` values."""
        return num_values + num_values // BLOCK * _SCALE_BYTES

    def encode(self, x_P: torch.Tensor, out_codes: torch.Tensor) -> None:
        """Write the codes of `x_P` (fp32 [P]). Raises ValueError if a value is not finite."""
        num_values = check_values(x_P, "x_P")
        check_codes(out_codes, self.code_bytes(num_values))
        codes, scales = _split(out_codes)
        scratch = self._scratch_on(x_P.device)
        for start in range(0, num_values, scratch.tile):
            stop = min(start + scratch.tile, num_values)
            _encode_tile(
                x_P[start:stop].view(-1, BLOCK),
                codes[start:stop].view(-1, BLOCK),
                scales[start // BLOCK : stop // BLOCK],
                scratch,
            )

    def decode(self, codes: torch.Tensor, out_P: torch.Tensor) -> None:
        """Write the values of `codes` into `out_P` (fp32 [P])."""
        self.decode_range(codes, 0, check_values(out_P, "out_P"), out_P)

    def decode_range(self, codes: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
        """Write the values start .. stop - 1 into `out` (fp32 [stop - start])."""
        num_values = _num_values(codes.numel())
        check_codes(codes, self.code_bytes(num_values))
        check_range(start, stop, num_values, out)
        values, scales = _split(codes)
        for at in range(start, stop, TILE):
            end = min(at + TILE, stop)
            tile = out[at - start : end - start].view(-1, BLOCK)
            tile.copy_(values[at:end].view(-1, BLOCK))
            tile.mul_(scales[at // BLOCK : end // BLOCK].to(torch.float32).unsqueeze(1))

    def validate(self, codes: torch.Tensor) -> bool:
        """Whether length, codes and scales are what `encode` can write, so finite."""
        if codes.dtype != torch.uint8 or codes.dim() != 1 or not codes.is_contiguous():
            return False
        if codes.numel() != self.code_bytes(_num_values(codes.numel())):
            return False
        values, scales = _split(codes)
        return _scales_valid(scales) and _codes_valid(values)

    def _scratch_on(self, device: torch.device) -> "_Scratch":
        if self._scratch is None or self._scratch.tile_P.device != device:
            self._scratch = _Scratch(device)
        return self._scratch


class _Scratch:
    """Memory for one tile of encoding, allocated once."""

    def __init__(self, device: torch.device) -> None:
        self.tile = _CUDA_TILE if device.type == "cuda" else TILE
        self.tile_P = torch.empty(self.tile, dtype=torch.float32, device=device).view(-1, BLOCK)
        self.divisors = torch.full((self.tile // BLOCK,), float(LARGEST_CODE), device=device)


def _encode_tile(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: _Scratch
) -> None:
    """Encode x [blocks, 128] into int8 `codes` of the same shape and bf16 `scales` [blocks]."""
    blocks = x.shape[0]
    work = scratch.tile_P[:blocks]
    torch.abs(x, out=work)
    absmax = torch.amax(work, dim=1)
    if not bool((absmax <= LARGEST_MAGNITUDE).all()):
        raise ValueError("not finite: the vector holds a NaN or a value beyond 2**120")
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


def _codes_valid(values: torch.Tensor) -> bool:
    """Whether no code is -128, which `encode` never writes."""
    return all(int(tile.min()) >= -LARGEST_CODE for tile in values.split(TILE) if tile.numel())


def _num_values(code_bytes: int) -> int:
    return code_bytes // (BLOCK + _SCALE_BYTES) * BLOCK


def _split(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The int8 codes [P] and bf16 scales [P / 128] inside `codes`, as views."""
    num_values = _num_values(codes.numel())
    return codes[:num_values].view(torch.int8), codes[num_values:].view(torch.bfloat16)
