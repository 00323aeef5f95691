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
from protocol.diloco.commands import Average, Averages
from protocol.limits import MAX_CONTRIBUTION_WEIGHT
from protocol.membership.records import Sign
from protocol.plausible import contribution_shares
from protocol.wire.fragment_messages import ChunkResult, Result, mask_of, signed_result

from . import nesterov
from .outer_fragments import OuterFragments


class ChunkAverages:
    """Averages the contributions to the chunks that we own.

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

    def averaged(self, order: Average) -> Averages | None:
        """The result of a collection; none for values at the very bound of what codes take."""
        fragment = order.fragment
        num_bytes = sum(self._outer.chunk_code_bytes(fragment, chunk) for chunk in order.admitted)
        codes = self._outer.spare.take(num_bytes)
        parts = self._outer.split_codes(fragment, tuple(order.admitted), codes)
        try:
            for chunk in order.admitted:
                self._average_chunk(order, chunk, parts[chunk])
        except ValueError:
            return None
        return Averages(self._signed(order, parts), codes, parts)

    def _average_chunk(self, order: Average, chunk: int, out: memoryview) -> None:
        num_values = self._outer.chunk_values(order.fragment, chunk)
        if len(self._scratch) < num_values:
            self._scratch = torch.empty(num_values)
        contributors, codes = order.admitted[chunk].contributors, order.codes[chunk]
        told = (order.contributions[peer_id] for peer_id in contributors)
        shares = self._shares([each.length(chunk) for each in told])
        nesterov.average_codes(
            [
                nesterov.WeightedCodes(
                    codes_as_tensor(codes[peer_id]), MAX_CONTRIBUTION_WEIGHT, share
                )
                for peer_id, share in zip(contributors, shares, strict=True)
            ],
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
        of_chunks = (admitted.contributors for admitted in order.admitted.values())
        contributors = tuple(sorted(set().union(*of_chunks)))
        place = {peer_id: i for i, peer_id in enumerate(contributors)}
        codec = self._outer.codec
        unsigned = Result(
            group=self._group,
            fragment=order.fragment,
            cycle=order.cycle,
            owner=self._own_id,
            incarnation=self._incarnation,
            contributors=contributors,
            weights=(MAX_CONTRIBUTION_WEIGHT,) * len(contributors),
            statements=tuple(order.contributions[p].statement for p in contributors),
            chunks=tuple(
                ChunkResult(
                    chunk,
                    admitted.base.steps,
                    admitted.base.weight,
                    admitted.base.digest,
                    mask_of([place[peer_id] for peer_id in admitted.contributors]),
                    code_digest(codec, parts[chunk]),
                )
                for chunk, admitted in order.admitted.items()
            ),
            carried=tuple(order.admitted),
            signature=bytes(64),
        )
        return signed_result(unsigned, self._sign)
