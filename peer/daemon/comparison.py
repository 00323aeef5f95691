"""A state that a joiner was given, held against witnesses of each replica that it is made of.

Idea. Each source has named the root of a state of its own, so each has witnesses of its own
(witnesses.py), and is judged by what it gave. A source that lies about all its weights is found,
however little of the state it gave; what the others gave is kept. Then the whole is held against
the witnesses of the source that leads, and its loss against those that others tell.

Rules
  1. The loss of the whole is compared once for each source, with what the others told when that one
     named its root: nobody's word counts where it has given chunks itself.
  2. A source helps the one that leads when witnesses of its state have answered, and not before.
  3. A whole that is odd or worse, where no source is odd by itself, names nobody: it is let go of,
     and from then on one source at a time is taken. So a lie that only the whole shows is found as
     it was when there was one source, and holds up a joiner but once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

import trio

from peer.ports import PeerId
from peer.training.ports import Float32Vector
from protocol.content.samples import LEAST_WITNESSES, is_worse
from protocol.errors import RemoteProtocolError

from .witnesses import MeasureLoss, Witnesses


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
