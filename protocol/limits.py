"""Every bound of the protocol, in one place.

Nothing that a peer's bytes can reach grows without one of these. A bound that is passed is a
`RemoteProtocolError` (they did it) or a counted refusal, never a surprise for somebody else.
"""

from typing import Final

# --- frames ---------------------------------------------------------------------------------------
MAX_HEADER_BYTES: Final = 64 * 1024
"""Longest msgpack header of a frame."""
MAX_PAYLOAD_BYTES: Final = 1 << 36
"""Longest payload a frame may announce (64 GiB: an int8 vector of 60e9 parameters)."""
MAX_CONTROL_PAYLOAD_BYTES: Final = 4 * 1024 * 1024
"""Longest payload accepted where no particular size is expected."""

# --- records in the directory ---------------------------------------------------------------------
MAX_RECORD_BYTES: Final = 200
RECORD_SHARDS: Final = 8
MAX_RECORDS_PER_SHARD: Final = 64
MAX_RECORD_ADDRESSES: Final = 3

# --- membership -----------------------------------------------------------------------------------
MAX_LINKS: Final = 64
"""Lasting links to other peers held at once."""
MAX_ADDRESSES_PER_PEER: Final = 16
MAX_PEERS_PER_EXCHANGE: Final = 64
"""Peers named in one peer-exchange message."""
MAX_MEMBERS: Final = 4096

# --- gossip ---------------------------------------------------------------------------------------
MAX_PROPOSAL_TRIES: Final = 32
MAX_HELD_PROPOSALS: Final = 16
"""Proposals of others held unanswered at once; a further one is refused as busy."""

STRIPE_FROM_BYTES: Final = 8 * 1024 * 1024
"""A shorter contribution travels on the stream that it was agreed on."""
MAX_STRIPES: Final = 24
"""Further streams over which one exchange moves a long contribution."""
PIECE_BYTES: Final = 1 << 20
"""What a stripe carries at a time; the last piece may be shorter."""

# --- fragments ------------------------------------------------------------------------------------
MAX_CHUNKS_PER_FRAGMENT: Final = 64
"""Pieces of a fragment that are averaged each by itself."""
MAX_FRAGMENTS: Final = 1024
MAX_FRAGMENTS_FREE: Final = 64
"""Fragments for which one beat says that a partner is looked for; further ones wait their turn."""
MAX_CONTRIBUTORS: Final = 63
"""Peers in one average of a fragment."""
MIN_CHUNK_VALUES: Final = 8192
"""Below this size a chunk's messages would weigh more than 1% of its codes."""

# --- pipelines ------------------------------------------------------------------------------------
MAX_RELAYS_OF_PATH: Final = 63
"""Peers that a microbatch visits beside its data peer."""
MAX_LINK_VECTOR_BYTES: Final = 16 * 1024
"""What one peer says of its links, signature included."""
MAX_SNAPSHOT_BYTES: Final = MAX_CONTROL_PAYLOAD_BYTES
"""The vectors of all peers of a pipeline, from which paths are planned."""

# --- state transfer -------------------------------------------------------------------------------
STATE_CHUNK_BYTES: Final = 1 << 20
MAX_STATE_READERS: Final = 4
MAX_SPEC_BYTES: Final = 256 * 1024
MAX_BLOB_BYTES: Final = 64 * 1024 * 1024
"""Largest blob (tokenizer, small corpus file) served by a peer."""
