"""Tensors to bytes and back, the same on every device.

    codec = get_codec("int8")
    codec.encode(theta_P, codes)        # fp32 [P] -> uint8 [code_bytes(P)]
    codec.decode(codes, theta_P)

P is a multiple of `BLOCK`: the layout pads each tensor. Equal input gives equal codes on every
machine, because both ends of an exchange compute with the decoded values of the same bytes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch

from protocol.fragment.leaf_tree import blocks_of_leaf, leaf_digest, num_leaves, root_of
from protocol.run.layout import ALIGNMENT
from protocol.run.ways import CODECS

BLOCK: Final = ALIGNMENT
"""Values that share one scale; every flat vector's length is a multiple of it."""
MAIN_MEMORY: Final = torch.device("cpu")
TILE: Final = 256 * 1024
"""Values worked on at once: a tile and its scratch stay in the cache."""
LARGEST_MAGNITUDE: Final = 2.0**120
"""No value beyond this is coded or accepted: sums of a few such values stay finite, so a hostile
vector cannot put an infinity into the slow weights."""
LARGEST_MAGNITUDE_BITS: Final = int(np.float32(LARGEST_MAGNITUDE).view(np.int32))
NOT_FINITE: Final = "not finite: the vector holds a NaN or a value beyond 2**120"


Array = npt.NDArray[Any]
CodeBuffer = bytes | bytearray | memoryview | np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class FusedLoops:
    """Compiled loops that take an outer step straight from codes.

    Attributes:
        kernels: the module of loops over blocks.
        codes: the arrays that the loops read, for each vector of codes.
    """

    kernels: ModuleType
    codes: tuple[tuple[Array, ...], ...]


class Codec(ABC):
    """Codes fp32 vectors of P values, P a multiple of `BLOCK`, as `code_bytes(P)` bytes.

    All tensors of one call lie on one device and are contiguous. Every method raises ValueError for
    wrong lengths, types or ranges. May hold scratch memory: use one per thread.

    Attributes:
        planes: bytes of a block in each of the arrays that codes consist of, one after another.
    """

    name: ClassVar[str]
    planes: ClassVar[tuple[int, ...]]

    def __init__(self, part_of: int = 0) -> None:
        self._part_of = part_of

    def code_bytes(self, num_values: int) -> int:
        return num_values // BLOCK * sum(self.planes)

    def num_values(self, code_bytes: int) -> int:
        """Values of codes of so many bytes, if those are whole blocks."""
        return code_bytes // sum(self.planes) * BLOCK

    def encode(self, x_P: torch.Tensor, out_codes: torch.Tensor) -> None:
        """Write the codes of `x_P` (fp32 [P]) into `out_codes` (uint8 [code_bytes(P)]).

        Raises ValueError also for a NaN or a value beyond `LARGEST_MAGNITUDE`; `out_codes` is then
        undefined.
        """
        check_codes(out_codes, self.code_bytes(check_values(x_P, "x_P")))
        self._encode(x_P, out_codes)

    def decode(self, codes: torch.Tensor, out: torch.Tensor, start: int = 0) -> None:
        """Write the values from `start` on into `out` (fp32 [n]), whole blocks."""
        num_values, stop = self.num_values(codes.numel()), start + check_values(out, "out")
        check_codes(codes, self.code_bytes(num_values))
        if start % BLOCK or not 0 <= start <= stop <= num_values:
            raise ValueError(
                f"range {start}..{stop} is not made of whole blocks of a vector of {num_values}"
            )
        self._decode(codes, start, out)

    def validate(self, codes: torch.Tensor) -> bool:
        """Whether `codes` are well formed and no value is NaN or beyond `LARGEST_MAGNITUDE`."""
        try:
            check_codes(codes, self.code_bytes(self.num_values(codes.numel())))
        except ValueError:
            return False
        return self._are_valid(codes)

    @abstractmethod
    def _encode(self, x_P: torch.Tensor, codes: torch.Tensor) -> None: ...

    @abstractmethod
    def _decode(self, codes: torch.Tensor, start: int, out: torch.Tensor) -> None: ...

    @abstractmethod
    def _are_valid(self, codes: torch.Tensor) -> bool: ...

    def loops_for(self, num_values: int, device: torch.device) -> str:
        """The loops that code so many values there: `plain` or `compiled`.

        Where compiled ones did not work, why follows: `plain: ImportError: ...`. Loads what it
        names, so it may take seconds.
        """
        return "plain"

    def fused_loops(
        self,
        way: str,
        all_codes: Sequence[torch.Tensor],
        vectors: Sequence[torch.Tensor],
        start: int = 0,
    ) -> FusedLoops | None:
        """Loops that take a way's outer step (protocol/run/ways.py) from these codes, if any fit.

        Args:
            vectors: fp32, which the loops read and write.
            start: the value of the codes that the vectors begin at.
        """
        return None


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


def check_values(x_P: torch.Tensor, label: str) -> int:
    """Return P. Raises ValueError unless `x_P` is a contiguous fp32 vector of whole blocks."""
    if x_P.dtype != torch.float32 or x_P.dim() != 1 or not x_P.is_contiguous():
        raise ValueError(f"{label} must be a contiguous fp32 vector, not {_describe(x_P)}")
    if x_P.numel() % BLOCK:
        raise ValueError(f"{label} has {x_P.numel()} values: not a multiple of {BLOCK}")
    return x_P.numel()


def check_codes(codes: torch.Tensor, expected_bytes: int) -> None:
    """Raises ValueError."""
    if codes.dtype != torch.uint8 or codes.dim() != 1 or not codes.is_contiguous():
        raise ValueError(f"codes must be a contiguous uint8 vector, not {_describe(codes)}")
    if codes.numel() != expected_bytes:
        raise ValueError(f"codes have {codes.numel()} bytes, expected {expected_bytes}")


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def decoded_tiles(
    all_codes: Sequence[torch.Tensor], codec: Codec, num_values: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the start of each tile, and its values of each vector; the next overwrites them."""
    size, device = min(TILE, num_values), all_codes[0].device
    scratch = torch.empty(len(all_codes), size, dtype=torch.float32, device=device)
    for start in range(0, num_values, TILE):
        values = scratch[:, : num_values - start]
        for codes, row in zip(all_codes, values, strict=True):
            codec.decode(codes, row, start)
        yield start, values


def root_mean_square(codes: CodeBuffer, codec: Codec, num_values: int) -> float:
    """Infinite where the sum of squares is."""
    squares = 0.0
    for _, (values,) in decoded_tiles([codes_as_tensor(codes)], codec, num_values):
        squares += float(torch.dot(values, values))
    return math.sqrt(squares / max(1, num_values))


def relative_distance(
    one: torch.Tensor, other: torch.Tensor, codec: Codec, num_values: int
) -> float:
    """Length of the difference of two coded vectors in lengths of the longer, mean over blocks."""
    summed = 0.0
    for _, both in decoded_tiles([one, other], codec, num_values):
        blocks = both.view(2, -1, BLOCK)
        longer = blocks.norm(dim=2).amax(dim=0).clamp_min(torch.finfo(torch.float32).tiny)
        summed += float(((blocks[0] - blocks[1]).norm(dim=1) / longer).sum())
    return summed * BLOCK / max(1, num_values)


class _ShownWritable:
    """Read-only memory, shown to numpy as writable: torch warns otherwise, though it only reads."""

    def __init__(self, view: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.owner = view
        self.__array_interface__ = {
            **view.__array_interface__,
            "data": (view.__array_interface__["data"][0], False),
        }


def codes_as_tensor(codes: CodeBuffer) -> torch.Tensor:
    """A uint8 vector over the bytes of `codes`, not copied; only read it. Raises ValueError."""
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


# --- leaves of a chunk's codes, and the digest of all (protocol/fragment/leaf_tree.py) ------------
# The codes of a leaf are what the codec would have made of its values alone, so they can be decoded
# and averaged by themselves.
def leaves_of_chunk(num_values: int) -> int:
    return num_leaves(num_values // BLOCK)


def values_of_leaf(num_values: int, index: int) -> int:
    """The last leaf may be shorter than others."""
    size = blocks_of_leaf(num_values // BLOCK) * BLOCK
    return min(size, num_values - index * size)


def _leaves(codec: Codec, codes: memoryview, wanted: Iterable[int]) -> list[bytes]:
    blocks, start, planes = len(codes) // sum(codec.planes), 0, []
    for block_bytes in codec.planes:
        stop = start + blocks * block_bytes
        planes.append((codes[start:stop], blocks_of_leaf(blocks) * block_bytes))
        start = stop
    return [b"".join([plane[i * n : (i + 1) * n] for plane, n in planes]) for i in wanted]


def leaf_of(codec: Codec, codes: memoryview, index: int) -> bytes:
    (leaf,) = _leaves(codec, codes, (index,))
    return leaf


def leaf_digests(codec: Codec, codes: memoryview) -> list[bytes]:
    count = leaves_of_chunk(codec.num_values(len(codes)))
    return [leaf_digest(leaf) for leaf in _leaves(codec, codes, range(count))]


def code_digest(codec: Codec, codes: memoryview) -> bytes:
    return root_of(leaf_digests(codec, codes))
