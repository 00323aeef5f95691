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

Three ways lead to the same bytes: torch's operations (`int8_plain`), which say what the code is;
compiled loops for long vectors in main memory (`int8_compiled`); Triton on CUDA (`int8_cuda`).

A block is coded to itself again if its largest code is 127. Where rounding up left 126, the scale
shrinks by one bf16 step on the second coding, and the values move by at most half the scale again.
"""

from typing import ClassVar, Final, Protocol

import torch

from .base import BLOCK, check_codes, check_range, check_values
from .compiled import kernels_of
from .int8_compiled import compiled_loops
from .int8_plain import PlainLoops

_SCALE_BYTES: Final = 2


class Int8Loops(Protocol):
    """One of the three ways; lengths and types are checked."""

    def encode(self, x_P: torch.Tensor, codes_P: torch.Tensor, scales: torch.Tensor) -> None: ...

    def decode(
        self, codes_P: torch.Tensor, scales: torch.Tensor, start: int, out: torch.Tensor
    ) -> None: ...

    def are_valid(self, codes_P: torch.Tensor, scales: torch.Tensor) -> bool: ...


class Int8Codec:
    """See the theory above. Holds scratch memory for one tile: use one codec per thread."""

    name: ClassVar[str] = "int8"

    def __init__(self) -> None:
        self._plain = PlainLoops()

    def __repr__(self) -> str:
        return f"Int8Codec(block={BLOCK})"

    def code_bytes(self, num_values: int) -> int:
        """Bytes of the codes of `num_values` values."""
        return num_values + num_values // BLOCK * _SCALE_BYTES

    def encode(self, x_P: torch.Tensor, out_codes: torch.Tensor) -> None:
        """Write the codes of `x_P` (fp32 [P]). Raises ValueError if a value is not finite."""
        num_values = check_values(x_P, "x_P")
        check_codes(out_codes, self.code_bytes(num_values))
        codes_P, scales = split(out_codes)
        self._loops(codes_P, scales, x_P).encode(x_P, codes_P, scales)

    def decode(self, codes: torch.Tensor, out_P: torch.Tensor) -> None:
        """Write the values of `codes` into `out_P` (fp32 [P])."""
        self.decode_range(codes, 0, check_values(out_P, "out_P"), out_P)

    def decode_range(self, codes: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
        """Write the values start .. stop - 1 into `out` (fp32 [stop - start])."""
        num_values = _num_values(codes.numel())
        check_codes(codes, self.code_bytes(num_values))
        check_range(start, stop, num_values, out)
        codes_P, scales = split(codes)
        self._loops(codes_P, scales, out).decode(codes_P, scales, start, out)

    def validate(self, codes: torch.Tensor) -> bool:
        """Whether length, codes and scales are what `encode` can write, so finite."""
        if codes.dtype != torch.uint8 or codes.dim() != 1 or not codes.is_contiguous():
            return False
        if codes.numel() != self.code_bytes(_num_values(codes.numel())):
            return False
        codes_P, scales = split(codes)
        return self._loops(codes_P, scales).are_valid(codes_P, scales)

    def _loops(
        self, codes_P: torch.Tensor, scales: torch.Tensor, *values: torch.Tensor
    ) -> Int8Loops:
        """The fastest way for these tensors."""
        if codes_P.is_cuda:
            triton = kernels_of("peer.codec.int8_cuda")
            return triton.TritonLoops() if triton else self._plain
        compiled = compiled_loops(scales, *values, num_values=codes_P.numel())
        return compiled or self._plain


def split(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The int8 codes [P] and bf16 scales [P / 128] inside `codes`, as views."""
    num_values = _num_values(codes.numel())
    return codes[:num_values].view(torch.int8), codes[num_values:].view(torch.bfloat16)


def _num_values(code_bytes: int) -> int:
    return code_bytes // (BLOCK + _SCALE_BYTES) * BLOCK
