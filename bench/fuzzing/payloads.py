"""Contents of payloads and signatures, damaged, and signed by the liar itself.

A field of a message is checked by its schema; these, and what is said to and by relays,
have readers of their own. Each takes bytes, and raises a LocoError where they are wrong, never
anything else.
"""

import json
from collections.abc import Callable
from typing import Any, Final

import msgpack
from hypothesis import strategies as st

from peer.network.identity import Identity
from peer.network.relay import HOP_ANSWER, parse_hop_request, parse_status
from protocol.admission.statements import DOMAIN as ADMISSION
from protocol.admission.statements import Invitation, Pass, Ruling, Token, Verdict
from protocol.errors import LocoError
from protocol.membership.records import decode_record_at, place_of, record_key
from protocol.routing.measures import LinkTimes, LinkVector, WorkTimes, decode_vector, encode_vector
from protocol.routing.snapshots import LinkSnapshot
from protocol.run.run_spec import RunSpec, parse_bytes

from . import relays
from .headers import damaged_trees

RUN_ID: Final = "ab" * 16
LIAR: Final = Identity(b"\1" * 32)
OTHER: Final = Identity(b"\2" * 32)
SIGNATURE_BYTES: Final = 64

Read = Callable[[bytes], object]
Seal = Callable[[Any], bytes]
"""The bytes of a damaged tree, under a signature that is right."""


def link_vector() -> tuple[Any, Seal, Read]:
    """Link times that a peer has measured, signed."""
    links = (LinkTimes(OTHER.peer_id, 1, 2, 3),)
    vector = LinkVector(LIAR.peer_id, 1, 1, 1, 4, WorkTimes(1, 2, 3), links)
    body = encode_vector(vector, RUN_ID, LIAR.sign)[:-SIGNATURE_BYTES]

    def sealed(tree: Any) -> bytes:
        data: bytes = msgpack.packb(tree)
        names = b"".join(len(n).to_bytes(2, "big") + n.encode() for n in (RUN_ID, LIAR.peer_id))
        return data + LIAR.sign(b"loco links 2\0" + names + data)

    return msgpack.unpackb(body), sealed, lambda data: decode_vector(data, RUN_ID)


def snapshot() -> tuple[Any, Seal, Read]:
    """Vectors of all."""
    tree, sealed, _ = link_vector()
    return [RUN_ID, [sealed(tree)]], msgpack.packb, lambda data: LinkSnapshot.read(data, RUN_ID)


def _statement(tree: list[Any], read: Read) -> tuple[Any, Seal, Read]:
    def sealed(tree: Any) -> bytes:
        body = msgpack.packb(tree)
        data: bytes = msgpack.packb([body, LIAR.sign(ADMISSION + body)])
        return data

    return tree, sealed, read


def ruling() -> tuple[Any, Seal, Read]:
    """A ban or the like."""
    tree = ["ruling", RUN_ID, str(next(iter(Verdict))), OTHER.peer_id, 1, LIAR.public_key]
    return _statement(tree, lambda data: Ruling.read(data, RUN_ID))


def invitation() -> tuple[Any, Seal, Read]:
    """An invitation, as a signer hands it out."""
    tree = ["invitation", RUN_ID, LIAR.public_key, LIAR.public_key, 2_000_000_000, 1]
    return _statement(tree, Invitation.read)


def shown_pass() -> tuple[Any, Seal, Read]:
    """The pass that a guest shows."""
    seed = b"\1" * 32  # the liar's own: it is its own guest
    token = Token.made(RUN_ID, 2_000_000_000, 1, seed=seed, signer=LIAR.public_key, sign=LIAR.sign)
    tree = ["pass", token.invitation.sealed, LIAR.peer_id]
    return _statement(tree, lambda data: Pass.read(data, RUN_ID))


def record() -> tuple[Any, Seal, Read]:
    """Where a peer is."""
    key = record_key("group", LIAR.peer_id)
    return (
        [1, 7, [b"\4\x7f\0\0\1\6\x0f\xa1"], 1.5e9],
        lambda tree: msgpack.packb(tree) + bytes(SIGNATURE_BYTES),
        lambda data: decode_record_at(place_of(key), LIAR.peer_id, data, lambda *_: True),
    )


def run_spec() -> tuple[Any, Seal, Read]:
    """The canonical bytes of a run spec."""

    def canonical(tree: Any) -> bytes:
        said = json.dumps(_as_json(tree), sort_keys=True, separators=(",", ":"))
        return said.encode(errors="replace")

    return json.loads(RunSpec().to_bytes()), canonical, parse_bytes


def relay_request() -> tuple[Any, Seal, Read]:
    """A question to a relay."""
    return relays.requests([OTHER.peer_id])[-1], relays.encoded, parse_hop_request


def relay_answer() -> tuple[Any, Seal, Read]:
    """A relay's answer."""
    return relays.ANSWERS["hop"], relays.encoded, lambda data: parse_status(data, *HOP_ANSWER)


KINDS: Final = {
    made.__name__: made
    for made in (
        *(link_vector, snapshot, ruling, invitation, shown_pass, record, run_spec),
        *(relay_request, relay_answer),
    )
}


def damaged_payloads(name: str) -> st.SearchStrategy[bytes]:
    """Payloads of this kind, with something wrong in them, or nothing."""
    tree, sealed, _ = KINDS[name]()
    trees = st.one_of(st.just(tree), damaged_trees(tree), damaged_trees(tree).flatmap(_again))
    deep = st.sampled_from([b"[" * 100_000, b"\x91" * 100_000, b'{"a":' * 30_000, b""])
    return st.one_of(trees.map(sealed), deep) if name == "run_spec" else trees.map(sealed)


def check_payload(name: str, data: bytes) -> bool:
    """Read it. Returns whether it is taken; raises what is no LocoError."""
    _, _, read = KINDS[name]()
    try:
        read(data)
    except LocoError:
        return False
    return True


def _again(tree: Any) -> st.SearchStrategy[Any]:
    return damaged_trees(tree) if isinstance(tree, list | dict) and tree else st.just(tree)


def _as_json(tree: Any) -> Any:
    """The same with names as JSON has them."""
    if isinstance(tree, dict):
        return {str(key): _as_json(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_as_json(value) for value in tree]
    return tree if isinstance(tree, str | int | float | None) else str(tree)
