"""Tensors to bytes and back, the same on every device.

    codec = get_codec("int8")
    codec.encode(theta_P, codes)        # fp32 [P] -> uint8 [code_bytes(P)]
    codec.decode(codes, theta_P)

P is a multiple of `BLOCK`: the layout pads each tensor. Equal input gives equal codes on every
machine, because both ends of an exchange compute with the decoded values of the same bytes.
"""

from importlib import import_module

from protocol.run.ways import CODECS

from .base import BLOCK, MAIN_MEMORY, TILE, CodeBuffer, Codec, codes_as_tensor, codes_on

__all__ = [
    "BLOCK",
    "MAIN_MEMORY",
    "TILE",
    "CodeBuffer",
    "Codec",
    "codes_as_tensor",
    "codes_on",
    "get_codec",
]


def get_codec(name: str, *, part_of: int = 0) -> Codec:
    """The codec of this name (protocol/run/ways.py); one per thread. Raises ValueError: none.

    Args:
        part_of: values of the vector whose parts it will code, if it codes no vector as a whole.
    """
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}: use one of {', '.join(CODECS)}")
    module, _, kind = CODECS[name].made_by.partition(":")
    codec: Codec = getattr(import_module(module), kind)(part_of)
    return codec
