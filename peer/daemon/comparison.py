"""A state that a joiner was given, held against witnesses of each replica that it is made of.

Idea. Each source has named the root of a state of its own, so each has witnesses of its own
(`Witnesses`), and is judged by what it gave. A source that lies about all its weights is found,
however little of the state it gave; what the others gave is kept. Then the whole is held against
the witnesses of the source that leads, and its loss against those that others tell.

Rules
  1. The loss of the whole is compared once for each source, with what the others told when that one
     named its root: nobody's word counts where it has given chunks itself.
  2. A source helps the one that leads when witnesses of its state have answered, and not before.
  3. A whole that is odd or worse, where no source is odd by itself, names nobody: it is let go of,
     and from then on one source at a time is taken. So a lie that only the whole shows is found as
     it was when there was one source, and holds up a joiner but once.

Other peers that a joiner holds a state against.

It asks some for samples of their weights, and reads in their beats what losses they have
(protocol/content/samples.py).
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
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
    LEAST_WITNESSES,
    NUM_WITNESSES,
    block_starts,
    blocks_of,
    is_unlike,
    is_worse,
    sample_of,
)
from protocol.errors import LocoError, RemoteProtocolError
from protocol.limits import SECRET_BYTES
from protocol.membership.heeded import heeded
from protocol.membership.records import Sign
from protocol.membership.view import Member, View

# --- witnesses ------------------------------------------------------------------------------------

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
        self._seed = blake3.blake3(drawn).digest(length=SECRET_BYTES)
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


# --- comparison -----------------------------------------------------------------------------------


class Comparison:
    """Compares a fetched state with witnesses of each source's own state.

    Args:
        witnesses_of: those of the state that this source has given this root.
        slow_P: where the weights lie when they have come.
        measure: the loss of what lies there.
        nursery: witnesses are asked in it.
    """

    def __init__(
        self,
        witnesses_of: Callable[[PeerId, str], Witnesses],
        slow_P: Float32Vector,
        measure: MeasureLoss,
        nursery: trio.Nursery,
    ) -> None:
        self._witnesses_of = witnesses_of
        self._slow_P = slow_P
        self._measure = measure
        self._nursery = nursery
        self._by_source: dict[PeerId, Witnesses] = {}
        self._turns = defaultdict[PeerId, trio.Lock](trio.Lock)

    def keep(self, sources: Iterable[PeerId]) -> None:
        """Forget the witnesses of all but these."""
        self._by_source = {s: self._by_source[s] for s in sources if s in self._by_source}

    def ask_about(self, source: PeerId, root: str) -> None:
        """A source has named its root: its witnesses are asked from now on."""
        self._by_source[source] = witnesses = self._witnesses_of(source, root)
        self._nursery.start_soon(witnesses.ask, self._turns)

    def forget(self, source: PeerId) -> None:
        """Forget its witnesses: nothing here is from that source."""
        self._by_source.pop(source, None)

    async def is_seen(self, source: PeerId) -> bool:
        """Whether so many have shown what they have that the source can be judged at all."""
        witnesses = self._by_source[source]
        await witnesses.asked.wait()
        return witnesses.num_samples >= LEAST_WITNESSES

    async def odd_ones(
        self, sources: Iterable[PeerId], gave: Callable[[PeerId, range], bool]
    ) -> list[PeerId]:
        """The sources among these that gave weights unlike those of their witnesses.

        Args:
            gave: whether these weights are from that source.
        """
        odd = []
        for source in sources:
            witnesses = self._by_source[source]
            await witnesses.asked.wait()
            if witnesses.find_odd(self._slow_P, partial(gave, source)):
                odd.append(source)
        return odd

    async def check_whole(self, leader: PeerId) -> None:
        """Compare the whole, and have its loss measured where others' are known.

        Raises:
            RemoteProtocolError: the state is unlike theirs, or worse.
        """
        witnesses = self._by_source[leader]
        await witnesses.asked.wait()
        if witnesses.find_odd(self._slow_P, lambda _: True):
            raise RemoteProtocolError(
                f"the state of {leader} is unlike those of {witnesses.num_samples} others"
            )
        known = [
            each.losses for each in self._by_source.values() if len(each.losses) >= LEAST_WITNESSES
        ]
        if not known or (loss := await self._measure()) is None:
            return
        for told in known:
            if is_worse(loss, told):
                others = ", ".join(f"{each:.3f}" for each in sorted(told))
                raise RemoteProtocolError(
                    f"the state of {leader} has a loss of {loss:.3f}, where others tell {others}"
                )
