"""Which chunk of a state a joiner asks of which source, and which bytes of it it wants.

Idea. A state is cut into chunks, and a source names the digest of each. Where two sources name the
same digest they hold the same bytes, so either may give them. Peers of a run of fragments hold the
same outer copy, but for the fragments that are on their way, so nearly all chunks can come from
several sources at once. Replicas that average in pairs differ in every chunk; but a state that is
*mixed* of their chunks is as good as one of them, so there too several can give at once, each what
it has itself.

Rules
  1. One source leads. The first chunk holds its writer's own scalars, so it is the leader's.
  2. Of any other chunk those bytes are wanted that most sources name; of equally many the leader's,
     or else the lower digest. So one source among three decides nothing.
  3. A chunk is asked of one source. When none is left that nobody was asked for, a source is asked
     for one that another owes, so that the slowest does not hold up the end.
  4. What is here already, of an own checkpoint or of sources that are gone, is kept where it is
     what is wanted. Where replicas are mixed also where it is not, if a source that was believed
     gave it: a joiner whose source died half way goes on with another replica's chunks.
  5. What a source gave that then broke the protocol, or is doubted, is asked for again, unless
     others name it.

Where replicas are mixed, in place of 2:
  6. Of any chunk but the first any source's bytes will do, and the first to come are kept.
  7. Momentum comes with its weights: chunks of one *unit* are asked of the source that was asked
     for the first of them, unless that one is gone, or the others have nothing else to do.
  8. A source is asked for at most a part of what is missing, so that of a small state, and at the
     end of a large one, there is something for each.

Invariant: a chunk that is `here` is what some source, or the own checkpoint, has named.

A Merkle root stands for the chunks of a state. One root of 32 bytes names a whole state. A joiner
asks several peers for the root, fetches the list of chunk digests from any one of them, checks the
list against the root, and then takes each chunk from whoever has it.

Rules:
    1. Leaf: digest of a chunk's bytes. Node: digest of left || right. An odd node moves up
       unchanged.
    2. Root: digest of (number of chunks as 8 bytes, big-endian) || top node.
    3. Leaf, node and root are derived under three different contexts, so that none can pass for
       another: no chunk can be made that reads as a node, and no list of nodes reads as a shorter
       list of chunks.

Digest: blake3, 32 bytes. Source of the hazards: RFC 6962, section 2.1 (domain separation),
CVE-2012-2459 (duplicated leaves).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import blake3

# --- state chunks ---------------------------------------------------------------------------------
OWN: Final = ""
"""The name of the own checkpoint, as a giver."""
HEADER: Final = 0
"""The chunk that holds the scalars."""
PARTS_OF_THE_MISSING: Final = 16
"""Rule 8: weights and momentum of four sources, twice."""


class _Here(NamedTuple):
    """A chunk that is here."""

    giver: str
    digest: bytes
    was_sent: bool = True


class ChunkPlan:
    """See the top of the file.

    Args:
        own: digests of chunks that are here at first.
        units: where chunks of several replicas make one state, the unit of each chunk; None where
            sources hold the same.
    """

    def __init__(
        self, own: Mapping[int, bytes] | None = None, *, units: Sequence[int] | None = None
    ) -> None:
        self._units = units
        self._chunks_of_unit = defaultdict[int, list[int]](list)
        for index, unit in enumerate(units or ()):
            self._chunks_of_unit[unit].append(index)
        self._claims: dict[int, str] = {}
        self._due = defaultdict[str, dict[int, None]](dict)
        self._here = {index: _Here(OWN, digest) for index, digest in (own or {}).items()}
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
        self._claims.clear()
        self._due.clear()
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
        self._due.pop(name, None)
        self._claims = {unit: by for unit, by in self._claims.items() if by != name}
        if not believed:
            given = [index for index, here in self._here.items() if here.giver == name]
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
        if name not in self._sources:
            return None
        chunks = (
            self._run(self._due[name], name, most)
            or self._run(self._unclaimed(), name, self._share(most))
            or self._left_by_others(name)
        )
        for index in chunks:
            self._asked.setdefault(index, set()).add(name)
            self._claim(name, index)
        return chunks or None

    def _run(self, among: Iterable[int], name: str, most: int) -> range:
        """The first chunks of these, one after another, that nobody was asked for."""
        chunks = range(0)
        for index in among:
            if len(chunks) == most or (chunks and index != chunks.stop):
                break
            if index in self._missing and not self._asked.get(index) and self.wants(name, index):
                chunks = range(chunks.start if chunks else index, index + 1)
            elif chunks:
                break
        return chunks

    def _unclaimed(self) -> Iterable[int]:
        if self._units is None:
            return self._missing
        return (index for index in self._missing if self._units[index] not in self._claims)

    def _share(self, most: int) -> int:
        if self._units is None:
            return most
        return max(1, min(most, self.num_missing // PARTS_OF_THE_MISSING))

    def _claim(self, name: str, index: int) -> None:
        if self._units is not None and self._units[index] not in self._claims:
            unit = self._units[index]
            self._claims[unit] = name
            self._due[name].update(dict.fromkeys(self._chunks_of_unit[unit]))

    def _left_by_others(self, name: str) -> range:
        """A chunk that another one would be asked for, or else one that it owes."""
        may = [index for index in self._missing if self.wants(name, index)]
        asked = {index: self._asked.get(index, set()) for index in may}
        unasked = (index for index in reversed(may) if not asked[index])
        owed = (i for i in may if len(asked[i]) == 1 and name not in asked[i])
        index = next(unasked, next(owed, None))
        return range(0) if index is None else range(index, index + 1)

    def wants(self, name: str, index: int) -> bool:
        """Whether this source's bytes of a chunk will do."""
        if self._units is None:
            return self._sources[name][index] == self._wanted[index]
        return index in self._missing and (index != HEADER or name == self._leader)

    def arrived(self, name: str, index: int) -> None:
        """A chunk came that this source has named, and is wanted."""
        self._add(index, _Here(name, self._sources[name][index]))

    def known(self, name: str, index: int) -> None:
        """A wanted chunk is here without being sent: the digest that this source named says all."""
        self._add(index, _Here(name, self._sources[name][index], was_sent=False))

    def _add(self, index: int, here: "_Here") -> None:
        name = here.giver
        self._here[index] = here
        self._asked.pop(index, None)
        self._missing.pop(index, None)
        self._due[name].pop(index, None)

    def unwanted(self, name: str, index: int) -> None:
        """A chunk came that was wanted when it was asked for."""
        self._asked.get(index, set()).discard(name)

    def giver(self, index: int) -> str | None:
        """The source of a chunk that is here; None for one that is not."""
        return self._here[index].giver if index in self._here else None

    def givers(self) -> Counter[str]:
        """How many of the chunks that are here each has sent, or the own checkpoint has held."""
        here = (self._here[i] for i in range(len(self._wanted)) if i in self._here)
        return Counter(chunk.giver for chunk in here if chunk.was_sent)

    def _is_done(self, index: int) -> bool:
        here = self._here.get(index, _Here(OWN, b""))
        if here.digest == self._wanted[index]:
            return True
        return self._units is not None and index != HEADER and here.giver != OWN

    def _choose(self) -> None:
        leaders = enumerate(self._sources[self._leader])
        self._wanted = [self._choice(index, digest) for index, digest in leaders]
        self._look_what_is_missing()

    def _look_what_is_missing(self) -> None:
        every = range(len(self._wanted))
        self._missing = dict.fromkeys(index for index in every if not self._is_done(index))

    def _choice(self, index: int, leaders: bytes) -> bytes:
        if index == HEADER or len(self._sources) < 3 or self._units is not None:
            return leaders
        named = Counter(digests[index] for digests in self._sources.values())
        most = max(named.values())
        best = sorted(digest for digest, times in named.items() if times == most)
        return leaders if leaders in best else best[0]


# --- merkle ---------------------------------------------------------------------------------------
DIGEST_BYTES: Final = 32
_LEAF: Final = "loco-peer v1 state chunk"
_NODE: Final = "loco-peer v1 state merkle node"
_ROOT: Final = "loco-peer v1 state merkle root"


def digest_of(chunk: bytes | bytearray | memoryview) -> bytes:
    """Leaf digest of one chunk: 32 bytes."""
    return blake3.blake3(chunk, derive_key_context=_LEAF).digest()


def root_of(digests: Sequence[bytes]) -> bytes:
    """Root over the chunk digests in order: 32 bytes.

    Raises:
        ValueError: no digest, or one of another length than 32 bytes.
    """
    if not digests or any(len(digest) != DIGEST_BYTES for digest in digests):
        raise ValueError(f"a root needs at least one digest, each of {DIGEST_BYTES} bytes")
    level = list(digests)
    while len(level) > 1:
        level = [_node(level[i : i + 2]) for i in range(0, len(level), 2)]
    return _derive(_ROOT, len(digests).to_bytes(8, "big") + level[0])


def list_matches_root(digests: Sequence[bytes], root: bytes) -> bool:
    """Whether this list of chunk digests, as somebody sent it, is the one that `root` names."""
    well_formed = bool(digests) and all(len(digest) == DIGEST_BYTES for digest in digests)
    return well_formed and root_of(digests) == root


def _node(pair: list[bytes]) -> bytes:
    return pair[0] if len(pair) == 1 else _derive(_NODE, pair[0] + pair[1])


def _derive(context: str, data: bytes) -> bytes:
    return blake3.blake3(data, derive_key_context=context).digest()
