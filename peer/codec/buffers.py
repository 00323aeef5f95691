"""Bytes as tensors: without a copy, read-only memory included, and to be written by a device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

CodeBuffer = bytes | bytearray | memoryview | np.ndarray[Any, np.dtype[np.uint8]]


class _ShownWritable:
    """Read-only memory, shown to numpy as writable: torch warns otherwise, though it only reads."""

    def __init__(self, view: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.owner = view
        self.__array_interface__ = {
            **view.__array_interface__,
            "data": (view.__array_interface__["data"][0], False),
        }


def codes_as_tensor(codes: CodeBuffer) -> torch.Tensor:
    """A uint8 vector over the bytes of `codes`, which it keeps alive. Only ever read it.

    Raises:
        ValueError: the buffer is not contiguous.
    """
    if not len(codes):
        return torch.empty(0, dtype=torch.uint8)
    view = np.frombuffer(codes, dtype=np.uint8)
    if view.flags.writeable:
        return torch.from_numpy(view)
    return torch.from_numpy(np.asarray(_ShownWritable(view)))


@contextmanager
def codes_on(device: torch.device, memory: memoryview) -> Iterator[torch.Tensor]:
    """A uint8 vector on a device to write codes to; they are in `memory` when the block ends."""
    shared = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cpu":
        yield shared
        return
    codes = torch.empty_like(shared, device=device)
    yield codes
    shared.copy_(codes)
