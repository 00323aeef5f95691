"""The outer step of DiLoCo on one chunk, and the average that it takes.

Idea. All peers hold the same slow weights phi and the same outer momentum v. After a round of inner
training peer i sends what it would take away from phi, its pseudo-gradient

    D_i = phi - theta_i                         theta_i: its fast weights

The owner of a chunk averages what arrived and codes the mean; every peer, the owner too, decodes
those codes to D and takes one step of SGD with Nesterov momentum:

    D   = 1/n sum_i share_i D_i                 share_i: 1, or less where D_i is clipped
    v   <- mu v + D
    phi <- phi - lr (D + mu v)

(DiLoCo, arXiv 2311.08105, algorithm 1; Streaming DiLoCo, arXiv 2501.18512, algorithm 2, with lr 0.4
and mu 0.9. The step is that of `torch.optim.SGD(nesterov=True)`.)

Rules:

- Equal bytes everywhere. Each line below is one correctly rounded fp32 operation in one order; no
  multiplication is joined with an addition, so machines with and without FMA agree:

      v'   = (mu v) + D
      phi' = phi - lr (D + (mu v'))             mu, lr: rounded to fp32 first

- D is what the *codes* of the result say, for the owner too.
- The average adds in the order of the contributions given (sorted peer ids): two owners that admit
  the same peers write the same codes.
- A factor is one division, rounded to fp32. Factors sum to 1 at most, except for rounding, so the
  mean of values within a code's bounds cannot overflow.
- One contribution alone is its own average: its codes are the result, not coded a second time.
- The last cycle of a run is a plain average (`PLAIN_AVERAGE`: lr 1, mu 0): phi - D, the mean of all
  theta except for what coding takes. Momentum leads to where training goes on; at the end, where it
  does not, the mean was better in every arm measured (docs/log.md).
- A step goes from one state to another and leaves the first as it was, so that it can be taken
  again with another result. Both may be the same memory; then it runs in place.

The trimmed mean of a chunk. Clipping by length (protocol/plausible.py) bounds how far one
contribution pulls in all; it says nothing of where it pulls. In each coordinate the values of n
contributions are put in order, the k = floor(0.3 n) on either side are left out, and the mean of
the rest is taken (Yin et al. 2018, arXiv 1803.01498). So k contributions, however they agree, move
no coordinate beyond what the others span.

- Of fewer than LEAST_TRIMMED contributions none is left out: clipping, which comes first in any
  case, is what there is then.
- Equal bytes everywhere, also of a leaf that is worked out by itself (averages.py): everything is
  done value by value, in one order, each operation rounded to fp32 by itself.

Steps and averages go through the codec's compiled loops where these fit (int8_nesterov.py).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import blake3
import numpy as np
import torch

from peer.codec import BLOCK, TILE, Codec
from peer.codec.compiled import in_chunks

# --- trimmed mean ---------------------------------------------------------------------------------
TRIMMED_TENTHS: Final = 3
LEAST_TRIMMED: Final = 5


def num_trimmed(contributions: int) -> int:
    """How many contributions are left out on either side."""
    return TRIMMED_TENTHS * contributions // 10 if contributions >= LEAST_TRIMMED else 0


def trimmed_mean(values_NC: torch.Tensor, out_C: torch.Tensor) -> None:
    """Write the mean of what is left of N clipped contributions, fp32."""
    num, left_C = len(values_NC), torch.zeros_like(out_C)
    out_C.zero_()
    for value_C in values_NC.sort(dim=0).values[num_trimmed(num) : num - num_trimmed(num)]:
        out_C.add_(value_C.mul_(1 / num))  # first: a sum of many might overflow
        left_C.add_(1 / num)
    out_C.div_(left_C)


# --- nesterov -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class NesterovFactors:
    learning_rate: float
    momentum: float


PLAIN_AVERAGE: Final = NesterovFactors(learning_rate=1.0, momentum=0.0)


@dataclass(frozen=True, slots=True)
class ChunkValues:
    """phi and v of a chunk, or of a piece of it: fp32 [C], of somebody's memory."""

    phi_C: torch.Tensor
    v_C: torch.Tensor

    def copy_from(self, other: "ChunkValues") -> None:
        self.phi_C.copy_(other.phi_C)
        self.v_C.copy_(other.v_C)


@dataclass(frozen=True, slots=True)
class WeightedCodes:
    """Valid codes of one peer's D_i, which is made `share` times as long."""

    codes: torch.Tensor
    share: float = 1.0


def average_codes(
    contributions: Sequence[WeightedCodes],
    codec: Codec,
    num_values: int,
    out_codes: torch.Tensor,
    scratch: torch.Tensor | None = None,
    *,
    trims: bool = False,
) -> None:
    """Write the codes of the mean of a chunk.

    Args:
        contributions: at least one, in the order of their peer ids.
        out_codes: uint8 [code_bytes(num_values)], overwritten; none of the contributions' memory.
        scratch: fp32, at least `num_values` long; taken anew if not given.
        trims: take the trimmed mean.

    Raises:
        ValueError: lengths do not fit (nothing was written); or the mean is beyond what the codec
            takes (`out_codes` is then undefined).
    """
    _check_codes([out_codes, *(each.codes for each in contributions)], codec, num_values)
    if len(contributions) == 1:
        out_codes.copy_(contributions[0].codes)
        return
    if scratch is None:
        scratch = torch.empty(num_values, dtype=torch.float32, device=out_codes.device)
    mean_C = scratch[:num_values]
    spare = torch.empty(min(TILE, num_values), dtype=torch.float32, device=out_codes.device)
    trims = trims and num_trimmed(len(contributions)) > 0
    for start in range(0, num_values, TILE):
        mean = mean_C[start : start + TILE]
        if trims:
            _trimmed_tile(contributions, codec, start, mean)
        else:
            _average_tile(contributions, codec, start, mean, spare)
    codec.encode(mean_C, out_codes)


def _average_tile(
    contributions: Sequence[WeightedCodes],
    codec: Codec,
    start: int,
    mean: torch.Tensor,
    spare: torch.Tensor,
) -> None:
    value = spare[: mean.numel()]
    mean.zero_()
    for each in contributions:
        factor = each.share / len(contributions)
        if fused_add(each.codes, factor, codec, start, mean):
            continue
        codec.decode(each.codes, value, start)
        mean.add_(value.mul_(factor))


def _trimmed_tile(
    contributions: Sequence[WeightedCodes], codec: Codec, start: int, mean: torch.Tensor
) -> None:
    values = torch.empty(len(contributions), mean.numel(), dtype=torch.float32, device=mean.device)
    for each, row in zip(contributions, values, strict=True):
        codec.decode(each.codes, row, start)
        row.mul_(each.share)
    trimmed_mean(values, mean)


def step_pieces(
    pieces: Sequence[tuple[ChunkValues, ChunkValues]],
    result_codes: torch.Tensor,
    codec: Codec,
    factors: NesterovFactors,
    *,
    keep: bool = False,
) -> None:
    """Take the outer step of a chunk that lies in several pieces of whole blocks, in order.

    Args:
        pieces: of each the state before, which is only read, and after, which is overwritten: other
            memory, or the very same.
        result_codes: codes of D for the whole chunk, valid ones.
        keep: the state to step from is in the memory of that after, and is copied to that before.

    Raises:
        ValueError: lengths or types do not fit; nothing was written.
    """
    for before, after in pieces:
        _check_state(before, after)
    cuts = [0, *accumulate(before.phi_C.numel() for before, _ in pieces)]
    _check_codes([result_codes], codec, cuts[-1])
    for start, (before, after) in zip(cuts, pieces, strict=False):
        vectors = (before.phi_C, before.v_C, after.phi_C, after.v_C)
        if not fused_step(result_codes, start, vectors, codec, factors, keep=keep):
            if keep:
                before.copy_from(after)
            _step_plainly(before, result_codes, start, codec, factors, after)


def _step_plainly(
    before: ChunkValues,
    result_codes: torch.Tensor,
    start: int,
    codec: Codec,
    factors: NesterovFactors,
    after: ChunkValues,
) -> None:
    num_values = before.phi_C.numel()
    scratch = torch.empty(2, min(TILE, num_values), device=before.phi_C.device)
    for first, last in pairwise([*range(0, num_values, TILE), num_values]):
        D, look_ahead = scratch[:, : last - first]
        codec.decode(result_codes, D, start + first)
        v = after.v_C[first:last]
        torch.mul(before.v_C[first:last], factors.momentum, out=v)
        v.add_(D)
        torch.mul(v, factors.momentum, out=look_ahead)
        look_ahead.add_(D).mul_(factors.learning_rate)
        torch.sub(before.phi_C[first:last], look_ahead, out=after.phi_C[first:last])


def _check_state(before: ChunkValues, after: ChunkValues) -> None:
    num_values = before.phi_C.numel()
    for vector in (before.phi_C, before.v_C, after.phi_C, after.v_C):
        if vector.dtype != torch.float32 or vector.dim() != 1 or not vector.is_contiguous():
            raise ValueError("phi and v must be contiguous fp32 vectors")
        if vector.numel() != num_values:
            raise ValueError(f"vectors of {num_values} and {vector.numel()} values in one step")


# --- compiled loops -------------------------------------------------------------------------------
WAY: Final = "diloco"
"""The name under which a codec's row has loops for both (protocol/run/ways.py)."""

Vectors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""phi and v before, phi and v after."""


def fused_step(
    result_codes: torch.Tensor,
    start: int,
    vectors: Vectors,
    codec: Codec,
    factors: NesterovFactors,
    *,
    keep: bool,
) -> bool:
    """Take the outer step of the chunk's values from `start` on; lengths and types are checked.

    Does nothing and returns False if no compiled loop fits. `keep` is as in `step_pieces`.
    """
    fused = codec.fused_loops(WAY, [result_codes], vectors, start)
    if fused is None:
        return False
    arrays = (*fused.codes[0], *(vector.numpy() for vector in vectors))
    numbers = np.float32(factors.learning_rate), np.float32(factors.momentum)
    in_chunks(
        lambda first, last: fused.kernels.step_blocks(*arrays, numbers, keep, first, last),
        vectors[0].numel() // BLOCK,
    )
    return True


def fused_add(
    codes: torch.Tensor, share: float, codec: Codec, start: int, mean: torch.Tensor
) -> bool:
    """Add a share of the values from `start` on. False, and nothing done, if no loop fits."""
    fused = codec.fused_loops(WAY, [codes], [mean], start)
    if fused is None:
        return False
    last = mean.numel() // BLOCK
    fused.kernels.add_blocks(*fused.codes[0], mean.numpy(), np.float32(share), 0, last)
    return True


def load_loops(codec: Codec) -> None:
    """Do everything once on zeros, so that all is compiled and loaded from now on."""
    state = ChunkValues(torch.zeros(BLOCK), torch.zeros(BLOCK))
    codes = torch.zeros(2, codec.code_bytes(BLOCK), dtype=torch.uint8)
    codec.validate(codes[0])
    average_codes([WeightedCodes(codes[0])] * 2, codec, BLOCK, codes[1])
    step_pieces([(state, state)], codes[1], codec, PLAIN_AVERAGE)


def vectors_of(pieces: Sequence[ChunkValues]) -> list[torch.Tensor]:
    """phi of all pieces, then v of all."""
    return [*(piece.phi_C for piece in pieces), *(piece.v_C for piece in pieces)]


def state_digest(pieces: Sequence[ChunkValues], cycle: int, num_steps: int, weight: int) -> bytes:
    """Digest of a chunk's state: 16 bytes. All that goes in is little endian.

    blake3 over the bytes of phi and of v (fp32), then three int64: the cycle of the step that made
    this state (-1 before the first), outer steps since the start of the run, and the weight that
    all of them admitted.
    """
    digest = blake3.blake3()
    for vector in vectors_of(pieces):
        values = vector.detach().cpu().numpy().astype("<f4", copy=False)
        digest.update(values.view(np.uint8).data)
    digest.update(struct.pack("<qqq", cycle, num_steps, weight))
    return digest.digest(length=16)


def _check_codes(all_codes: Sequence[torch.Tensor], codec: Codec, num_values: int) -> None:
    expected = codec.code_bytes(num_values)
    for codes in all_codes:
        if codes.numel() != expected:
            raise ValueError(f"codes have {codes.numel()} bytes, expected {expected}")
