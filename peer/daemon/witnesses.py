"""Other peers that a joiner holds a state against.

It asks some for samples of their weights, and reads in their beats what losses they have
(protocol/content/samples.py). What follows from them is decided in comparison.py.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import blake3
import trio

from peer.content.fetching import fetch_from
from peer.facts import PeerState
from peer.ports import Network, PeerId
from peer.training.ports import Float32Vector
from protocol.content.samples import (
    BLOCK_VALUES,
    LEAST_BLOCKS,
    NUM_WITNESSES,
    SEED_BYTES,
    block_starts,
    blocks_of,
    is_unlike,
    sample_of,
)
from protocol.errors import LocoError
from protocol.membership.heeded import heeded
from protocol.membership.records import Sign
from protocol.membership.view import Member, View

WITNESS_S: Final = 5.0
"""A witness that takes longer is none. It is less than PINNED_REQUEST_S of content/service.py: the
source is not asked for anything meanwhile."""

Turns = Mapping[PeerId, trio.Lock]
"""A peer serves few readers at once: what several sources' witnesses ask of it takes turns."""
MeasureLoss = Callable[[], Awaitable[float | None]]
"""Measures the slow weights as they lie there; None where nobody can tell."""


async def cannot_tell() -> None:
    """Measures nothing: there is no trainer yet, or it holds a stage and has no loss of its own."""


class Witnesses:
    """What others say of the state that one source is about to send.

    Attributes:
        losses: that others tell.
        asked: set when all have been.

    Args:
        sign: nobody else can; so nobody else knows the seed beforehand.
        root: of that state, as its source has named it.
    """

    def __init__(self, network: Network, view: View, sign: Sign, source: PeerId, root: str) -> None:
        self._network = network
        self._view = view
        self._source = source
        drawn = sign(f"loco/v1/witnesses/{source}/{root}".encode())
        self._seed = blake3.blake3(drawn).digest(length=SEED_BYTES)
        self._samples: list[Float32Vector] = []
        self.losses: list[float] = []
        self.asked = trio.Event()

    @property
    def num_samples(self) -> int:
        """How many others gave one."""
        return len(self._samples)

    async def ask(self, turns: Turns) -> None:
        """Ask some of the others; those that cannot help, or are slow, are none."""
        training = self._others_training()
        losses = [m.progress.validation_loss for m in heeded(training, trio.current_time())]
        self.losses = [loss for loss in losses if loss is not None]
        others = [member.peer_id for member in training]
        others.sort(key=lambda peer_id: blake3.blake3(self._seed + peer_id.encode()).digest())
        with trio.move_on_after(WITNESS_S):
            async with trio.open_nursery() as nursery:
                for peer_id in others[:NUM_WITNESSES]:
                    nursery.start_soon(self._ask, peer_id, turns[peer_id])
        self.asked.set()

    def _others_training(self) -> list[Member]:
        return [
            member
            for member in self._view.members_training(trio.current_time())
            if member.peer_id != self._source and member.progress.state == PeerState.TRAINING
        ]

    async def _ask(self, peer_id: PeerId, turn: trio.Lock) -> None:
        try:
            async with turn, fetch_from(self._network, peer_id) as fetcher:
                self._samples.append(await fetcher.sample(self._view.group, self._seed))
        except LocoError:
            return

    def find_odd(self, slow_P: Float32Vector, gave: Callable[[range], bool]) -> bool:
        """Whether the weights are unlike theirs where these values came from the source."""
        places = block_starts(self._seed, slow_P.size)
        blocks = [n for n, at in enumerate(places) if gave(range(at, at + BLOCK_VALUES))]
        sample, *others = (
            blocks_of(values, blocks) for values in (sample_of(slow_P, self._seed), *self._samples)
        )
        return len(blocks) >= LEAST_BLOCKS and is_unlike(sample, others)
