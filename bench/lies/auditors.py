"""Honest peers that audit results: with the daemon's draws, openings and arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from peer.averaging.diloco.averages import audit, opening_of
from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.codec import code_digest, get_codec, leaves_of_chunk
from peer.network.identity import Identity
from protocol.diloco.audits import Audits, Leaf
from protocol.diloco.commands import Audit, Average, Averages, FragmentCommand, GroupSeen
from protocol.diloco.peers import Context, Peers, SendPlan
from protocol.outcomes import AuditOutcome
from protocol.wire.fragment_messages import signed_result

GROUP: Final = "ab" * 16


@dataclass(frozen=True, slots=True)
class Made:
    """The averages that honest owners make of a fragment, and the order that they follow."""

    order: Average
    averages: Averages


class Auditors:
    """The honest peers as auditors: each asks owners to open leaves, and convicts liars.

    Args:
        honest: those who audit.
        names: peer ids of all.

    Attributes:
        convicted: owners that were caught.
    """

    def __init__(
        self, honest: Sequence[Identity], names: Sequence[str], outer: OuterFragments
    ) -> None:
        self._outer = outer
        self._codec = get_codec(outer.codec.name)
        self.convicted: set[str] = set()
        self._audits = []
        self._wanted: list[FragmentCommand] = []
        for identity in honest:
            peers = Peers(identity.peer_id, len(outer.fragments))
            peers.seen = GroupSeen(0, frozenset(names), {})
            context = Context(
                SendPlan(GROUP, len(outer.fragments), outer.is_last), peers, self._wanted.append
            )
            self._audits.append(Audits(context, identity.sign(b"draws")[:32]))

    def without_lies(
        self,
        made: Made,
        owners: Sequence[str],
        results: Mapping[int, memoryview],
        identities: Sequence[Identity],
    ) -> dict[int, memoryview]:
        """Audit what each owner signs; the results of those that are not caught."""
        for identity in identities:
            own = {c: codes for c, codes in results.items() if owners[c] == identity.peer_id}
            if own and self._is_caught(made, identity, own):
                self.convicted.add(identity.peer_id)
        return {c: codes for c, codes in results.items() if owners[c] not in self.convicted}

    def _is_caught(self, made: Made, owner: Identity, own: Mapping[int, memoryview]) -> bool:
        codec, honest = self._codec, made.averages.result
        chunks = tuple(
            replace(chunk, digest=code_digest(codec, own[chunk.chunk]))
            for chunk in honest.chunks
            if chunk.chunk in own
        )
        unsigned = replace(honest, owner=owner.peer_id, chunks=chunks, carried=tuple(own))
        result = signed_result(unsigned, owner.sign)
        self._wanted.clear()
        for audits in self._audits:
            audits.arrived(result, own)
        orders = [each for each in self._wanted if isinstance(each, Audit)]
        return any(self._audited(made.order, each) is AuditOutcome.LIE for each in orders)

    def _audited(self, order: Average, asked: Audit) -> AuditOutcome:
        chunk = asked.chunk
        size = self._outer.chunk_values(order.fragment, chunk)
        count = leaves_of_chunk(size)
        leaf = Leaf(asked.result, chunk, asked.draw % count, count)
        names = asked.result.contributors_of(leaf.of_chunk)
        inputs = [(order.contributions[name], order.codes[chunk][name]) for name in names]
        opening = opening_of(self._codec, leaf.index, inputs)
        return audit(self._codec, size, leaf, asked.codes, opening, trims=False)[0]
