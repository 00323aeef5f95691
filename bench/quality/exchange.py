"""The vectors that travel in a round, and what their receivers read out of them.

The codes of peer/codec go into the outer step as they are. What candidates read out goes there as
fp32, which is the same computation.

Candidates that were not built, and why: differences against a common reference need one, and random
pairs have none but the initial weights, from which all move away; slow weights sent in advance with
differences after them are two vectors, two bytes per value, as many as bf16 spends at once.

A node of a group of n sends 2 (n - 1) / n vectors: a ring's share for DiLoCo, one vector in a pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import torch

from peer.codec import BLOCK, Array, Codec, get_codec
from peer.codec import differences as diff

Groups = Sequence[Sequence[int]]


@dataclass(slots=True)
class Shared:
    """A round's vectors, as all members of a group read them.

    Attributes:
        codec: the code of `codes`.
        codes: of each replica.
        decoded: what each replica's codes say, fp32 [P].
        sent_bytes: by all nodes together.
        resent_blocks: blocks that had to be sent again, since the first reading was wrong.
    """

    codec: Codec
    codes: list[torch.Tensor]
    decoded: list[torch.Tensor]
    sent_bytes: float
    resent_blocks: int = 0


class Exchange(Protocol):
    """Carries vectors between the members of groups; may remember earlier rounds."""

    def share(self, thetas: Sequence[torch.Tensor], groups: Groups) -> Shared:
        """Exchange the weights of one round."""


@dataclass(slots=True)
class CodecExchange:
    """Exchange through a codec of the project: fp32, bf16 or int8."""

    codec: Codec

    def share(self, thetas: Sequence[torch.Tensor], groups: Groups) -> Shared:
        size = self.codec.code_bytes(thetas[0].numel())
        codes, decoded = [], []
        for theta_P in thetas:
            code = torch.empty(size, dtype=torch.uint8, device=theta_P.device)
            self.codec.encode(theta_P, code)
            read_P = torch.empty_like(theta_P)
            self.codec.decode(code, read_P)
            codes.append(code)
            decoded.append(read_P)
        return Shared(self.codec, codes, decoded, size * vectors_sent(groups))


@dataclass(slots=True)
class PackedExchange:
    """int8 codes as the codec `int8-diff` has pairs send them: packed, misread blocks again."""

    codec: Codec
    _expected: dict[int, diff.Floats] = field(default_factory=dict)
    """Replica to how far its next partner is expected in each block."""

    def share(self, thetas: Sequence[torch.Tensor], groups: Groups) -> Shared:
        shared = CodecExchange(self.codec).share(thetas, groups)
        shared.sent_bytes = 0.0
        payloads = [codes.cpu().numpy() for codes in shared.codes]
        for group in groups:
            if len(group) != 2:
                continue
            for own, other in (tuple(group), tuple(reversed(group))):
                self._send(own, payloads[own], payloads[other], shared)
            one, other = group
            apart = diff.apart_per_block(payloads[one], payloads[other])
            for own in group:
                self._expected[own] = diff.expected_after(apart, self._expected.get(own))
        return shared

    def _send(self, own: int, codes: Array, reader: Array, shared: Shared) -> None:
        expected = self._expected.get(own)
        widths = None if expected is None else diff.widths_for(codes, expected)
        if widths is None or diff.packed_bytes(widths) >= codes.size:
            shared.sent_bytes += codes.size
            return
        found = np.zeros_like(codes)
        bad = diff.unpack(diff.pack(codes, widths), reader, found)
        again = diff.codes_of_blocks(codes, bad)
        diff.put_blocks(found, bad, again)
        map_bytes = -(-bad.size // 8)
        shared.sent_bytes += diff.packed_bytes(widths) + len(again)
        shared.sent_bytes += map_bytes if bad.any() else 0
        shared.resent_blocks += int(bad.sum())
        if not np.array_equal(found, codes):  # the digest tells, and the rest is asked for
            shared.sent_bytes += len(diff.codes_of_blocks(codes, ~bad)) + map_bytes
            shared.resent_blocks += int((~bad).sum())


def vectors_sent(groups: Groups) -> float:
    """Vectors that all nodes together send."""
    return sum(2.0 * (len(group) - 1) for group in groups)


def as_shared(decoded: list[torch.Tensor], sent_bytes: float, resent_blocks: int = 0) -> Shared:
    """The vectors that were read out, as fp32 codes."""
    codes = [read_P.view(torch.uint8) for read_P in decoded]
    return Shared(get_codec("fp32"), codes, decoded, sent_bytes, resent_blocks)


def largest_of_blocks(x_P: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each block, as a column [P / BLOCK, 1]."""
    return x_P.view(-1, BLOCK).abs().amax(1, keepdim=True)


def rounded_up_step(step: torch.Tensor) -> torch.Tensor:
    """A step as it travels, two bytes: bf16, not below `step`; 1 where there is nothing to code."""
    rounded = (step * (1 + 2.0**-8)).to(torch.bfloat16).to(torch.float32)
    return rounded.masked_fill(rounded == 0, 1.0)


@dataclass(slots=True)
class Sent:
    """One vector under way: whole steps, and the blocks' steps."""

    steps: torch.Tensor
    """int64 [P / BLOCK, BLOCK]: the value in steps."""
    step: torch.Tensor
    """fp32 [P / BLOCK, 1]."""
    resent: int = 0

    def values(self) -> torch.Tensor:
        """The values that the steps stand for."""
        return (self.steps * self.step).reshape(-1).to(torch.float32)


def coarse(x_P: torch.Tensor, bits: int) -> Sent:
    """Blockwise rounding to `bits` bits, as the int8 code does it."""
    step = rounded_up_step(largest_of_blocks(x_P) / (2 ** (bits - 1) - 1))
    return Sent((x_P.view(-1, BLOCK) / step).round().to(torch.int64), step)


@dataclass(slots=True)
class CoarseExchange:
    """Raw weights in `bits` bits, to see how coarse is too coarse."""

    bits: int

    def share(self, thetas: Sequence[torch.Tensor], groups: Groups) -> Shared:
        decoded = [coarse(theta_P, self.bits).values() for theta_P in thetas]
        size = coded_bytes(thetas[0].numel(), self.bits)
        return as_shared(decoded, size * vectors_sent(groups))


def coded_bytes(num_values: int, bits: int) -> float:
    """Bytes of a vector in `bits` bits per value and two bytes per block."""
    return num_values * bits / 8 + num_values // BLOCK * 2


@dataclass(slots=True)
class ModuloExchange:
    """The low `bits` bits of each value, in steps; the receiver knows the rest: its own weights.

    A value is coded as k = round(x / step), of which k mod 2^bits travels. The receiver takes the
    number of that residue that is nearest to its own value, which is right if the two differ by
    less than half the range, 2^bits step / 2. So the step follows the *difference* of two replicas,
    not their size (Moniqua, arXiv 2002.11787). Rules:

    - The step of a block gives room for `margin` times the largest difference that the sender met
      there in its last exchange, at least for `FLOOR` times the root mean square of all. It is
      never above that of the plain code of as many bits.
    - One byte per block checks the reading: the sum of the parts that did not travel, weighted by
      their places, modulo 256. One value or two that are wrong by one range each cannot
      pass. A block that fails is sent again in raw int8.
    - A sender that has not exchanged yet does not know how far apart replicas are: raw int8.
    """

    bits: int
    margin: float
    _last: dict[int, torch.Tensor] = field(default_factory=dict)
    """Replica to the largest differences per block of its last exchange."""

    def share(self, thetas: Sequence[torch.Tensor], groups: Groups) -> Shared:
        num_values = thetas[0].numel()
        modulo_bytes = coded_bytes(num_values, self.bits) + num_values // BLOCK
        decoded = [theta_P.clone() for theta_P in thetas]
        sent_bytes, resent = 0.0, 0
        for group in groups:
            if len(group) != 2:
                continue
            for own, other in (tuple(group), tuple(reversed(group))):
                if own in self._last:
                    sent = self._sent(own, thetas[own], thetas[other])
                    sent_bytes += modulo_bytes + sent.resent * (BLOCK + 2)
                    resent += sent.resent
                else:
                    sent = coarse(thetas[own], 8)
                    sent_bytes += coded_bytes(num_values, 8)
                decoded[own] = sent.values()
            one, other = group
            difference = largest_of_blocks(decoded[one] - decoded[other])
            rms = (decoded[one] - decoded[other]).square().mean().sqrt()
            self._last[one] = self._last[other] = difference.clamp_min(FLOOR * float(rms))
        return as_shared(decoded, sent_bytes, resent)

    def _sent(self, own: int, theta_P: torch.Tensor, reference_P: torch.Tensor) -> Sent:
        """The values that a receiver with weights `reference_P` reads; bad blocks go twice."""
        range_ = 2**self.bits
        finest = largest_of_blocks(theta_P) / (range_ / 2 - 1)
        step = rounded_up_step((2 * self.margin * self._last[own] / range_).minimum(finest))
        x, reference = theta_P.view(-1, BLOCK), reference_P.view(-1, BLOCK)
        steps = (x / step).round().to(torch.int64)
        nearest = (reference / step).round().to(torch.int64)
        read = nearest + (steps - nearest + range_ // 2) % range_ - range_ // 2
        bad = (checksum(read, range_) != checksum(steps, range_)).unsqueeze(1)
        again = coarse(theta_P, 8)
        return Sent(
            torch.where(bad, again.steps, read),
            torch.where(bad, again.step, step),
            int(bad.sum()),
        )


FLOOR: Final = 3.0
"""Least difference that a block has room for, in roots of the mean square difference."""


def checksum(steps: torch.Tensor, range_: int) -> torch.Tensor:
    """The byte per block that checks a reading: of what did not travel."""
    weights = torch.arange(1, BLOCK + 1, device=steps.device)
    return (steps // range_ * weights).sum(1) % 256


def exchange_of(code: str) -> Exchange:
    """The exchange of this name, without memory of any round."""
    if code.startswith("modulo"):
        bits = int(code.removeprefix("modulo"))
        return ModuloExchange(bits, margin=4.0 if bits == 8 else 2.0)
    if code == "int4":
        return CoarseExchange(4)
    return (
        PackedExchange(get_codec(code)) if code == "int8-diff" else CodecExchange(get_codec(code))
    )
