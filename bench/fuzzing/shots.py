"""The words of a hostile peer on one stream: one to three messages, most of them of the right kind.

A shot is a message that may be said, or the header of one that is damaged, and a payload; to a
relay it is a payload alone. Volleys are drawn beforehand, from a seed; what the victim has said on
the stream, and the signatures and digests that a liar can make, are put in when the shot is fired
(`Gunner`).
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import blake3
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from peer.averaging.diloco.fragment_messages import length_of
from peer.codec import BLOCK, code_digest, codes_as_tensor, get_codec
from peer.network.identity import Identity
from peer.network.relay import HOP, STOP
from protocol.errors import LocoError
from protocol.wire import (
    content_messages,
    directory_messages,
    fragment_messages,
    messages,
    stage_messages,
)
from protocol.wire.fields import Message
from protocol.wire.fragment_messages import Contribution, Result, signed_contribution, signed_result
from protocol.wire.frames import encode_frame
from protocol.wire.messages import Vector, encode_message
from protocol.wire.versions import CONTENT, DIRECTORY, FRAGMENT, GOSSIP, HELLO, REACH, STAGE

from .headers import KINDS, damaged_headers, messages_of
from .relays import said_to_relays
from .values import World, fields_of

CODEC: Final = get_codec("int8")
"""That of the swarms that are shot at."""

T = TypeVar("T")

FILES: Final = {
    fragment_messages.__name__: FRAGMENT,
    stage_messages.__name__: STAGE,
    content_messages.__name__: CONTENT,
    directory_messages.__name__: DIRECTORY,
}
OF_PAIRS: Final = (
    messages.Propose,
    messages.Accept,
    messages.Vector,
    messages.Misread,
    messages.Blocks,
    messages.Received,
    messages.Join,
    messages.Piece,
    messages.AskSettled,
    messages.SettledReply,
)
CONVERSATIONS: Final = (HELLO, GOSSIP, CONTENT, FRAGMENT, STAGE, REACH, DIRECTORY, HOP, STOP)
PER_RELAY: Final = 6
"""Volleys at a relay for one of another type, and shots: all that it is told is of one."""
PART_ADAPTED: Final = 0.7
"""The share of fields that follow the victim, which has just said what they are to be."""
PART_KNOWN: Final = 0.3
"""The share of other fields that take a value of the run, where it has some."""
PART_OWN: Final = 0.8
"""The share of messages that belong to the conversation in which they are said."""
PART_WAITING: Final = 0.5
PART_FITTED: Final = 0.8
"""The share of messages whose digest or signature is right, where they need one."""


@dataclass(frozen=True, slots=True)
class RelayMessage:
    """In place of a message of ours, where the payload is all that is said."""


Kind = type[Message] | type[RelayMessage]


@dataclass(frozen=True, slots=True)
class Shot:
    """One frame: a message, or the header of a damaged one; and what follows it."""

    message: Message | RelayMessage
    damaged: bytes | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class Volley:
    """The shots of one stream.

    Attributes:
        waits: whether the end of the other side is waited for.
    """

    protocol: str
    shots: tuple[Shot, ...]
    waits: bool


def kinds_of(protocol: str) -> tuple[Kind, ...]:
    """The messages of a conversation."""
    return (RelayMessage,) if protocol in (HOP, STOP) else messages_in(protocol)


def messages_in(protocol: str) -> tuple[type[Message], ...]:
    """Those of a conversation of ours."""
    return tuple(kind for kind in KINDS if _conversation_of(kind) == protocol)


def _conversation_of(kind: type[Message]) -> str:
    if kind in OF_PAIRS:
        return GOSSIP
    if kind in (messages.Whereabouts, messages.Seen):
        return REACH
    return FILES.get(kind.__module__, HELLO)


def drawn(strategy: st.SearchStrategy[T], count: int, number: int) -> list[T]:
    """So many examples, the same for a number; the simplest ones are not the first."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def note(example: T) -> None:
        found.append(example)

    note()
    random.Random(number).shuffle(found)
    return found


@st.composite
def shots(draw: Callable[..., Any], kind: type[Message], world: World) -> Shot:
    """Messages of this type, a third of them damaged."""
    message = draw(messages_of(kind, world))
    damaged = draw(damaged_headers(message)) if draw(st.integers(0, 2)) == 0 else None
    return Shot(message, damaged, draw(payloads(kind, world)))


def payloads(kind: type[Message], world: World) -> st.SearchStrategy[bytes]:
    """Payloads that may follow a message, and some that must not."""
    few = st.binary(max_size=64)
    if not kind.max_payload_bytes:
        return st.one_of(st.just(b""), st.just(b""), st.just(b""), few)
    return st.one_of(*([st.sampled_from(world.codes)] * 3 if world.codes else []), few)


class Magazine:
    """Volleys put together, by a seed, from a pool of shots of each type.

    Args:
        protocols: the conversations that victims take part in.
        pool: shots of each type. Drawing them is what takes time.
    """

    def __init__(self, world: World, protocols: Sequence[str], pool: int, number: int) -> None:
        self._protocols = protocols
        self._chance = random.Random(number)
        self._shots: dict[Kind, list[Shot]] = {
            kind: drawn(shots(kind, world), pool, number) for kind in KINDS
        }
        relayed = said_to_relays(world.named.get("peer_id", ()))
        said = drawn(relayed, PER_RELAY * pool, number)
        self._shots[RelayMessage] = [Shot(RelayMessage(), None, each) for each in said]

    def volleys(self, examples: int) -> Iterator[Volley]:
        """So many that begin with each type of message, on the conversation it belongs to."""
        begun = [
            (protocol, kind)
            for protocol in self._protocols
            for kind in kinds_of(protocol)
            for _ in range(examples * (PER_RELAY if kind is RelayMessage else 1))
        ]
        self._chance.shuffle(begun)
        for protocol, kind in begun:
            kinds = [kind, *(self._kind(protocol) for _ in range(self._chance.randrange(3)))]
            said = tuple(self._chance.choice(self._shots[kind]) for kind in kinds)
            yield Volley(protocol, said, waits=self._chance.random() < PART_WAITING)

    def answers(self, protocol: str) -> Iterator[Shot]:
        """Shots without end."""
        while True:
            yield self._chance.choice(self._shots[self._kind(protocol)])

    def _kind(self, protocol: str) -> Kind:
        """Mostly one that belongs to the conversation."""
        every: Sequence[Kind] = kinds_of(protocol) if self._chance.random() < PART_OWN else KINDS
        return self._chance.choice(every)


class Gunner:
    """Makes frames of shots: with what the victim has said, and with signatures of our own."""

    def __init__(self, identity: Identity, world: World, number: int) -> None:
        self._identity = identity
        self._world = world
        self._chance = random.Random(number)

    def frame(self, shot: Shot, heard: Mapping[str, Any]) -> bytes:
        """The bytes of a frame."""
        header, payload = shot.damaged, shot.payload
        if isinstance(shot.message, RelayMessage):
            return payload
        if header is None:
            message = self._adapted(shot.message, heard)
            if self._chance.random() < PART_FITTED:
                message = self._fitted(message, payload)
            header = encode_message(message)
        return encode_frame(header, len(payload)) + payload

    def _adapted(self, message: Message, heard: Mapping[str, Any]) -> Message:
        """The same about what the victim has spoken of, and the run has."""
        kind: type = type(message)
        for field in fields_of(kind):
            known = self._world.named.get(field.name, ())
            if field.name in heard and self._chance.random() < PART_ADAPTED:
                message = _changed(message, field.name, heard[field.name])
            elif known and self._chance.random() < PART_KNOWN:
                message = _changed(message, field.name, self._chance.choice(known))
        return message

    def _fitted(self, message: Message, payload: bytes) -> Message:
        """The same with a digest or signature that is right."""
        match message:
            case Vector():
                return replace(message, digest=blake3.blake3(payload).hexdigest(length=16))
            case Contribution():
                stamps = message.stamps[:1] if self._chance.random() < 0.5 else message.stamps
                return self._told(replace(message, stamps=stamps), payload)
            case Result():
                return self._signed(message, payload)
        return message

    def _told(self, message: Contribution, payload: bytes) -> Contribution:
        """A contribution of ours: true of the codes, if they are codes and of one chunk."""
        count, codes, length = len(message.stamps), memoryview(bytearray(payload)), 1.0
        if payload and CODEC.validate(codes_as_tensor(codes)):
            length = length_of(CODEC, codes, len(payload) // CODEC.code_bytes(BLOCK) * BLOCK)
        told = replace(message, digests=(_digest(payload),) * count, lengths=(length,) * count)
        return signed_contribution(told, self._identity.sign)

    def _signed(self, result: Result, payload: bytes) -> Result:
        """A result of ours; the codes are of its last chunk, if they are codes at all."""
        chunks = tuple({chunk.chunk: chunk for chunk in result.chunks}.values())
        carried: tuple[int, ...] = ()
        if chunks and payload:
            chunks = (*chunks[:-1], replace(chunks[-1], digest=_digest(payload)))
            carried = (chunks[-1].chunk,)
        statements = (bytes(16),) * len(result.contributors)
        mine = replace(
            result,
            owner=self._identity.peer_id,
            statements=statements,
            chunks=chunks,
            carried=carried,
        )
        return signed_result(mine, self._identity.sign)


def _digest(payload: bytes) -> bytes:
    """That of codes of one chunk, if they are codes."""
    if not payload or len(payload) % CODEC.code_bytes(BLOCK):
        return bytes(16)
    return code_digest(CODEC, memoryview(payload))


def _changed(message: Message, name: str, value: Any) -> Message:
    """The same with another value, where the field takes it."""
    try:
        changed = replace(message, **{name: value})
        encode_message(changed)
    except (LocoError, ValueError):
        return message  # fields of one name need not be of one kind
    return changed


def said_in(message: Message) -> dict[str, Any]:
    """The values in a message of the victim, by the names of its fields."""
    return {field.name: getattr(message, field.name) for field in fields(message)}
