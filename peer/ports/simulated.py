"""Simulated Work and Entropy: inline, from a seed."""

from collections.abc import Callable
from typing import Any, TypeVar

import blake3
import trio

T = TypeVar("T")


class SimulatedWork:
    """Work done inline, taking `duration_s` of virtual time."""

    def __init__(self, duration_s: float = 0.0) -> None:
        self._duration_s = duration_s

    async def run(self, function: Callable[..., T], *args: Any, may_be_cut_off: bool = False) -> T:
        """`function(*args)`, here and now, then the time it would have taken."""
        await trio.lowlevel.checkpoint()
        result = function(*args)
        with trio.CancelScope(shield=not may_be_cut_off):
            await trio.sleep(self._duration_s)
        return result

    def check_cancelled(self) -> None:
        """Nothing is cancelled while a function is under way: it takes no time."""


class SimulatedEntropy:
    """Bytes that follow from the seed, and look random."""

    def __init__(self, seed: int) -> None:
        self._hasher = blake3.blake3(f"loco-entropy {seed}".encode())
        self._position = 0

    def token_bytes(self, n: int) -> bytes:
        """The next `n` bytes of the seed's stream."""
        taken = self._hasher.digest(length=n, seek=self._position)
        self._position += n
        return taken
