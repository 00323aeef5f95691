"""The int8 code as Triton kernels, for CUDA: one pass over memory each.

Triton comes with torch's CUDA build. Each program takes `BLOCKS_PER_PROGRAM` blocks. The operations
are those of `Int8Codec` in their order, each correctly rounded: `div_rn`, since Triton's
`/` is only nearly so, and rounding to an integer by adding 1.5 * 2**23 (`int8_kernels`).

Importing this file needs Triton; go through `peer.codec.compiled.kernels_of`.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from .base import BLOCK, LARGEST_MAGNITUDE_BITS, NOT_FINITE

BLOCKS_PER_PROGRAM: Final = 16
# Triton reads only globals that say they never change.
_LARGEST_CODE = tl.constexpr(127.0)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_ROUNDING = tl.constexpr(1.5 * 2**23)


@triton.jit  # type: ignore[untyped-decorator]
def _encode_kernel(
    x_ptr: Any,
    codes_ptr: Any,
    scales_ptr: Any,
    largest_ptr: Any,
    num_blocks: Any,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_blocks
    at = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + at, mask=inside[:, None], other=0.0)
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    tl.atomic_max(largest_ptr, tl.max(top, axis=0))
    scale = tl.div_rn(top.to(tl.float32, bitcast=True), tl.full([ROWS], _LARGEST_CODE, tl.float32))
    half = tl.where(scale < _SMALLEST_SCALE, 0, (scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16)
    tl.store(scales_ptr + rows, half.to(tl.int16), mask=inside)
    divisor = tl.where(half == 0, 1.0, (half << 16).to(tl.float32, bitcast=True))
    quotient = tl.div_rn(x, tl.broadcast_to(divisor[:, None], [ROWS, COLUMNS]))
    codes = (quotient + _ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)
    tl.store(codes_ptr + at, codes, mask=inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(
    codes_ptr: Any,
    scales_ptr: Any,
    out_ptr: Any,
    num_blocks: Any,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_blocks
    at = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    half = tl.load(scales_ptr + rows, mask=inside, other=0).to(tl.int32)
    codes = tl.load(codes_ptr + at, mask=inside[:, None], other=0)
    scale = (half << 16).to(tl.float32, bitcast=True)
    tl.store(out_ptr + at, codes.to(tl.float32) * scale[:, None], mask=inside[:, None])


def encode_blocks(x_P: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write codes and scales, as `BlockLoops` has it."""
    largest = torch.zeros(1, dtype=torch.int32, device=x_P.device)
    bits = scales.view(torch.int16)
    _launch(_encode_kernel, scales.numel(), x_P.detach(), codes, bits, largest)
    if int(largest) > LARGEST_MAGNITUDE_BITS:
        raise ValueError(NOT_FINITE)


def decode_blocks(codes: torch.Tensor, scales: torch.Tensor, start: int, out: torch.Tensor) -> None:
    """Write the values from `start` on, as `BlockLoops` has it."""
    bits = scales.view(torch.int16)[start // BLOCK :]
    _launch(_decode_kernel, out.numel() // BLOCK, codes[start:], bits, out.detach())


def _launch(kernel: Any, num_blocks: int, *tensors: torch.Tensor) -> None:
    if num_blocks:
        programs = triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM)
        kernel[(programs,)](*tensors, num_blocks, ROWS=BLOCKS_PER_PROGRAM, COLUMNS=BLOCK)
