"""Averages of what an owner has collected, coded and signed.

Which contributions go into which average is decided in protocol/diloco/owner.py; here are buffers
and arithmetic. All is blocking work, for one thread at a time.

A contribution that is longer than most others is clipped to a little more than their length
(protocol/plausible.py), so that none of them pulls the mean far. Two have no majority: the shorter
is the measure. Lengths are those that contributions tell, so that whoever works the average out
again comes to the same (protocol/diloco/audits.py); they were held against the codes before.
"""

from collections.abc import Mapping, Sequence

import torch

from peer.codec import codes_as_tensor
from peer.codec.leaves import code_digest
from peer.ports import PeerId
from protocol.diloco.fragment_events import Average, Averages, AveragesMade
from protocol.fragment.chunk_ledger import Stamp
from protocol.fragment.collection import Admitted
from protocol.membership.records import Sign
from protocol.plausible import contribution_shares
from protocol.wire.fragment_messages import ChunkResult, Result, mask_of, signed_result

from . import nesterov
from .outer_fragments import OuterFragments


class ChunkAverages:
    """See the top of the file.

    Args:
        trims: take the trimmed mean (nesterov.py).
    """

    def __init__(
        self,
        group: str,
        own_id: PeerId,
        incarnation: int,
        outer: OuterFragments,
        sign: Sign,
        *,
        trims: bool,
    ) -> None:
        self._trims = trims
        self._group = group
        self._own_id = own_id
        self._incarnation = incarnation
        self._outer = outer
        self._sign = sign
        self._scratch = torch.empty(0)

    def averaged(self, order: Average) -> AveragesMade:
        """The result of a collection; none for values at the very bound of what codes take."""
        try:
            return AveragesMade(order.fragment, order.cycle, self._averages(order))
        except ValueError:
            return AveragesMade(order.fragment, order.cycle, None)

    def _averages(self, order: Average) -> Averages:
        fragment = order.fragment
        num_bytes = sum(self._outer.chunk_code_bytes(fragment, chunk) for chunk in order.admitted)
        codes = self._outer.spare.take(num_bytes)
        parts = self._outer.split_codes(fragment, tuple(order.admitted), codes)
        for chunk, admitted in order.admitted.items():
            shares = self._shares(_lengths(order, chunk, admitted))
            self._average_chunk(fragment, chunk, admitted, shares, order.codes[chunk], parts[chunk])
        return Averages(self._signed(order, parts), codes, parts)

    def _average_chunk(
        self,
        fragment: int,
        chunk: int,
        admitted: Admitted,
        shares: Sequence[float],
        codes: Mapping[PeerId, memoryview],
        out: memoryview,
    ) -> None:
        num_values = self._outer.chunk_values(fragment, chunk)
        if len(self._scratch) < num_values:
            self._scratch = torch.empty(num_values)
        tensors = [codes_as_tensor(codes[peer_id]) for peer_id in admitted.weights]
        weights = admitted.weights.values()
        nesterov.average_codes(
            [nesterov.WeightedCodes(*each) for each in zip(tensors, weights, shares, strict=True)],
            self._outer.codec,
            num_values,
            codes_as_tensor(out),
            self._scratch,
            trims=self._trims,
        )

    def _shares(self, lengths: Sequence[float]) -> list[float]:
        """How much each contribution to a chunk counts."""
        return contribution_shares(lengths)

    def _signed(self, order: Average, parts: Mapping[int, memoryview]) -> Result:
        weights: dict[PeerId, int] = {}
        for admitted in order.admitted.values():
            weights.update(admitted.weights)
        contributors = tuple(sorted(weights))
        place = {peer_id: i for i, peer_id in enumerate(contributors)}
        codec = self._outer.codec
        chunks = tuple(
            _chunk_result(
                chunk,
                admitted.base,
                mask_of(place[p] for p in admitted.weights),
                code_digest(codec, parts[chunk]),
            )
            for chunk, admitted in order.admitted.items()
        )
        unsigned = Result(
            group=self._group,
            fragment=order.fragment,
            cycle=order.cycle,
            owner=self._own_id,
            incarnation=self._incarnation,
            contributors=contributors,
            weights=tuple(weights[peer_id] for peer_id in contributors),
            statements=tuple(order.contributions[p].statement for p in contributors),
            chunks=chunks,
            carried=tuple(order.admitted),
            signature=bytes(64),
        )
        return signed_result(unsigned, self._sign)


def _lengths(order: Average, chunk: int, admitted: Admitted) -> list[float]:
    """What the contributions to a chunk say of their lengths, in the order of the sum."""
    lengths = []
    for peer_id in admitted.weights:
        contribution = order.contributions[peer_id]
        place = contribution.place(chunk)
        assert place is not None
        lengths.append(contribution.lengths[place])
    return lengths


def _chunk_result(chunk: int, base: Stamp, mask: bytes, digest: bytes) -> ChunkResult:
    return ChunkResult(chunk, base.steps, base.weight, base.digest, mask, digest)
