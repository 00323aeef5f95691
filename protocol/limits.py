"""Bounds of the protocol: nothing that a peer's bytes can reach grows without one.

What passes a bound is a `RemoteProtocolError` (they did it) or a counted refusal, never a surprise
for somebody else. Bounds that concern one file stand there.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple


@dataclass(frozen=True, slots=True)
class Shares:
    """Places in all, and those of one peer and of one network (protocol/membership/book.py)."""

    total: int
    per_peer: int
    per_prefix: int


class StreamPace(NamedTuple):
    """How many a second, of one peer and of one network, and how many seconds' worth at once."""

    per_peer: float
    per_prefix: float
    burst_s: float


def forget_oldest(kept: dict[Any, Any], most: int) -> None:
    """Keep the newest of a table."""
    while len(kept) > most:
        del kept[next(iter(kept))]


# --- frames ---------------------------------------------------------------------------------------
MAX_COUNT: Final = (1 << 63) - 1
"""Largest whole number in a message or record."""
MAX_HEADER_BYTES: Final = 64 * 1024
MAX_PAYLOAD_BYTES: Final = 1 << 36
"""64 GiB: an int8 vector of 60e9 parameters."""
MAX_CONTROL_PAYLOAD_BYTES: Final = 4 * 1024 * 1024
"""Longest payload accepted where no particular size is expected."""

# --- streams --------------------------------------------------------------------------------------
INBOUND_STREAMS: Final = Shares(512, per_peer=32, per_prefix=192)
INBOUND_PACE: Final = StreamPace(50.0, per_prefix=150.0, burst_s=4.0)
"""Streams that are served a second, in the long run; others wait. A burst: stripes, and questions
after many chunks."""
MAX_IDLE_CONNECTIONS: Final = 64
"""Connections over which no stream of ours goes: those of strangers, and of newcomers."""
MAX_CONNECTIONS_PER_PEER: Final = 8
"""Two that dial each other at once, through a relay and around it, have four."""
MAX_EXPIRES_S: Final = 1e11
"""The latest Unix time that records and invitations may name."""
ANSWER_S: Final = 10.0
"""The time of another peer, or p2pd, for a short answer, or to be reached."""
DIAL_TIMEOUT_S: Final = 15
"""The time to connect to another peer; p2pd is told the same figure."""
SEND_STALL_S: Final = 60.0
"""A peer that takes nothing of what we send for so long is given up."""

# --- addresses, and records in the directory ------------------------------------------------------
MAX_ADDRESS_CHARS: Final = 256
"""Longest address as text, wherever one is read; more than a relay's and two peer ids take."""
MAX_RECORD_BYTES: Final = 200
RECORD_SHARDS: Final = 8
MAX_RECORD_ADDRESSES: Final = 3
MAX_RECORD_LIFETIME_S: Final = 3600.0
"""A record that expires later is not kept."""
RECORDS_OF_SHARD: Final = Shares(64, per_peer=1, per_prefix=16)
RECORDS: Final = Shares(4096, per_peer=4, per_prefix=512)
"""Records that one node of the table keeps, at all places. A peer has one for the group that it is
in, and for a while those of groups that it has left."""
PLACE_BYTES: Final = 20
"""SHA-1: of a key its place in the table, of a peer id its node id."""
NEAREST_NODES: Final = 20
"""Nodes that an answer names, and of one distance that a node remembers."""

# --- membership -----------------------------------------------------------------------------------
MAX_LINKS: Final = 64
LINK_PLACES: Final = Shares(2 * MAX_LINKS, per_peer=2, per_prefix=32)
"""Links that others have opened to us: of one peer a live one, and one that takes its place."""
LINK_MESSAGES_PER_S: Final = 50.0
"""Messages read of one link, in the long run; the rest waits on its line. A list of peers counts as
a second's worth."""
MAX_CLOCK_OFFSET_S: Final = 300.0
"""Clocks of two peers may differ by so much; further apart, one is wrong, and who knows which."""
MAX_DIALS: Final = 32
HEARSAY: Final = Shares(1024, per_peer=64, per_prefix=1024)
"""Peers known by name alone, and those that one peer has named."""
HEARSAY_DIALS: Final = Shares(16, per_peer=8, per_prefix=16)
MAX_HEARSAY_TRIES: Final = 3
MAX_ADDRESSES_PER_PEER: Final = 16
MAX_PEERS_PER_EXCHANGE: Final = 64
MAX_MEMBERS: Final = 4096

# --- relays and dial-back -------------------------------------------------------------------------
RESERVATIONS: Final = Shares(64, per_peer=1, per_prefix=32)
CIRCUITS: Final = Shares(128, per_peer=16, per_prefix=64)
"""Places at a relay, and circuits that are opened through it."""
STRANGERS_SHARE: Final = 1 / 16
"""The share of a relay's rate for circuits of peers that it does not know: enough for a hello."""
DIAL_BACKS: Final = Shares(MAX_LINKS, per_peer=1, per_prefix=32)
"""Peers whose addresses we try in DIAL_BACK_EVERY_S."""
MAX_DIAL_BACK_ADDRESSES: Final = 4
DIAL_BACK_EVERY_S: Final = 20.0

# --- admission ------------------------------------------------------------------------------------
MAX_STATEMENT_BYTES: Final = 512
MAX_STATEMENTS_PER_MESSAGE: Final = 64
MAX_RULINGS: Final = 4096
MAX_PASSES: Final = 4096
MAX_AMENDMENTS: Final = 64
RUN_SECRET_BYTES: Final = 16

# --- gossip ---------------------------------------------------------------------------------------
MAX_PROPOSAL_TRIES: Final = 32
MAX_HELD_PROPOSALS: Final = 16
"""Proposals of others held unanswered at once; a further one is refused as `too_many`."""
STRIPE_FROM_BYTES: Final = 8 * 1024 * 1024
"""A shorter contribution travels on the stream that it was agreed on."""
MAX_STRIPES: Final = 24
"""Further streams over which one exchange moves a long contribution."""
PIECE_BYTES: Final = 1 << 20
"""Bytes that a stripe carries at a time; the last piece may be shorter."""

# --- fragments ------------------------------------------------------------------------------------
MAX_CHUNKS_PER_FRAGMENT: Final = 64
MAX_FRAGMENTS: Final = 1024
MAX_FRAGMENTS_FREE: Final = 64
"""Fragments for which one beat looks for a partner; further ones wait their turn."""
MAX_CONTRIBUTORS: Final = 256
"""Peers in one average of a fragment: more than the links that a peer holds."""
MAX_CONTRIBUTION_WEIGHT: Final = 1
MIN_CHUNK_VALUES: Final = 8192
"""The messages of a smaller chunk would weigh more than 1% of its codes."""
MAX_EVIDENCE_BYTES: Final = MAX_CONTROL_PAYLOAD_BYTES
"""Room for one leaf of all contributions to a chunk, with their statements."""
MAX_CONVICTED: Final = 256
"""Owners remembered as liars, with the evidence."""
MAX_KEPT_EVIDENCE_BYTES: Final = 4 * MAX_EVIDENCE_BYTES
MAX_AUDITS: Final = 32
"""Results that are audited at once; a further one is not."""
MAX_OPENABLE: Final = 8
"""Results of our own that can be audited: the newest, each with the codes it was made of."""

# --- pipelines ------------------------------------------------------------------------------------
MAX_ITERATION: Final = 1 << 53
"""Nor does anybody believe a later epoch or round of another: far beyond any run, and far from what
does not fit a message."""
MAX_STAGES: Final = 64
"""Parts of a run's model, stages or experts, each on machines of its own; a path visits a stage at
most once."""
MAX_LINK_VECTOR_BYTES: Final = 16 * 1024
MAX_SNAPSHOT_BYTES: Final = MAX_CONTROL_PAYLOAD_BYTES
"""The vectors of all peers of a pipeline, from which paths are planned."""

# --- experts --------------------------------------------------------------------------------------
MAX_LOG_PROBS_BYTES: Final = 128 * 1024
"""A claim on a domain: fp16 of 64 blocks of 1,024 tokens. Also the tokens of a text."""

# --- content: run spec, blobs, states, corpora ----------------------------------------------------
MAX_PARTS_PER_REQUEST: Final = 16
MAX_ASKED: Final = 8
"""Pieces of a corpus, or units of a state, on their way to us at once."""
MAX_ASKED_PER_SOURCE: Final = 2
READERS: Final = Shares(16, per_peer=4, per_prefix=12)
"""Streams on which content is asked of us at once."""
MAX_READER_REQUESTS: Final = 64
"""Requests on one such stream, without those for parts of a state."""
STATE_CHUNK_BYTES: Final = 1 << 20
MAX_PARAMETERS: Final = MAX_CONTROL_PAYLOAD_BYTES // 32 * STATE_CHUNK_BYTES // 8
"""Parameters of a run's model: the digests of its state's chunks fit into one payload."""
MIN_FETCH_BYTES_PER_S: Final = 16 * 1024
"""A source that sends less is left for another one."""
MAX_TRANSFER_S: Final = 24 * 3600.0
"""Content that would take longer at that rate must come faster."""
MAX_SPEC_BYTES: Final = 256 * 1024
MAX_BLOB_BYTES: Final = 64 * 1024 * 1024
"""Largest blob (tokenizer, manifest of a corpus, what is held out of it) served by a peer."""
MAX_PIECES: Final = 1 << 18
"""Pieces of a corpus: each costs a joiner some hundred bytes of memory, and time with each request.
With pieces of the usual size that is 1 TiB of tokens."""
MAX_PIECE_BYTES: Final = 16 * 1024 * 1024 + 1024
"""Piece of a corpus; more than the largest `data.piece_kib`, for the token that a piece shares."""

MAX_REMEMBERED: Final = 1024
"""Results, lost microbatches and the like that are known of still; the oldest make room."""

# --- steps ----------------------------------------------------------------------------------------
EPSILON: Final = 1e-6
"""Nominal steps that are so near to a whole number are that: thirds of one, three times."""
