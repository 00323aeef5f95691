"""Two results that one owner has signed, of which one life of it can have signed but one.

An owner averages a cycle of a fragment once (owner.py: a collection that is over is not opened
again), and signs one result for all of its chunks. It has forgotten that when it is started again,
and may then sign another; so a result names the life that signed it, and of each life there is one
result for a fragment and cycle. Two that differ show that the owner told peers different things,
whatever went into them: no audit is needed, and both may follow from what they name.

    contradiction   msgpack [result, result]

Like evidence.py, which is about averages that do not follow, it is a proof that travels.
"""

from dataclasses import dataclass, replace
from typing import Self

import msgpack

from protocol.errors import RemoteProtocolError
from protocol.wire.fragment_messages import Result, signed_bytes
from protocol.wire.messages import decode_message, encode_message

from .evidence import Evidence, unpacked


def contradict(one: Result, other: Result) -> bool:
    """Whether one life of an owner cannot have signed both."""
    about, of = ((r.group, r.fragment, r.cycle, r.owner, r.incarnation) for r in (one, other))
    return about == of and signed_bytes(one) != signed_bytes(other)


@dataclass(frozen=True, slots=True)
class Contradiction:
    """See the top of the file."""

    one: Result
    other: Result

    @property
    def result(self) -> Result:
        """Either of them, for what both are about."""
        return self.one

    def packed(self) -> bytes:
        """Its bytes."""
        body = [encode_message(replace(each, carried=())) for each in (self.one, self.other)]
        packed: bytes = msgpack.packb(body)
        return packed

    @classmethod
    def of(cls, headers: tuple[bytes, bytes]) -> Self:
        """What two headers tell. Raises RemoteProtocolError: they are not results."""
        one, other = map(decode_message, headers)
        if isinstance(one, Result) and isinstance(other, Result):
            return cls(one, other)
        raise RemoteProtocolError("a contradiction of other things than results")

    def check(self) -> None:
        """Raises RemoteProtocolError: this does not show that the owner has lied."""
        if not contradict(self.one, self.other):
            raise RemoteProtocolError("two results that do not contradict each other")
        if not (self.one.is_genuine() and self.other.is_genuine()):
            raise RemoteProtocolError("a contradiction that its owner has not signed")


def read_proof(data: bytes) -> Evidence | Contradiction:
    """A proof as it came, of either kind. Raises RemoteProtocolError: it is none."""
    match unpacked(data, 6):
        case [bytes(one), bytes(other)]:
            return Contradiction.of((one, other))
        case _:
            return Evidence.read(data)
