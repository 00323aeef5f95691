"""Tensors to bytes and back, the same on every device.

    codec = get_codec("int8")
    codec.encode(theta_P, codes)        # fp32 [P] -> uint8 [code_bytes(P)]
    codec.decode(codes, theta_P)

P is a multiple of `BLOCK` everywhere: the layout pads each tensor. Coding is deterministic: equal
input gives equal codes on every machine, because both ends of an exchange compute with the decoded
values of the same bytes.
"""

from collections.abc import Callable

from .base import BLOCK, MAIN_MEMORY, TILE, Codec
from .buffers import CodeBuffer, codes_as_tensor
from .four_bit import E3m0Codec, Int4Codec
from .int8 import Int8Codec
from .plain import Bf16Codec, Fp32Codec

__all__ = ["BLOCK", "MAIN_MEMORY", "TILE", "CodeBuffer", "Codec", "codes_as_tensor", "get_codec"]

_CODECS: dict[str, Callable[[int], Codec]] = {
    "bf16": lambda _: Bf16Codec(),
    "e3m0": E3m0Codec,
    "fp32": lambda _: Fp32Codec(),
    "int4": Int4Codec,
    "int8": Int8Codec,
}


def get_codec(name: str, *, part_of: int = 0) -> Codec:
    """A codec by its name: `int8`, `bf16` or `fp32`, and for outer gradients `e3m0` or `int4`.

    A codec owns scratch memory: use one per thread.

    Args:
        name: of the codec.
        part_of: values of the vector whose parts it will code, if it codes no vector as a whole.

    Raises:
        ValueError: no such codec; the message lists those there are.
    """
    if name not in _CODECS:
        raise ValueError(f"unknown codec {name!r}: use one of {', '.join(sorted(_CODECS))}")
    return _CODECS[name](part_of)
