"""Codes of a vector that is coded in pieces, one after another, as fragments are in chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from peer.codec import Codec


@dataclass(frozen=True, slots=True)
class Pieces:
    """How a vector is coded.

    Attributes:
        sizes: of the pieces, in values.
    """

    codec: Codec
    sizes: Sequence[int]

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of all."""
        return sum(map(self.codec.code_bytes, self.sizes))

    def encoded(self, values: torch.Tensor) -> torch.Tensor:
        """The codes of these values.

        Raises:
            ValueError: they are not finite.
        """
        codes = torch.empty(self.code_bytes, dtype=torch.uint8)
        for of_values, of_codes in self._places():
            self.codec.encode(values[of_values], codes[of_codes])
        return codes

    def decoded(self, codes: torch.Tensor) -> torch.Tensor:
        """The values of these codes."""
        values = torch.empty(sum(self.sizes))
        for of_values, of_codes in self._places():
            self.codec.decode(codes[of_codes], values[of_values])
        return values

    def are_valid(self, codes: torch.Tensor) -> bool:
        """Whether all pieces are."""
        return all(self.codec.validate(codes[of_codes]) for _, of_codes in self._places())

    def _places(self) -> Iterator[tuple[slice, slice]]:
        value = code = 0
        for size in self.sizes:
            end = code + self.codec.code_bytes(size)
            yield slice(value, value + size), slice(code, end)
            value, code = value + size, end


def view_of(codes: torch.Tensor) -> memoryview:
    """The memory of codes."""
    view: memoryview = codes.numpy().data
    return view
