"""Which chunk of a state a joiner asks of which source, and which bytes of it it wants.

Idea. A state is cut into chunks, and a source names the digest of each (protocol/run/merkle.py).
Where two sources name the same digest they hold the same bytes, so either may give them. Peers of a
run of fragments hold the same outer copy, but for the fragments that are on their way, so nearly
all chunks can come from several sources at once. Replicas that average in pairs differ in every
chunk.

Rules
  1. One source leads. The first chunk holds its writer's own scalars, so it is the leader's.
  2. Of any other chunk those bytes are wanted that most sources name; of equally many the leader's,
     or else the lower digest. So one source among three decides nothing.
  3. A chunk is asked of one source. When none is left that nobody was asked for, a source is asked
     for one that another owes, so that the slowest does not hold up the end.
  4. What is here already, of an own checkpoint or of sources that are gone, is kept where it is
     what is wanted. With `mixes` also where it is not, if a source that was believed gave it: a
     joiner whose source died half way goes on with another replica's chunks.
  5. What a source gave that then broke the protocol is asked for again, unless others name it.

Invariant: a chunk that is `here` is what some source, or the own checkpoint, has named.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

OWN: Final = ""
"""The name of the own checkpoint, as a giver."""
HEADER: Final = 0
"""The chunk that holds the scalars."""


class ChunkPlan:
    """See the top of the file.

    Args:
        own: digests of chunks that are here at first.
        mixes: chunks of several replicas make one state.
    """

    def __init__(self, own: Mapping[int, bytes] | None = None, *, mixes: bool = False) -> None:
        self._mixes = mixes
        self._here = {index: (OWN, digest) for index, digest in (own or {}).items()}
        self._sources: dict[str, Sequence[bytes]] = {}
        self._leader = OWN
        self._wanted: list[bytes] = []
        self._asked: dict[int, set[str]] = {}
        self._missing: dict[int, None] = {}

    def __repr__(self) -> str:
        return f"<ChunkPlan, {self.num_missing} missing, {len(self._sources)} sources>"

    # --- sources ----------------------------------------------------------------------------------
    def lead(self, name: str, digests: Sequence[bytes]) -> None:
        """A source leads from now on; there is no other."""
        self._sources, self._leader, self._asked = {name: digests}, name, {}
        self._choose()

    def join(self, name: str, digests: Sequence[bytes]) -> None:
        """One more source; one that names another number of chunks is none."""
        if name != self._leader and len(digests) == len(self._wanted):
            self._sources[name] = digests
            self._choose()

    def gone(self, name: str, *, believed: bool = True) -> None:
        """A source gives nothing any more; one that leads has to be replaced by `lead`.

        Args:
            believed: it has not broken the protocol.
        """
        for others in self._asked.values():
            others.discard(name)
        if not believed:
            given = [index for index, (giver, _) in self._here.items() if giver == name]
            for index in given:
                del self._here[index]
            self._look_what_is_missing()
        if name != self._leader and self._sources.pop(name, None) is not None:
            self._choose()

    def forget(self) -> None:
        """Nothing is here: what was put together is not believed."""
        self._here.clear()
        self._look_what_is_missing()

    # --- chunks -----------------------------------------------------------------------------------
    def missing(self) -> list[int]:
        """Chunks still to come, rising."""
        return list(self._missing)

    @property
    def num_missing(self) -> int:
        """How many they are."""
        return len(self._missing)

    @property
    def complete(self) -> bool:
        """Whether every chunk is here."""
        return bool(self._wanted) and not self._missing

    def wanted(self, index: int) -> bytes:
        """The digest that is wanted of a chunk."""
        return self._wanted[index]

    def next_of(self, name: str, most: int) -> range | None:
        """Chunks to ask a source for now, one after another; None while there are none.

        Args:
            most: of them.
        """
        digests, chunks = self._sources.get(name), range(0)
        if digests is None:
            return None
        for index in self._missing:
            if len(chunks) == most or (chunks and index != chunks.stop):
                break
            if not self._asked.get(index) and digests[index] == self._wanted[index]:
                chunks = range(chunks.start if chunks else index, index + 1)
            elif chunks:
                break
        if not chunks:
            chunks = self._owed_by_another(name, digests)
        for index in chunks:
            self._asked.setdefault(index, set()).add(name)
        return chunks or None

    def _owed_by_another(self, name: str, digests: Sequence[bytes]) -> range:
        for index in self._missing:
            asked = self._asked.get(index, set())
            if len(asked) == 1 and name not in asked and digests[index] == self._wanted[index]:
                return range(index, index + 1)
        return range(0)

    def arrived(self, name: str, index: int) -> None:
        """A chunk came, and is what was wanted."""
        self._here[index] = (name, self._wanted[index])
        self._asked.pop(index, None)
        self._missing.pop(index, None)

    def unwanted(self, name: str, index: int) -> None:
        """A chunk came that was wanted when it was asked for."""
        self._asked.get(index, set()).discard(name)

    def givers(self) -> Counter[str]:
        """How many of the chunks that are here each has given."""
        return Counter(self._here[i][0] for i in range(len(self._wanted)) if i in self._here)

    def _is_done(self, index: int) -> bool:
        giver, digest = self._here.get(index, (OWN, b""))
        if digest == self._wanted[index]:
            return True
        return self._mixes and index != HEADER and giver != OWN

    def _choose(self) -> None:
        leaders = enumerate(self._sources[self._leader])
        self._wanted = [self._choice(index, digest) for index, digest in leaders]
        self._look_what_is_missing()

    def _look_what_is_missing(self) -> None:
        every = range(len(self._wanted))
        self._missing = dict.fromkeys(index for index in every if not self._is_done(index))

    def _choice(self, index: int, leaders: bytes) -> bytes:
        if index == HEADER or len(self._sources) < 3:
            return leaders
        named = Counter(digests[index] for digests in self._sources.values())
        most = max(named.values())
        best = sorted(digest for digest, times in named.items() if times == most)
        return leaders if leaders in best else best[0]
