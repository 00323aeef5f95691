"""Digests of the fragment exchange: of codes, and of where a peer stands with a fragment."""

from collections.abc import Iterable

import blake3

from protocol.fragment.chunk_ledger import Stamp
from protocol.wire.fragment_messages import DIGEST_BYTES


def short_digest(data: bytes | memoryview) -> bytes:
    """The digest of codes, for messages."""
    return blake3.blake3(data).digest(length=DIGEST_BYTES)


def digest_of_stamps(stamps: Iterable[Stamp]) -> bytes:
    """One digest of the states of all chunks of a fragment."""
    return short_digest(b"".join(stamp.digest for stamp in stamps))
