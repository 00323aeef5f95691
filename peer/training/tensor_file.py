"""Files of vectors, fp32 there, in the layout of safetensors.

They are written here, a tile at a time: the library's writer would first copy all vectors. They are
read with the library, a tile at a time.

    8 bytes     length of the header, little-endian
    header      JSON: name -> dtype, shape, place; and `__metadata__`; spaces up to a multiple of 8
    vectors     fp32, little-endian, one after another

Source: https://github.com/huggingface/safetensors (the format).

A trainer keeps its fast weights and the optimizer's moments in such a file, for a checkpoint.
Training stands still for the copy alone: digest and sync are the daemon's business
(peer/state/checkpoints.py).

    fast                        theta, [P]; without it there is nothing else, and training goes on
                                from the slow weights: the trainer did not keep it in time
    exp_avg.N, exp_avg_sq.N     AdamW's moments of the optimizer's N-th vector; none before its
                                first step
    momentum_buffer.N           Muon's, where the N-th is one of its matrices
    own_steps                   of the optimizer: for the schedule's warm-up
    moment_steps                steps that the moments have seen
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from safetensors import SafetensorError, safe_open

from peer.runtime.files import private

if TYPE_CHECKING:  # those who read files need none
    from .optimizer import FlatOptimizer

TILE: Final = 1 << 22
"""Values that are copied at once; `on_tile` is called after each tile."""
_LENGTH_BYTES: Final = 8


class FileUnusable(ValueError):
    """A file cannot be taken over."""


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    on_tile: Callable[[], None] = lambda: None,
) -> None:
    """Write vectors of fp32 or bf16, on any device. Raises OSError."""
    with open(path, "wb", opener=private) as file:
        file.write(_header(tensors, metadata))
        for tensor in tensors.values():
            for tile in tensor.detach().reshape(-1).split(TILE):
                file.write(tile.cpu().float().numpy().data)
                on_tile()


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    places: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{name} is {tensor.dtype}; only fp32 is kept, and bf16 as that")
        stop = start + tensor.numel() * torch.float32.itemsize
        shape = list(tensor.shape)
        places[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(places).encode()
    text = text.ljust(-(-len(text) // _LENGTH_BYTES) * _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class TensorFile:
    """A file that `write_tensors` wrote, for reading."""

    def __init__(self, path: Path, on_tile: Callable[[], None] = lambda: None) -> None:
        """Raises FileUnusable when it is not such a file."""
        self._path = path
        self._on_tile = on_tile
        try:
            with safe_open(path, "pt") as file:
                self.metadata: dict[str, str] = file.metadata() or {}
                self.names = frozenset(file.keys())
        except (OSError, SafetensorError) as error:
            raise FileUnusable(f"{path.name} cannot be read: {error}") from error

    def number(self, name: str) -> int:
        """A whole number of the metadata. Raises FileUnusable."""
        text = self.metadata.get(name, "")
        if not text.isdecimal():
            raise FileUnusable(f"{name} in {self._path.name} is {text!r}, no whole number")
        return int(text)

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Fill a vector, on any device. Raises FileUnusable: none there is of this shape."""
        if name not in self.names:
            raise FileUnusable(f"{self._path.name} has no {name}")
        with safe_open(self._path, "pt") as file:
            kept = file.get_slice(name)
            if kept.get_shape() != list(tensor.shape) or kept.get_dtype() != "F32":
                raise FileUnusable(
                    f"{name} in {self._path.name} is {kept.get_dtype()} {kept.get_shape()},"
                    f" expected F32 {list(tensor.shape)}"
                )
            for start in range(0, tensor.numel(), TILE):
                tensor[start : start + TILE] = kept[start : start + TILE]
                self._on_tile()

    def check_finite(self) -> None:
        """Raises FileUnusable where a value of a vector is not finite."""
        with safe_open(self._path, "pt") as file:
            for name in sorted(self.names):
                kept = file.get_slice(name)
                for start in range(0, kept.get_shape()[0], TILE):
                    if not kept[start : start + TILE].isfinite().all():
                        raise FileUnusable(
                            f"{name} in {self._path.name} holds values that are not finite"
                        )


FAST: Final = "fast"
OWN_STEPS: Final = "own_steps"
MOMENT_STEPS: Final = "moment_steps"


def keep_weights(
    path: Path,
    theta_P: torch.Tensor,
    optimizer: "FlatOptimizer | None",
    own_steps: int,
    on_tile: Callable[[], None] = lambda: None,
) -> None:
    """Write fast weights and moments. Raises OSError; the file at `path` is then worthless."""
    moments = {} if optimizer is None else optimizer.moments()
    num_steps = 0 if optimizer is None else optimizer.num_steps
    metadata = {OWN_STEPS: str(own_steps), MOMENT_STEPS: str(num_steps)}
    write_tensors(path, {FAST: theta_P, **moments}, metadata, on_tile)


def keep_nothing(path: Path) -> None:
    """Write a file of no weights, for a trainer that goes on from the slow ones. Raises OSError."""
    write_tensors(path, {}, {OWN_STEPS: "0", MOMENT_STEPS: "0"})


def take_over_weights(
    path: Path,
    theta_P: torch.Tensor,
    optimizer: "FlatOptimizer | None",
    on_tile: Callable[[], None] = lambda: None,
) -> int:
    """Go on from what was kept; returns the own steps. Raises FileUnusable."""
    kept = TensorFile(path, on_tile)
    if FAST in kept.names:
        kept.read_into(FAST, theta_P)
    num_steps = kept.number(MOMENT_STEPS)
    if optimizer is not None and num_steps:
        optimizer.take_over(num_steps, kept.read_into)
    return kept.number(OWN_STEPS)
