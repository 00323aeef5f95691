"""Averages of what an owner has collected, and audits of what other owners have made.

Which contributions go into which average is decided in protocol/diloco/collecting.py; what is
audited, and what follows, in protocol/diloco/audits.py. Here are buffers, arithmetic, and the
streams on which owners open what they have signed.

A contribution that is longer than most others is clipped to a little more than their length
(protocol/plausible.py), so that none of them pulls the mean far. Two have no majority: the shorter
is the measure. Lengths are those that contributions tell, so that everybody who works the average
out again comes to the same; they were held against the codes before.

The average of one leaf is worked out again by the same arithmetic, bit for bit. That is blocking
work, for any thread. The codec is one's own: it holds scratch memory.

An owner is given FRAGMENT_STALL_S to open, because its line may be full of what it averages; a
stream that breaks is opened again until then. Our own averages are kept until MAX_OPENABLE newer
ones are there, and no longer than three times that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
import trio

from peer.codec import (
    Codec,
    code_digest,
    codes_as_tensor,
    get_codec,
    leaf_digests,
    leaf_of,
    leaves_of_chunk,
    values_of_leaf,
)
from peer.network.conversation import Conversation
from peer.runtime import Network, PeerId, Work
from protocol.address.peer_id import Sign
from protocol.diloco import audits
from protocol.diloco.commands import Audit, Average, Averages
from protocol.errors import LocoError, Refused, RemoteProtocolError
from protocol.fragment.leaf_tree import path_of
from protocol.limits import MAX_CONTRIBUTION_WEIGHT, MAX_EVIDENCE_BYTES, MAX_OPENABLE
from protocol.outcomes import AuditOutcome, RefusalReason
from protocol.plausible import contribution_shares
from protocol.wire.fragment_messages import (
    ChunkResult,
    Contribution,
    GetOpening,
    Opening,
    Proof,
    Result,
    mask_of,
    signed_result,
)
from protocol.wire.versions import FRAGMENT

from . import nesterov
from .fragment_messages import FRAGMENT_STALL_S
from .outer_fragments import OuterFragments


# --- our own averages ---------------------------------------------------------------------------
@dataclass(eq=False)
class ChunkAverages:
    """Averages the contributions to the chunks that we own."""

    _group: str
    _own_id: PeerId
    _incarnation: int
    _outer: OuterFragments
    _sign: Sign
    trims: bool = field(kw_only=True)
    _scratch: torch.Tensor = field(default_factory=partial(torch.empty, 0))

    def averaged(self, order: Average) -> Averages | None:
        """The result of a collection; none for values at the bound of what codes take."""
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
                nesterov.WeightedCodes(codes_as_tensor(codes[peer_id]), share)
                for peer_id, share in zip(contributors, shares, strict=True)
            ],
            self._outer.codec,
            num_values,
            codes_as_tensor(out),
            self._scratch,
            trims=self.trims,
        )

    def _shares(self, lengths: Sequence[float]) -> list[float]:
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


# --- leaf average ---------------------------------------------------------------------------------
def leaf_average(
    codec: Codec, num_values: int, opened: Sequence[audits.OpenedLeaf], *, trims: bool
) -> bytes | None:
    """The codes of a leaf; None if what went in has no average that codes take.

    Raises RemoteProtocolError: codes that are malformed: no owner may take them.
    """
    size = codec.code_bytes(num_values)
    weighted = [nesterov.WeightedCodes(codes_as_tensor(codes), share) for codes, share in opened]
    if any(len(each.codes) != size or not codec.validate(each.codes) for each in weighted):
        raise RemoteProtocolError("a contribution whose codes are malformed")
    out = torch.empty(size, dtype=torch.uint8)
    try:
        nesterov.average_codes(weighted, codec, num_values, out, trims=trims)
    except ValueError:
        return None
    return out.numpy().tobytes()


def opening_of(
    codec: Codec, index: int, inputs: Sequence[tuple[Contribution, memoryview]]
) -> bytes:
    """This leaf of each contribution to a chunk, given with its codes."""
    return audits.pack_opening(
        (message, leaf_of(codec, codes, index), path_of(leaf_digests(codec, codes), index))
        for message, codes in inputs
    )


def audit(
    codec: Codec,
    num_values: int,
    leaf: audits.Leaf,
    codes: memoryview,
    opening: bytes,
    *,
    trims: bool,
) -> tuple[AuditOutcome, bytes]:
    """The outcome of an audit, and the proof of a lie.

    Args:
        num_values: of the chunk.
        codes: the result's, which are here.
    """
    ours, size = leaf_of(codec, codes, leaf.index), values_of_leaf(num_values, leaf.index)
    try:
        average = leaf_average(codec, size, audits.check_opening(leaf, opening), trims=trims)
    except RemoteProtocolError:
        return AuditOutcome.UNOPENED, b""
    if average == ours:
        return AuditOutcome.TRUE, b""
    path = path_of(leaf_digests(codec, codes), leaf.index)
    found = audits.Evidence(leaf.result, leaf.chunk, leaf.index, ours, path, opening)
    return AuditOutcome.LIE, found.packed()


def check_evidence(codec: Codec, num_values: int, found: audits.Evidence, *, trims: bool) -> None:
    """Raises RemoteProtocolError: this does not show that the owner has lied."""
    checked = found.checked(leaves_of_chunk(num_values))
    size = values_of_leaf(num_values, found.index)
    if leaf_average(codec, size, checked, trims=trims) == found.codes:
        raise RemoteProtocolError("evidence against an owner whose average follows")


# --- fragment audits ------------------------------------------------------------------------------
AGAIN_S: Final = 2.0
"""After a stream that broke, or an owner that opens to as many already as it can."""


@dataclass(frozen=True, slots=True)
class _Made:
    order: Average
    result: Result
    at_s: float


@dataclass(eq=False)
class FragmentAudits:
    """Works averages of other owners out again, and opens ours to those that do."""

    _group: str
    _network: Network
    _outer: OuterFragments
    _work: Work
    trims: bool = field(kw_only=True)
    _made: dict[tuple[int, int], _Made] = field(default_factory=dict)

    # --- our own results --------------------------------------------------------------------------
    def keep(self, order: Average, result: Result) -> None:
        now_s = trio.current_time()
        self._made[result.fragment, result.cycle] = _Made(order, result, now_s)
        for key, made in list(self._made.items()):
            # After a doubt others ask too.
            if len(self._made) > MAX_OPENABLE or now_s - made.at_s > 3 * FRAGMENT_STALL_S:
                del self._made[key]

    async def answer(self, talk: Conversation, asked: GetOpening) -> None:
        made = self._made.get((asked.fragment, asked.cycle))
        of_chunk = None if made is None else made.result.chunk(asked.chunk)
        count = leaves_of_chunk(self._outer.chunk_values(asked.fragment, asked.chunk))
        if made is None or of_chunk is None or asked.leaf >= count:
            await talk.refuse(RefusalReason.UNAVAILABLE, "I have no such average to open")
            return
        codes, messages = made.order.codes[asked.chunk], made.order.contributions
        inputs = [(messages[p], codes[p]) for p in made.result.contributors_of(of_chunk)]
        opening = await self._work.run(opening_of, self._codec(), asked.leaf, inputs)
        await talk.send(Opening(), opening)

    # --- those of others --------------------------------------------------------------------------
    async def audit(self, order: Audit) -> tuple[AuditOutcome, bytes]:
        result, chunk = order.result, order.chunk
        num_values = self._outer.chunk_values(result.fragment, chunk)
        count = leaves_of_chunk(num_values)
        leaf = audits.Leaf(result, chunk, order.draw % count, count)
        opening = None
        with trio.move_on_after(FRAGMENT_STALL_S):
            opening = await self._opening(leaf)
        if opening is None:
            return AuditOutcome.UNOPENED, b""
        look = partial(audit, trims=self.trims)
        return await self._work.run(look, self._codec(), num_values, leaf, order.codes, opening)

    async def _opening(self, leaf: audits.Leaf) -> bytes | None:
        """The opening that the owner shows; None if it refuses, or sends something else."""
        result, network = leaf.result, self._network
        asked = GetOpening(self._group, result.fragment, result.cycle, leaf.chunk, leaf.index)
        while True:
            try:
                async with Conversation(await network.open_stream(result.owner, FRAGMENT)) as talk:
                    await talk.send(asked)
                    _, opening = await talk.receive(Opening, max_payload_bytes=MAX_EVIDENCE_BYTES)
                    return opening
            except (Refused, RemoteProtocolError) as error:
                if not isinstance(error, Refused) or error.reason is not RefusalReason.TOO_MANY:
                    return None
            except LocoError:
                pass
            await trio.sleep(AGAIN_S)

    async def check(self, message: Proof, proof: bytes) -> None:
        """Raises RemoteProtocolError: this does not show that the owner has lied."""
        found = audits.read_proof(proof)
        result, fragments = found.result, self._outer.fragments
        if result.group != self._group or result.owner != message.owner:
            raise RemoteProtocolError("a proof about another group, or another owner")
        if isinstance(found, audits.Contradiction):
            await self._work.run(found.check)
            return
        known = result.fragment < len(fragments)
        if not known or found.chunk >= len(fragments[result.fragment].chunks):
            raise RemoteProtocolError(f"a proof about fragment {result.fragment}")
        num_values = self._outer.chunk_values(result.fragment, found.chunk)
        look = partial(check_evidence, trims=self.trims)
        await self._work.run(look, self._codec(), num_values, found)

    def _codec(self) -> Codec:
        """A codec for one thread alone."""
        return get_codec(self._outer.codec.name)
