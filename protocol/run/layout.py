"""The order of the flat vector: which parameter lies where.

Idea: averaging, coding and state transfer know one thing, a vector of fp32 values. Two peers may
add their vectors only if every position means the same parameter to both, so the order is a pure
function of names and shapes, and its digest goes into every proposal.

Rules:
    1. Parameters stand in sorted order of their names; tied tensors once, under the first of their
       names.
    2. Each tensor is padded with zeros to a multiple of `ALIGNMENT` values, so that no block of a
       code (peer/codec) mixes two tensors.
    3. The digest covers names and shapes, in that order. It does not cover values.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import blake3
import msgpack

ALIGNMENT: Final = 128
"""Values; the granularity of every codec divides it (codecs.py)."""


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """One tensor: values [offset, offset + size) of the flat vector, followed by padding."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Values without padding."""
        return math.prod(self.shape)

    @property
    def padded_size(self) -> int:
        """Values with padding."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat vector's table of contents, sorted by name."""

    entries: tuple[LayoutEntry, ...]

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]]) -> "Layout":
        """Lay out these tensors.

        Raises:
            ValueError: no tensor, or one without values.
        """
        entries = []
        offset = 0
        for name in sorted(shapes):
            entry = LayoutEntry(name, tuple(int(size) for size in shapes[name]), offset)
            if entry.size < 1:
                raise ValueError(f"parameter {name!r} of shape {entry.shape} has no values")
            entries.append(entry)
            offset += entry.padded_size
        if not entries:
            raise ValueError("a model without parameters has no layout")
        return cls(tuple(entries))

    @property
    def parameters(self) -> int:
        """Values of all tensors, without padding."""
        return sum(entry.size for entry in self.entries)

    @property
    def padded_parameters(self) -> int:
        """P: length of the flat vector."""
        last = self.entries[-1]
        return last.offset + last.padded_size

    @property
    def digest(self) -> str:
        """Digest of names and shapes: 32 hex digits."""
        table = [[entry.name, list(entry.shape)] for entry in self.entries]
        return blake3.blake3(msgpack.packb(table)).hexdigest(length=16)
