"""The manifest of a corpus is a stranger's: its sizes are bounded before anything follows them."""

import pytest

from protocol.content.manifest import DIGEST_BYTES, CorpusManifest, blob_name, parse_manifest
from protocol.limits import MAX_PIECES

CONTEXT_LENGTH = 8


def manifest_of(pieces: int) -> CorpusManifest:
    """One block of 8 bytes in each piece: the least that a piece can be."""
    return CorpusManifest(
        context_length=CONTEXT_LENGTH,
        piece_blocks=1,
        num_tokens=CONTEXT_LENGTH * pieces + 1,
        dtype="|u1",
        vocabulary_size=256,
        tokenizer_digest="bytes",
        held_out_blocks=1,
        held_out=blob_name(bytes(CONTEXT_LENGTH + 1)),
        digests=bytes(DIGEST_BYTES * pieces),
    )


def test_a_corpus_has_a_bounded_number_of_pieces():
    most = manifest_of(MAX_PIECES)
    assert parse_manifest(most.to_bytes()) == most
    with pytest.raises(ValueError, match=f"262145 pieces; 1 to {MAX_PIECES} can be"):
        parse_manifest(manifest_of(MAX_PIECES + 1).to_bytes())
