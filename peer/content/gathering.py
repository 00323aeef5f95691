"""A state on its way to us, from one source or several at once (protocol/content/chunks.py).

Each source is held to its own list of digests, that list to its own root, and the source to a
minimum rate (fetching.py). A source that does not lead may fail: what it owes is asked of the
others.

A chunk of zeros is not asked for: the digest that a source names says what it is. Without outer
momentum that is half of a state.

Where replicas are mixed, parts of one state belong to about one time. So a source whose state is
too far from the leader's does not help, and when another one leads, what was given of a state that
is too far behind its own is dropped: a joiner's machine may have slept in between.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

import trio

from peer.ports import PeerId
from protocol.content.chunks import ChunkPlan
from protocol.content.manifest import digest_of
from protocol.errors import LocoError, RemoteProtocolError
from protocol.limits import STATE_CHUNK_BYTES

from .fetching import ExpectedState, Fetcher, slowest_rate, steady
from .state_file import (
    Float32Vector,
    StateAssembler,
    StateManifest,
    StateScalars,
    check_chunk,
    check_manifest,
    chunk_bytes,
    state_bytes,
    state_chunks,
    units_of,
    weights_chunk,
)

CHUNKS_PER_SOURCE: Final = 4
"""Asked of one source at once: few, so that several share a state."""


class Gathering:
    """See the top of the file.

    Args:
        phi_P, delta_P: where the state goes; they hold no state before there is a `result`.
        own: digests of the chunks that the vectors hold already (`own_digests`).
        mixes: chunks of several replicas make one state.
        lost_lag: steps by which parts of such a state may be apart.

    Attributes:
        fetched_bytes: of all sources.
    """

    def __init__(
        self,
        phi_P: Float32Vector,
        delta_P: Float32Vector,
        own: Mapping[int, bytes] | None = None,
        *,
        mixes: bool = False,
        lost_lag: float = math.inf,
    ) -> None:
        self._vectors = phi_P, delta_P
        self._lost_lag = lost_lag if mixes else math.inf
        self._leaders_step = 0
        self._oldest_of: dict[PeerId, int] = {}
        """Step of the oldest state of which each source gave what is here."""
        self._plan = ChunkPlan(own, units=units_of(phi_P.size) if mixes else None)
        self._assembler: StateAssembler | None = None
        self._changed = trio.Event()
        self.fetched_bytes = 0
        self._gave: set[PeerId] = set()
        self._at_work = 0

    @property
    def share(self) -> float:
        """The part of the state that is here."""
        assert self._assembler is not None
        return 1 - self._plan.num_missing / self._assembler.num_chunks

    @property
    def num_sources(self) -> int:
        """How many have given something, whatever became of it."""
        return len(self._gave)

    @property
    def missing_bytes(self) -> int:
        """What is still to come, about."""
        return self._plan.num_missing * STATE_CHUNK_BYTES

    @property
    def remotes(self) -> list[PeerId]:
        """Those that gave what is here, by how much that is."""
        return [name for name, _ in self._plan.givers().most_common() if name]

    @property
    def kept_bytes(self) -> int:
        """What was here before, and need not come."""
        own = self._plan.givers()[""]
        return min(own * STATE_CHUNK_BYTES, state_bytes(self._vectors[0].size))

    async def lead(
        self,
        fetcher: Fetcher,
        described: StateManifest,
        on_progress: Callable[[], None] = lambda: None,
    ) -> StateScalars:
        """Gather the state that this source has described; others may `help` meanwhile.

        Raises:
            StreamLost, Refused, RemoteProtocolError: this source failed; another one may lead, and
                what is here is kept where that may be.
        """
        name = fetcher.remote_peer_id
        assembler = StateAssembler(described, *self._vectors)
        if self._assembler is not None:
            assembler.take_header_of(self._assembler)
        self._assembler = assembler
        self._plan.lead(name, described.digests)
        self._leaders_step = described.scalars.step
        self._drop_what_is_old()
        self._note_source(name, described)
        try:
            await self._put_zeros(name, described)
            await self._work(fetcher, described, on_progress)
            return assembler.result()
        except RemoteProtocolError:
            self._plan.gone(name, believed=False)
            raise
        except LocoError:
            self._plan.gone(name)
            raise

    async def help(
        self,
        fetcher: Fetcher,
        described: StateManifest,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Take from this source too what it has of the state that another one leads.

        Raises:
            StreamLost, Refused, RemoteProtocolError: it failed; nothing but itself is lost.
        """
        name, believed = fetcher.remote_peer_id, True
        check_manifest(described, self._vectors[0].size)
        self._plan.join(name, described.digests)
        self._note_source(name, described)
        self._tell()
        try:
            await self._work(fetcher, described, on_progress)
        except RemoteProtocolError:
            believed = False
            raise
        finally:
            self._plan.gone(name, believed=believed)
            self._tell()

    def is_of_one_time(self, described: StateManifest) -> bool:
        """Whether parts of this state go together with those of the leader's."""
        return abs(described.scalars.step - self._leaders_step) <= self._lost_lag

    def _drop_what_is_old(self) -> None:
        for name in self.remotes:
            if self._oldest_of[name] < self._leaders_step - self._lost_lag:
                self.distrust(name)

    def _note_source(self, name: PeerId, described: StateManifest) -> None:
        step = described.scalars.step
        kept = self._oldest_of[name] if name in self.remotes else step
        self._oldest_of[name] = min(kept, step)

    def gave(self, name: PeerId, values: range) -> bool:
        """Whether these weights, fewer than fit in a chunk, are here and from this source."""
        ends = weights_chunk(values.start), weights_chunk(values.stop - 1)
        return all(self._plan.giver(index) == name for index in ends)

    def distrust(self, name: PeerId) -> None:
        """Drop what this source has given: it is not believed, and has to come from others."""
        self._plan.gone(name, believed=False)

    def forget(self) -> None:
        """The state that was put together is not believed: nothing of it is kept."""
        self._plan.forget()

    async def _put_zeros(self, name: PeerId, described: StateManifest) -> None:
        """Put zeros where this source has named the digest of zeros."""
        assert self._assembler is not None
        for index in self._plan.missing():
            zeros = _digest_of_zeros(chunk_bytes(index, described.total_bytes))
            if described.digests[index] == zeros and self._plan.wants(name, index):
                self._assembler.put_zeros(index)
                self._plan.known(name, index)
                await trio.lowlevel.checkpoint()

    async def _work(
        self, fetcher: Fetcher, described: StateManifest, on_progress: Callable[[], None]
    ) -> None:
        """Ask this source until all is here, from whomever."""
        name, root = fetcher.remote_peer_id, described.root.hex()
        rate = slowest_rate(described.total_bytes)
        while not self._plan.complete:
            self._at_work += 1
            try:
                with steady(fetcher.talk, rate, lambda: self._at_work) as moved:
                    while (wanted := self._plan.next_of(name, CHUNKS_PER_SOURCE)) is not None:
                        await fetcher.request(root, wanted)
                        for index in wanted:
                            chunk = await fetcher.part(index, STATE_CHUNK_BYTES, moved)
                            self._take(name, index, chunk, described.digests[index])
                            on_progress()
            finally:
                self._at_work -= 1
            if not self._plan.complete:
                await self._changed.wait()

    def _take(self, name: PeerId, index: int, chunk: bytes, named: bytes) -> None:
        """Keep a chunk, if it is still what is wanted; its source has `named` this digest."""
        assert self._assembler is not None
        if digest_of(chunk) != named:
            raise RemoteProtocolError(f"chunk {index} of the state does not match its digest")
        check_chunk(index, chunk, self._vectors[0].size)
        self.fetched_bytes += len(chunk)
        if not self._plan.wants(name, index):
            self._plan.unwanted(name, index)  # since it was asked for, others named or gave another
            return
        self._gave.add(name)
        self._assembler.put(index, chunk)
        self._plan.arrived(name, index)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


async def whole_state(
    fetcher: Fetcher,
    expected: ExpectedState,
    phi_P: Float32Vector,
    delta_P: Float32Vector,
    on_progress: Callable[[float], None] = lambda _: None,
    gathering: Gathering | None = None,
) -> StateScalars:
    """The present state of one peer, verified chunk by chunk; says where it stands.

    Args:
        phi_P, delta_P: where the state goes, of the group's padded parameters.
        on_progress: told the share received so far.
        gathering: of the same vectors, with what came from sources before.

    Raises:
        StreamLost, Refused, RemoteProtocolError
    """
    gathering = gathering or Gathering(phi_P, delta_P)
    described = await fetcher.description(expected, phi_P.size)
    return await gathering.lead(fetcher, described, lambda: on_progress(gathering.share))


def own_digests(phi_P: Float32Vector, delta_P: Float32Vector) -> dict[int, bytes]:
    """The digests of the chunks of a state of these vectors. Blocking.

    Not of the first one, which is its writer's; nor of zeros, which nobody sends.
    """
    scalars = StateScalars("", -1, 0, "", 0, 0, 0, 0.0)
    digests = dict[int, bytes]()
    for index, chunk in enumerate(state_chunks(scalars, phi_P, delta_P)):
        digest = digest_of(chunk)
        if index and digest != _digest_of_zeros(len(chunk)):
            digests[index] = digest
    return digests


@cache
def _digest_of_zeros(length: int) -> bytes:
    """The digest of a chunk of zeros. There are two lengths: the last chunk's, and all others'."""
    return digest_of(bytes(length))
