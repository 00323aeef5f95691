"""The outer state of this peer, for those that fetch or export it."""

from pathlib import Path
from typing import Final

from peer.averaging.parts import Averaging
from peer.content.state_file import StateManifest, StateScalars, copy_state, seal_state
from peer.facts import Facts
from peer.ports import Work
from protocol.content.samples import sample_of

LARGEST_NORM: Final = 1e9
"""Told of a gradient that is longer; its length is a weight beside others' (rebuilding.py)."""


class OuterSource:
    """The outer state as the state service sees it. Implements `StateSource`."""

    def __init__(self, averaging: Averaging, facts: Facts, work: Work) -> None:
        self._averaging = averaging
        self._facts = facts
        self._work = work
        self._written = 0

    @property
    def group(self) -> str:
        """Digest of the group whose state it is."""
        return self._facts.group or ""

    @property
    def round(self) -> int:
        """Round of the last outer step."""
        return self._averaging.round

    @property
    def step(self) -> int:
        """The nominal step that we are at."""
        return self._facts.step

    async def sample(self, seed: bytes) -> bytes:
        """Weights at the places that follow from the seed, as they are between two outer steps."""
        async with self._averaging.lock:
            return sample_of(self._averaging.slow_P, seed).astype("<f4").tobytes()

    async def write(self, directory: Path) -> tuple[Path, StateManifest]:
        """Write the state: copied under the lock of the outer step, so that it is one state.

        Digests and disk are waited for without the lock, so an outer step is held up for no longer
        than the copy takes.
        """
        facts, averaging = self._facts, self._averaging
        async with averaging.lock:
            self._written += 1
            path = directory / f"{self._written}.state"
            scalars = StateScalars(
                group=self.group,
                round=averaging.round,
                step=self.step,
                layout_digest=facts.layout_digest or "",
                epoch=facts.epoch,
                position=facts.position,
                tokens=facts.tokens,
                gradient_norm=min(facts.gradient_norm, LARGEST_NORM),
            )
            vectors = (averaging.slow_P, averaging.momentum_P)
            await self._work.run(copy_state, path, scalars, *vectors)
        return path, await self._work.run(seal_state, path, scalars, averaging.slow_P.size)
