"""Vectors that travel packed: how ours is packed, and how a partner's is read.

What is packed, and what bad blocks are, stands in peer/codec/differences.py; what is asked for
again in protocol/gossip/exchange.py. A vector is packed from the second average on, when it is
known how far partners are. Only vectors that were averaged with are learned from, because those are
plausible. What would not be shorter goes as it is. All of it is work for a thread.
"""

import blake3
import trio

from peer.codec import BLOCK, codes_as_tensor, get_codec
from peer.codec.differences import (
    Floats,
    MalformedPack,
    apart_per_block,
    blocks_of,
    codes_of_blocks,
    expected_after,
    pack,
    packed_bytes,
    put_blocks,
    unpack,
    widths_for,
)
from peer.facts import PackingFacts
from peer.runtime import Work
from protocol.errors import RemoteProtocolError
from protocol.gossip.exchange import Answering, Asking, Marks
from protocol.run.ways import CODECS


class Packer:
    """Packs the vectors of one lane, if its codec `packs`, and knows how far partners' were."""

    def __init__(self, codec: str, vectors: int, work: Work, facts: PackingFacts) -> None:
        self.packs = CODECS[codec].packs
        self.codec, self.vectors = codec, vectors
        self.facts = facts
        self.work = work
        self._expected: Floats | None = None

    async def packed(self, payload: memoryview) -> memoryview | None:
        """Our codes as differences; None where they had better go as they are."""
        if not self.packs:
            return None
        started_s = trio.current_time()
        packed = await self.work.run(self._pack, payload)
        self.facts.seconds += trio.current_time() - started_s
        return packed

    def _pack(self, payload: memoryview) -> memoryview | None:
        if self._expected is None:
            return None
        widths = widths_for(payload, self._expected, self.vectors)
        if packed_bytes(widths) >= len(payload):
            return None
        return memoryview(pack(payload, widths, self.vectors))

    async def learn(self, own: memoryview, theirs: memoryview) -> None:
        if self.packs:
            await self.work.run(self._learn, own, theirs)

    def _learn(self, own: memoryview, theirs: memoryview) -> None:
        apart = apart_per_block(own, theirs, self.vectors)
        self._expected = expected_after(apart, self._expected)

    def is_right(self, payload: memoryview, digest: str) -> bool:
        """Whether these codes have this digest, and can be decoded to finite values."""
        if blake3.blake3(payload).hexdigest(length=16) != digest:
            return False
        codec, size = get_codec(self.codec), len(payload) // self.vectors
        parts = (payload[i * size : (i + 1) * size] for i in range(self.vectors))
        return all(codec.validate(codes_as_tensor(part)) for part in parts)


class Reading:
    """Reads one partner's vector `into` memory, and answers the partner that reads our `own`."""

    def __init__(self, packer: Packer, own: memoryview, into: memoryview) -> None:
        self._packer = packer
        self.codec, self.vectors, self.packs = packer.codec, packer.vectors, packer.packs
        self._own, self.into = own, into
        self._digest = ""
        self._came = into
        self._asking: Asking | None = None
        self._answering: Answering | None = None
        self._wanted: Marks | None = None
        self._sent_again_bytes = 0

    def room(self, packed: int) -> memoryview:
        """Where their vector goes; `packed` is its bytes, as they say, or 0 for codes.

        Raises:
            RemoteProtocolError: it is not to be packed, or would not be shorter.
        """
        if not packed:
            self._came = self.into
            return self.into
        if not self.packs or packed >= len(self.into):
            raise RemoteProtocolError(f"{packed} bytes of packed codes, which none of these take")
        self._came = memoryview(bytearray(packed))
        return self._came

    async def take(self, digest: str) -> Marks | bool:
        """Their vector is in its room: whether it is right, or the blocks to ask for."""
        self._digest = digest
        facts, came, run = self._packer.facts, self._came, self._packer.work.run
        if came is self.into:
            facts.plain += self.packs
            return await run(self._packer.is_right, self.into, self._digest)
        blocks = blocks_of(len(self.into))
        self._asking = Asking(blocks)
        facts.packed += 1
        facts.blocks += blocks
        try:
            bad = await run(unpack, came, self._own, self.into, self.vectors)
        except MalformedPack:
            return False
        self._came = self.into
        return await self._next(bad if bad.any() else None)

    def room_for_blocks(self, num_bytes: int) -> memoryview:
        """Where the blocks go that we asked for. Raises RemoteProtocolError: we asked for none."""
        wanted = 0 if self._wanted is None else BLOCK * int(self._wanted.sum())
        if not wanted or num_bytes != wanted:
            raise RemoteProtocolError(f"{num_bytes} bytes of blocks, where {wanted} are due")
        return memoryview(bytearray(wanted))

    async def take_blocks(self, codes: memoryview) -> Marks | bool:
        """The blocks that we asked for are here; as `take`."""
        wanted, self._wanted = self._wanted, None
        await self._packer.work.run(put_blocks, self.into, wanted, codes, self.vectors)
        return await self._next(None)

    async def _next(self, bad: Marks | None) -> Marks | bool:
        packer = self._packer
        if bad is None and await packer.work.run(packer.is_right, self.into, self._digest):
            return True
        assert self._asking is not None
        self._wanted = self._asking.next(bad)
        if self._wanted is None:
            return False
        packer.facts.misread += int(self._wanted.sum()) if bad is not None else 0
        packer.facts.whole += bad is None
        return self._wanted

    def room_for_question(self, num_bytes: int) -> memoryview:
        """Where the map goes of blocks that they could not read. Raises RemoteProtocolError."""
        if not self.packs:
            raise RemoteProtocolError("a question for blocks, of codes that are not packed")
        if self._answering is None:
            self._answering = Answering(blocks_of(len(self._own)))
        if num_bytes != self._answering.map_bytes:
            raise RemoteProtocolError(f"a map of {num_bytes} bytes for blocks of ours")
        return memoryview(bytearray(num_bytes))

    async def answer(self, bits: memoryview) -> bytes:
        """The codes of the blocks that they could not read. Raises RemoteProtocolError."""
        assert self._answering is not None
        marks = self._answering.take(bits)
        codes = await self._packer.work.run(codes_of_blocks, self._own, marks, self.vectors)
        self._sent_again_bytes += len(codes)
        return codes

    def count_sent(self, num_bytes: int) -> None:
        """Our vector has arrived; this many bytes of it went out at first."""
        if self.packs:
            self._packer.facts.code_bytes += len(self._own)
            self._packer.facts.sent_bytes += num_bytes + self._sent_again_bytes
