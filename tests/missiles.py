"""Bytes that a stranger throws at peers."""

import random
import struct

from protocol.limits import (
    MAX_CHUNKS_PER_FRAGMENT,
    MAX_CONTRIBUTION_WEIGHT,
    MAX_COUNT,
    MAX_FRAGMENTS,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
)
from protocol.wire.content_messages import GetParts, GetState, SpecReply
from protocol.wire.fields import Message
from protocol.wire.fragment_messages import (
    ChunkResult,
    Contribution,
    FragmentSettled,
    GetChunkState,
    GetResult,
    GetStamps,
    NoResult,
    Result,
    Stamp,
    mask_of,
)
from protocol.wire.frames import FRAME_VERSION, MAGIC, encode_frame
from protocol.wire.messages import Hello, Leaving, Propose, Received, Vector, encode_message
from protocol.wire.versions import SPOKEN

DIGEST = "0" * 32
SHORT_DIGEST = bytes(16)


def hello(protocols: tuple[str, ...] = SPOKEN, run_id: str | None = None) -> Hello:
    return Hello(
        software="raw 0.0.1",
        protocols=protocols,
        run_id=run_id,
        incarnation=1,
        addresses=(),
        swarm_time_s=1.0,
        state="training",
        round=1 << 40,
        layout_digest=None,
    )


def prefix(
    header_bytes: int, payload_bytes: int, magic: bytes = MAGIC, version: int = FRAME_VERSION
) -> bytes:
    return struct.pack("<3sBIQ", magic, version, header_bytes, payload_bytes)


def framed(message: Message, payload: bytes = b"") -> bytes:
    return encode_frame(encode_message(message), len(payload)) + payload


def missiles() -> dict[str, bytes]:
    """What is thrown at each protocol."""
    garbage = random.Random(0).randbytes(100_000)
    whole = framed(hello())
    return {
        "garbage": garbage,
        "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "version of the future": prefix(10, 0, version=255) + bytes(10),
        "garbage in a frame": prefix(64, 0) + garbage[:64],
        "deep nesting": prefix(MAX_HEADER_BYTES, 0) + b"\x91" * MAX_HEADER_BYTES,
        "unknown type": prefix(6, 0) + b"\x81\xa1t\xa2zz",
        "header too long": prefix(MAX_HEADER_BYTES + 1, 0) + bytes(MAX_HEADER_BYTES + 1),
        "payload too long": prefix(len(whole) - 16, MAX_PAYLOAD_BYTES) + whole[16:],
        "payload where none belongs": framed(Leaving()) + whole,
        "answers to no question": framed(SpecReply(bytes(32), bytes(64)), b"{}"),
        "a receipt for nothing": framed(Received(DIGEST, DIGEST)),
        "a vector of nothing": framed(Vector(DIGEST, 1, 1, "int8", 1, DIGEST), bytes(1000)),
        "state of another run": framed(GetState(DIGEST, 0)) + garbage,
        "chunks of nothing": framed(GetParts(DIGEST * 2, ((1 << 31) - 1,) * 16)) + garbage,
        "proposal of another run": framed(Propose(DIGEST, 1, 1, False, DIGEST, "int8", 1, 1, 1))
        + garbage,
        "hello, then garbage": whole + garbage,
        "hello, then a frame cut short": whole + prefix(100, 0) + bytes(10),
    }


def fragment_missiles(run_id: str, stranger: str) -> dict[str, bytes]:
    """What is well formed, of the right run, and nonsense all the same."""
    stamp = Stamp(0, MAX_COUNT, MAX_COUNT, SHORT_DIGEST)
    beyond = Stamp(MAX_CHUNKS_PER_FRAGMENT - 1, 0, 0, SHORT_DIGEST)

    def contribution(
        *stamps: Stamp, fragment: int = 0, cycle: int = 0, weight: int = 1
    ) -> Contribution:
        steps = tokens = MAX_COUNT
        return Contribution(
            run_id, fragment, cycle, weight, steps, tokens, stamps, (), (), bytes(64)
        )

    result = Result(
        run_id,
        0,
        MAX_COUNT,
        stranger,
        1,
        (stranger,),
        (1,),
        (SHORT_DIGEST,),
        (ChunkResult(0, MAX_COUNT, MAX_COUNT, SHORT_DIGEST, mask_of([0]), SHORT_DIGEST),),
        (),
        bytes(64),
    )
    return {
        "codes too long": encode_frame(encode_message(contribution(stamp)), MAX_PAYLOAD_BYTES),
        "codes of a wrong length": framed(contribution(stamp), bytes(1000)),
        "codes of no chunk": framed(contribution(), bytes(1000)),
        "codes of a chunk that there is not": framed(contribution(beyond), bytes(1000)),
        "codes of a chunk twice": framed(contribution(stamp, stamp), bytes(1000)),
        "a fragment that there is not": framed(contribution(fragment=MAX_FRAGMENTS - 1)),
        "nothing, for a cycle to come": framed(contribution(cycle=MAX_COUNT, weight=0)),
        "weight, for no codes": framed(contribution(weight=MAX_CONTRIBUTION_WEIGHT)),
        "a result that nobody signed": framed(result),
        "stamps of another run": framed(GetStamps(DIGEST, 0)),
        "stamps of no fragment": framed(GetStamps(run_id, MAX_FRAGMENTS - 1)),
        "a chunk that there is not": framed(GetChunkState(run_id, 0, beyond.chunk)),
        "a result of a time to come": framed(GetResult(run_id, 0, MAX_COUNT, 0)),
        "through with all cycles": framed(FragmentSettled(run_id, 0, MAX_COUNT, SHORT_DIGEST)),
        "no result, ever": framed(NoResult(run_id, 0, MAX_COUNT)),
    }
