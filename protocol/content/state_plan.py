"""Which chunks of a state a joiner asks of which source, and which bytes of them it wants.

Idea. A source names the digest of each chunk of its state. Sources that name the same digest hold
the same bytes, so either may give them. Peers of a run of fragments hold the same outer copy, but
for fragments on their way, so nearly all chunks can come from several sources at once. Replicas
that average in pairs differ in every chunk; but a state that is *mixed* of their chunks is as good
as one of them, so there too several give at once. The scheduler (scheduler.py) says what is asked
of whom; its items are *units*, chunks that come from one source: a chunk, or, where replicas are
mixed, one of weights with its momentum.

Rules
  1. One source leads. The first chunk holds its writer's own scalars, so it is the leader's.
  2. Of any other chunk those bytes are wanted that most sources name; of equally many the leader's,
     or else the lower digest. One source among three decides nothing.
  3. A chunk that is here already, of an own checkpoint or of sources that are gone, is kept where
     it is what is wanted. Where replicas are mixed it is also kept if a source that was believed
     gave it, of a state not too far behind the new leader's: the joiner's machine may have slept.
  4. Chunks of a source that then broke the protocol, or is doubted, are asked for again, unless
     others name them.
  5. Where replicas are mixed, in place of 2: of any chunk but the first any source's bytes will do,
     and the first to come are kept.
  6. Of a unit that another source owes, one chunk at a time is asked for, the last first.

Invariant: a chunk that is `here` is what some source, or the own checkpoint, has named.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from .scheduler import Request, Scheduler

OWN: Final = ""
"""The name of the own checkpoint, as a giver."""
HEADER: Final = 0
"""The chunk that holds the scalars."""


class _Here(NamedTuple):
    giver: str
    digest: bytes
    step: float = math.inf
    was_sent: bool = True


class _Source(NamedTuple):
    digests: Sequence[bytes]
    step: int


class StatePlan:
    """Which chunks are here, which are asked of whom, and which bytes are wanted.

    Args:
        own: digests of chunks that are here at first.
        units: where replicas are mixed, the unit of each chunk, named by the first chunk in it.
        lost_lag: steps by which parts of a mixed state may be apart.
    """

    def __init__(
        self,
        own: Mapping[int, bytes] | None = None,
        *,
        units: Sequence[int] | None = None,
        lost_lag: float = math.inf,
    ) -> None:
        self._units: Sequence[int] = units or ()
        self._takes_any_replica = units is not None
        self._lost_lag = lost_lag if self._takes_any_replica else math.inf
        self._chunks_of = defaultdict[int, list[int]](list)
        self._here = {index: _Here(OWN, digest) for index, digest in (own or {}).items()}
        self._sources: dict[str, _Source] = {}
        self._leader = OWN
        self._wanted: list[bytes] = []
        self._missing: dict[int, None] = {}
        self._whole = np.ones(0, bool)
        self._scheduler = Scheduler("", self._whole)

    def follow_manifest(self, name: str, digests: Sequence[bytes], step: int = 0) -> None:
        """Follow the manifest of the source that leads from now on; all others are gone."""
        if not self._takes_any_replica:
            self._units = range(len(digests))
        self._chunks_of.clear()
        for index, unit in enumerate(self._units):
            self._chunks_of[unit].append(index)
        self._sources, self._leader = {name: _Source(digests, step)}, name
        oldest = step - self._lost_lag
        self._here = {index: here for index, here in self._here.items() if here.step >= oldest}
        self._whole = np.ones(len(digests), bool)
        self._scheduler = Scheduler("", self._whole)
        self._scheduler.wait_for(range(len(digests)))
        self._choose()

    def add_helper(self, name: str, digests: Sequence[bytes], step: int = 0) -> None:
        """Take one more source, unless it names another number of chunks."""
        if name != self._leader and len(digests) == len(self._wanted):
            self._sources[name] = _Source(digests, step)
            self._choose()

    def is_of_one_time(self, step: int) -> bool:
        """Whether a state of this step may be mixed with the leader's."""
        return abs(step - self._sources[self._leader].step) <= self._lost_lag

    def gone(self, name: str, *, believed: bool = True) -> None:
        """A source gives nothing more; one that leads is replaced by `follow_manifest`."""
        self._scheduler.gone(name)
        if not believed:
            self._here = {i: here for i, here in self._here.items() if here.giver != name}
            self._look_what_is_missing()
        if name != self._leader and self._sources.pop(name, None) is not None:
            self._choose()

    def forget(self) -> None:
        """Drop what was put together, which is not believed."""
        self._here.clear()
        self._look_what_is_missing()

    @property
    def missing(self) -> Sequence[int]:
        return list(self._missing)

    @property
    def num_missing(self) -> int:
        return len(self._missing)

    @property
    def complete(self) -> bool:
        return bool(self._wanted) and not self._missing

    def next_of(self, name: str) -> list[tuple[Request, Sequence[int]]]:
        """Requests to a source, each with its chunks; they count as asked."""
        requests = self._scheduler.next_requests(of=name)
        return [(request, self._chunks(request.item)) for request in requests]

    def _chunks(self, unit: int) -> Sequence[int]:
        chunks = [i for i in self._chunks_of[unit] if i in self._missing]
        return chunks if self._scheduler.times_asked(unit) == 1 else chunks[-1:]

    def wants(self, name: str, index: int) -> bool:
        """Whether a chunk is missing, and this source's bytes will do."""
        return index in self._missing and self._will_do(name, index)

    def _will_do(self, name: str, index: int) -> bool:
        if self._takes_any_replica:
            return index != HEADER or name == self._leader
        return self._sources[name].digests[index] == self._wanted[index]

    def arrived(self, name: str, index: int, *, was_sent: bool = True) -> None:
        """A wanted chunk came, or, of zeros, need not be sent."""
        digests, step = self._sources[name]
        self._here[index] = _Here(name, digests[index], step, was_sent)
        self._missing.pop(index, None)
        unit = self._units[index]
        self._whole[unit] = not any(i in self._missing for i in self._chunks_of[unit])

    def answered(self, request: Request) -> None:
        self._scheduler.came(request)

    def failed(self, request: Request) -> None:
        self._scheduler.failed(request)

    def giver(self, index: int) -> str | None:
        return self._here[index].giver if index in self._here else None

    def givers(self) -> Counter[str]:
        """How many of the chunks that are here each source has sent, and the own checkpoint had."""
        here = (self._here[i] for i in range(len(self._wanted)) if i in self._here)
        return Counter(chunk.giver for chunk in here if chunk.was_sent)

    def _choose(self) -> None:
        leaders = enumerate(self._sources[self._leader].digests)
        self._wanted = [self._choice(index, digest) for index, digest in leaders]
        for name in self._sources:
            does = np.ones(len(self._wanted), bool)
            for index, unit in enumerate(self._units):
                does[unit] &= self._will_do(name, index)
            self._scheduler.holds(name, does)
        self._look_what_is_missing()

    def _choice(self, index: int, leaders: bytes) -> bytes:
        if index == HEADER or len(self._sources) < 3 or self._takes_any_replica:
            return leaders
        named = Counter(source.digests[index] for source in self._sources.values())
        most = max(named.values())
        best = sorted(digest for digest, times in named.items() if times == most)
        return leaders if leaders in best else best[0]

    def _look_what_is_missing(self) -> None:
        every = range(len(self._wanted))
        self._missing = dict.fromkeys(index for index in every if not self._is_done(index))
        self._whole[:] = True
        self._whole[[self._units[index] for index in self._missing]] = False

    def _is_done(self, index: int) -> bool:
        here = self._here.get(index, _Here(OWN, b""))
        if here.digest == self._wanted[index]:
            return True
        return self._takes_any_replica and index != HEADER and here.giver != OWN
