"""The manifest of a corpus: sizes and digests of its pieces. The run spec names its digest.

Idea. A corpus is a row of tokens, cut into blocks of `context_length` (and one token more, which
the next block begins with). Blocks make *pieces* of a few MiB, each of use by itself. The manifest
lists their digests, and the run spec has the manifest's: a Merkle tree of two levels, so manifest
and pieces may come from anybody.

    run spec    data.manifest = blake3(manifest)
    manifest    digest of piece 0, of piece 1, ...; of what is held out
    piece k     blocks k * piece_blocks ..., each of the next context_length + 1 tokens

The blocks that every peer validates with are held out: one blob, fetched before a peer begins. The
same tokens, tokenizer and sizes give the same manifest.
"""

from typing import Annotated, Any, Final

import blake3
import msgspec
import numpy as np
from msgspec import structs

from protocol.limits import MAX_BLOB_BYTES, MAX_PIECE_BYTES, MAX_PIECES

DIGEST_BYTES: Final = 32
_VERSION: Final = 1
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Size = Annotated[int, msgspec.Meta(ge=1)]


class CorpusManifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sizes of a corpus, and the digests of its pieces, one after another.

    Attributes:
        num_tokens: to train on.
        dtype: of a token, as numpy writes it.
    """

    context_length: _Size
    piece_blocks: _Size
    num_tokens: _Count
    dtype: Annotated[str, msgspec.Meta(pattern=r"\A(\|u1|<u2|<u4)\Z")]
    vocabulary_size: _Size
    tokenizer_digest: str
    held_out_blocks: _Count
    held_out: str
    digests: bytes

    @property
    def num_blocks(self) -> int:
        return max(0, self.num_tokens - 1) // self.context_length

    @property
    def num_pieces(self) -> int:
        return -(-self.num_blocks // self.piece_blocks)

    @property
    def token_bytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize)

    def tokens_of(self, piece: int) -> tuple[int, int]:
        """The place of a piece's tokens in the corpus."""
        first = piece * self.piece_blocks
        last = min(self.num_blocks, first + self.piece_blocks)
        return first * self.context_length, last * self.context_length + 1

    def piece_bytes(self, piece: int) -> int:
        start, end = self.tokens_of(piece)
        return (end - start) * self.token_bytes

    @property
    def held_out_bytes(self) -> int:
        return self.held_out_blocks * (self.context_length + 1) * self.token_bytes

    def is_piece(self, piece: int, data: bytes | bytearray | memoryview) -> bool:
        at = piece * DIGEST_BYTES
        return digest_of(data) == self.digests[at : at + DIGEST_BYTES]

    @property
    def name(self) -> str:
        return blob_name(self.to_bytes())

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode((_VERSION, *structs.astuple(self)))


def parse_manifest(data: bytes) -> CorpusManifest:
    """Raises ValueError: it is no manifest, or of another version of loco-peer."""
    try:
        version, *fields = msgspec.msgpack.decode(data, type=list[Any])
        if version != _VERSION:
            raise ValueError(f"it is of version {version}; {_VERSION} is known here")
        manifest = msgspec.convert(fields, CorpusManifest)
    except msgspec.MsgspecError as error:
        raise ValueError(f"it has not the fields of a manifest: {error}") from error
    pieces = manifest.num_pieces
    if not 1 <= pieces <= MAX_PIECES:
        raise ValueError(f"it has {pieces} pieces; 1 to {MAX_PIECES} can be")
    if len(manifest.digests) != pieces * DIGEST_BYTES:
        raise ValueError("it has not a digest for each piece")
    if manifest.piece_bytes(0) > MAX_PIECE_BYTES or manifest.held_out_bytes > MAX_BLOB_BYTES:
        raise ValueError("it has pieces that are too large")
    return manifest


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    return blake3.blake3(data).digest()


def blob_name(data: bytes | bytearray | memoryview) -> str:
    """The name by which peers ask for a blob: 32 hex digits."""
    return blake3.blake3(data).hexdigest(length=16)
