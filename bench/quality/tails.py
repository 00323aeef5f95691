"""How long the tails of outer gradients are, and in which tensors 4-bit codes err."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import torch

from peer.codec import BLOCK, get_codec
from protocol.run.layout import LayoutEntry

from .measures import mean

KINDS: Final = ("embed", "attn", "mlp", "norm")
FOUR_BIT: Final = ("e3m0", "int4")


class Tails:
    """Gathers over rounds."""

    def __init__(self, entries: Sequence[LayoutEntry]) -> None:
        self._parts = {kind: parts_of(entries, kind) for kind in KINDS}
        self._ratios: list[float] = []
        self._squares: defaultdict[tuple[str, str], float] = defaultdict(float)

    def take(self, deltas_MP: torch.Tensor) -> None:
        """One round."""
        self._ratios += [median_peak(delta_P) for delta_P in deltas_MP]
        for kind, parts in self._parts.items():
            for delta_P in deltas_MP:
                true_P = torch.cat([delta_P[part] for part in parts])
                self._squares[kind, ""] += squares(true_P)
                for name in FOUR_BIT:
                    self._squares[kind, name] += squares(coded(name, true_P) - true_P)

    def notes(self) -> list[str]:
        """Sentences for people."""
        whole = sum(self._squares[kind, ""] for kind in KINDS)
        known = ", ".join(f"{name} {median_peak(x_P):.2f}" for name, x_P in known_spreads().items())
        peak = f"{mean(self._ratios):.2f} ({known})"
        lines = [f"largest value of a block over its root mean square, median: {peak}"]
        for kind in KINDS:
            true = self._squares[kind, ""]
            errors = [
                f"{name} {(self._squares[kind, name] / true) ** 0.5:.3f}" for name in FOUR_BIT
            ]
            lines.append(f"{kind}: {true / whole:.1%} of the squares; {', '.join(errors)}")
        return lines


def parts_of(entries: Sequence[LayoutEntry], kind: str) -> list[slice]:
    """Places of the tensors of a kind, padding included; norms are no part of what they follow."""

    def is_of(name: str) -> bool:
        return kind in name and (kind == "norm" or "norm" not in name)

    return [
        slice(entry.offset, entry.offset + entry.padded_size)
        for entry in entries
        if is_of(entry.name)
    ]


def coded(name: str, x_P: torch.Tensor) -> torch.Tensor:
    """A vector after coding and decoding."""
    codec, read_P = get_codec(name), torch.empty_like(x_P)
    codes = torch.empty(codec.code_bytes(x_P.numel()), dtype=torch.uint8)
    codec.encode(x_P, codes)
    codec.decode(codes, read_P)
    return read_P


def squares(x_P: torch.Tensor) -> float:
    return float(x_P.double().square().sum())


def median_peak(x_P: torch.Tensor) -> float:
    """Median over blocks of the largest value over the block's root mean square."""
    blocks = x_P.view(-1, BLOCK)
    rms = blocks.square().mean(1).sqrt()
    return float((blocks.abs().amax(1)[rms > 0] / rms[rms > 0]).median())


def known_spreads() -> dict[str, torch.Tensor]:
    """Vectors with tails of known length."""
    torch.manual_seed(0)
    size = torch.Size([1 << 16])
    return {
        "Gauss": torch.randn(size),
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample(size),
        "Student, 3 degrees": torch.distributions.StudentT(3.0).sample(size),
    }
