"""The kinds of field that occur in messages, each with its bounds.

What is here is the vocabulary (a digest, a count, an address); the checkers stand in fields.py, the
messages that use it in messages.py. Digests and run ids are lower-case hex; peer ids and names have
no character that means something to a shell, a path or a terminal.
"""

from typing import Annotated, Final

from protocol.limits import (
    MAX_ADDRESSES_PER_PEER,
    MAX_CONTROL_PAYLOAD_BYTES,
    MAX_ITERATION,
    MAX_RECORD_ADDRESSES,
    MAX_RELAYS_OF_PATH,
    MAX_STRIPES,
    STATE_CHUNK_BYTES,
)

from .fields import Integer, Many, Maybe, Real, Text

MAX_COUNT: Final = (1 << 63) - 1
MAX_SECONDS: Final = 1e12
MAX_SENTENCE_CHARS: Final = 1000
MAX_PROTOCOLS: Final = 32
MAX_STATE_BYTES: Final = MAX_CONTROL_PAYLOAD_BYTES // 32 * STATE_CHUNK_BYTES
"""Largest state whose chunk digests fit into one payload (128 GiB: 16e9 parameters)."""

_DIGEST: Final = Text(64, r"([0-9a-f]{2}){16,32}")
_PEER_ID: Final = Text(128, r"[0-9A-Za-z._-]+")
MAX_ADDRESS_CHARS: Final = 256
_ADDRESS: Final = Text(MAX_ADDRESS_CHARS, r"/[!-~]+")

Digest = Annotated[str, _DIGEST]
MaybeDigest = Annotated[str | None, Maybe(_DIGEST)]
PeerIdText = Annotated[str, _PEER_ID]
MaybePeerId = Annotated[str | None, Maybe(_PEER_ID)]
Name = Annotated[str, Text(32, r"[a-z0-9][a-z0-9_-]*")]
Sentence = Annotated[str, Text(MAX_SENTENCE_CHARS)]
Count = Annotated[int, Integer(0, MAX_COUNT)]
Iteration = Annotated[int, Integer(0, MAX_ITERATION)]
MaybeCount = Annotated[int | None, Maybe(Integer(0, MAX_COUNT))]
Vectors = Annotated[int, Integer(1, 2)]
Stripes = Annotated[int, Integer(0, MAX_STRIPES)]
Seconds = Annotated[float, Real(-MAX_SECONDS, MAX_SECONDS)]
MaybeSeconds = Annotated[float | None, Maybe(Real(-MAX_SECONDS, MAX_SECONDS))]
NonNegative = Annotated[float, Real(0, MAX_SECONDS)]
MaybeNonNegative = Annotated[float | None, Maybe(Real(0, MAX_SECONDS))]
Addresses = Annotated[tuple[str, ...], Many(_ADDRESS, MAX_ADDRESSES_PER_PEER)]
FewAddresses = Annotated[tuple[str, ...], Many(_ADDRESS, MAX_RECORD_ADDRESSES)]
Protocols = Annotated[
    tuple[str, ...], Many(Text(64, r"[a-z][a-z0-9-]*/[1-9][0-9]{0,5}"), MAX_PROTOCOLS)
]
RelayPath = Annotated[tuple[str, ...], Many(_PEER_ID, MAX_RELAYS_OF_PATH)]
RelayStages = Annotated[tuple[int, ...], Many(Integer(1, MAX_RELAYS_OF_PATH), MAX_RELAYS_OF_PATH)]
