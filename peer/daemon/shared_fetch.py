"""A state fetched from the peer that leads, and from some that help it, until it is believed.

    fragments    all hold the same: helpers give the bytes that most name, and the leader's root is
                 what is compared
    pairs        each gives chunks of its own replica, is compared by what it gave, and is left out
                 where that is odd (comparison.py); what it gave then comes from the others

In pairs nobody helps where it could not be found out: two witnesses of its state have to have
answered. A small state is not shared, for each helper writes a file.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from peer.ports import PeerId
from peer.state.fetching import Fetcher
from peer.state.gathering import CHUNKS_PER_SOURCE, Gathering
from peer.state.state_file import StateManifest, StateScalars
from protocol.errors import RemoteProtocolError
from protocol.membership.view import View
from protocol.state_sample import LEAST_WITNESSES

from .comparison import Comparison
from .sources import Sources

MAX_HELPERS: Final = 3
"""Further peers that a state is taken from at once."""
MAX_DOUBTED: Final = 3
"""After so many odd sources one at a time is taken: whoever has many identities gains no more."""


class SharedFetch:
    """Fetches a state from a leader and helpers until it is believed.

    Args:
        described_by: what a source's state is made of, checked as far as that goes.
        moved: called when a chunk has come.
        nursery: others help in it.
        mixes: of replicas that differ.
    """

    def __init__(
        self,
        gathering: Gathering,
        comparison: Comparison,
        sources: Sources,
        view: View,
        described_by: Callable[[Fetcher], Awaitable[StateManifest]],
        moved: Callable[[], None],
        nursery: trio.Nursery,
        *,
        mixes: bool,
    ) -> None:
        self._gathering = gathering
        self._comparison = comparison
        self._sources = sources
        self._view = view
        self._described_by = described_by
        self._moved = moved
        self._nursery = nursery
        self._mixes = mixes
        self._doubted: set[PeerId] = set()
        self._alone = False

    async def lead(self, fetcher: Fetcher) -> StateScalars:
        """Fetch a state that this source leads, and compare it.

        Raises:
            StreamLost, Refused, RemoteProtocolError: this source failed; another one may lead.
        """
        leader = fetcher.remote_peer_id
        described = await self._described_by(fetcher)
        self._comparison.keep(self._gathering.remotes)
        self._comparison.ask_about(leader, described.root.hex())
        while True:
            state = await self._gather(fetcher, described)
            odd = await self._drop_odd_ones()
            if leader in odd:
                raise RemoteProtocolError(f"what {leader} gave is unlike what others have")
            if not odd:
                break
        try:
            await self._comparison.check_whole(leader)
        except RemoteProtocolError:
            self._gathering.forget()
            self._alone = self._mixes
            raise
        return state

    async def _gather(self, fetcher: Fetcher, described: StateManifest) -> StateScalars:
        helping = trio.CancelScope()
        if self._may_be_helped(described):
            self._nursery.start_soon(self._be_helped, helping, fetcher.remote_peer_id)
        try:
            return await self._gathering.lead(fetcher, described, self._moved)
        finally:
            helping.cancel()

    async def _be_helped(self, until: trio.CancelScope, leader: PeerId) -> None:
        with until:
            apart_from = {leader, *self._doubted}
            await self._sources.help_with(self._help, self._view, apart_from, MAX_HELPERS)

    def _may_be_helped(self, described: StateManifest) -> bool:
        if not self._mixes:
            return True
        training = self._view.members_training(trio.current_time())
        return (
            not self._alone
            and len(self._doubted) < MAX_DOUBTED
            and len(training) > LEAST_WITNESSES
            and len(described.digests) > CHUNKS_PER_SOURCE
        )

    async def _help(self, fetcher: Fetcher) -> bool:
        """Take a part from this source, if it could be found out; whether it could."""
        described = await self._described_by(fetcher)
        if not self._gathering.is_of_one_time(described):
            return False
        name = fetcher.remote_peer_id
        try:
            if self._mixes:
                self._comparison.ask_about(name, described.root.hex())
                if not await self._comparison.is_seen(name):
                    return False
            await self._gathering.help(fetcher, described, self._moved)
        finally:
            if name not in self._gathering.remotes:
                self._comparison.forget(name)
        return True

    async def _drop_odd_ones(self) -> list[PeerId]:
        """Drop what odd sources gave; name them."""
        if not self._mixes:
            return []
        gathering = self._gathering
        odd = await self._comparison.odd_ones(gathering.remotes, gathering.gave)
        for source in odd:
            gathering.distrust(source)
        self._doubted.update(odd)
        return odd
