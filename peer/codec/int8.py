"""int8 with one bf16 scale per block of 128 values: 1.0156 bytes per value.

A code of blocks (`peer.codec.blocks`). For a block with largest magnitude m:

    scale = m / 127, rounded up to bf16          (0 when that is below 2**-126)
    code  = round_half_even(x / scale)           in -127 .. 127
    value = code * scale                         exact in fp32: 7 bits times 8 bits

So |value - x| <= scale / 2, at most m / 127 (m / 252 but for the last bits). (fp16 scales would
underflow below m = 7.6e-6; these do below m = 1.5e-36.)

Three ways lead to the same bytes: torch's operations (`int8_plain`), which say what the code is;
compiled loops for long vectors in main memory (`int8_kernels`); Triton on CUDA (`int8_cuda`).

A block is coded to itself again if its largest code is 127. Where rounding up left 126, the scale
shrinks by one bf16 step on the second coding, and the values move by at most half the scale again.
"""

from typing import ClassVar, cast

from .blocks import BlockCodec, BlockFormat, BlockLoops
from .compiled import kernels_of
from .int8_plain import INT8_FORMAT, PlainLoops


class Int8Codec(BlockCodec):
    """The int8 codec; see the theory above."""

    name: ClassVar[str] = "int8"
    format: ClassVar[BlockFormat] = INT8_FORMAT
    kernels_module: ClassVar[str] = "peer.codec.int8_kernels"
    triton_module: ClassVar[str | None] = "peer.codec.int8_cuda"

    def __init__(self, part_of: int = 0) -> None:
        super().__init__(PlainLoops(), part_of)

    def _cuda_loops(self) -> BlockLoops | None:
        assert self.triton_module is not None
        triton = kernels_of(self.triton_module)
        return cast("BlockLoops", triton.TritonLoops()) if triton else None


class Int8DiffCodec(Int8Codec):
    """The same codes; pairs send them as differences (`peer.codec.differences`)."""

    name: ClassVar[str] = "int8-diff"
