"""What each method sends and when: the five of Streaming DiLoCo's table, and ours.

S is the bits of one average, sent by one peer in each direction; H the inner steps of a round; t
the time of a step; B the bandwidth of a peer in each direction.

The paper's methods (arXiv 2501.18512, table 4). What the paper leaves open is in `Reading`, one
choice for all cells:

- An all-reduce of M peers sends 2 (M - 1) / M vectors; the paper's M = 2, so one vector.
- Gradients and outer gradients have 16 bits each: the table's data-parallel and DiLoCo rows give
  the same S, and FP4 divides it by four. (fp32 outer gradients would double all rows but the first
  and the last.)
- The parameters are 1, 10 and 100 thousand million, all of them in the layers, the same number in
  each. One more fragment, which stands for embeddings and head, only takes its place in the
  schedule: fragment p of F is sent at step floor(p H / F). (The paper's 11, 5 and 2 steps between
  two sends are the whole part of H / F for 9, 17 and 37 fragments.)
- Fragments of 3 layers are strided: fragment p holds layers p, p + n, p + 2 n of n fragments.
- Overlap is tau = 1.

These were chosen by the table as a whole, none by a cell; `--full` shows what others would give.

Ours, with the same H (half of it doubles what NoLoCo needs) and the codes' own sizes, scales
included:

- NoLoCo: one int8 vector to one partner at the end of each round, whatever the number of peers.
  *Waiting*, a round lasts H t + S / B. *Overlapped*, the peer trains on and applies the vector when
  it is there. So it never stands still; what a slow link costs is that a round is not closed
  before the exchange of the round before is settled: it lasts max(H t, S / B). Utilisation here is
  the share that H t has of that, which is 1 as long as the rounds keep their H.
- Streaming DiLoCo: a chunk's owner gets the codes of all others and sends them the average, so a
  peer sends 2 (M - 1) / M vectors of codes. Weights leave after the step (`Sends.after_step`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from peer.codec import get_codec

from .simulator import Model, Sends, Values, utilisation

Curve = Callable[[Values], Values]
"""Utilisation at each bandwidth, in Gbit/s."""

MODELS: Final = (
    Model("1B", layers=24, step_s=0.1, parameters=1e9),
    Model("10B", layers=48, step_s=0.8, parameters=10e9),
    Model("100B", layers=108, step_s=4.9, parameters=100e9),
)
"""Models of table 4."""
INNER_STEPS: Final = 100
"""H, the inner steps of a round."""
LAYERS_PER_FRAGMENT: Final = 3

DATA_PARALLEL: Final = "data-parallel"
DILOCO: Final = "DiLoCo"
STREAMING: Final = "streaming"
OVERLAPPED: Final = "streaming, overlap"
OVERLAPPED_FP4: Final = "streaming, overlap, FP4"
NOLOCO_WAITING: Final = "our NoLoCo, int8, waiting"
NOLOCO: Final = "our NoLoCo, int8"
OUR_STREAMING_INT8: Final = "our streaming, int8"
OUR_STREAMING_4_BIT: Final = "our streaming, 4 bit"

BLOCK: Final = 128
INT8_BITS: Final = 8 * get_codec("int8").code_bytes(BLOCK) / BLOCK
FOUR_BIT_BITS: Final = 4 + 16 / BLOCK
"""Two codes in a byte, a scale of 16 bits for each block."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A reading of the paper: choices that it leaves open.

    Attributes:
        gradient_bits: of a parameter in a data-parallel step.
        outer_bits: of a parameter in DiLoCo and streaming without FP4.
        low_bits: the same with FP4.
        strided: fragments are every n-th layer, not neighbours.
        even: fragment p of F is sent at floor(p H / F); else one every floor(H / F) steps, so
            that rounds are shorter than H.
        delay_steps: tau of the overlap.
        after_step: a fragment leaves after the step, not layer by layer.
    """

    gradient_bits: float = 16
    outer_bits: float = 16
    low_bits: float = 4
    strided: bool = True
    even: bool = True
    delay_steps: int = 1
    after_step: bool = False


def paper_curves(model: Model, reading: Reading) -> dict[str, Curve]:
    """The five methods, in the table's order."""
    everything = tuple(range(model.layers))
    idle = ((),) * (INNER_STEPS - 1)
    fragments = fragments_at(model.layers, strided=reading.strided, even=reading.even)
    bits, tau, after = reading.outer_bits, reading.delay_steps, reading.after_step
    sends = {
        DATA_PARALLEL: Sends(reading.gradient_bits, (everything,)),
        DILOCO: Sends(bits, (*idle, everything), after_step=after),
        STREAMING: Sends(bits, fragments, after_step=after),
        OVERLAPPED: Sends(bits, fragments, tau, after),
        OVERLAPPED_FP4: Sends(reading.low_bits, fragments, tau, after),
    }
    return {name: partial(utilisation, model, sent) for name, sent in sends.items()}


def our_curves(model: Model, peers: int, delay_steps: int) -> dict[str, Curve]:
    """NoLoCo and streaming DiLoCo as this project sends them."""
    vectors = 2 * (peers - 1) / peers
    fragments = fragments_at(model.layers)
    round_s, vector_gbit = INNER_STEPS * model.step_s, INT8_BITS * model.parameters / 1e9
    streaming = {
        name: Sends(vectors * bits, fragments, delay_steps, after_step=True)
        for name, bits in ((OUR_STREAMING_INT8, INT8_BITS), (OUR_STREAMING_4_BIT, FOUR_BIT_BITS))
    }
    return {
        NOLOCO_WAITING: partial(waiting, round_s, vector_gbit),
        NOLOCO: partial(keeping_rounds, round_s, vector_gbit),
        **{name: partial(utilisation, model, sends) for name, sends in streaming.items()},
    }


def fragments_at(
    layers: int, *, strided: bool = True, even: bool = True
) -> tuple[tuple[int, ...], ...]:
    """The layers that are averaged at each step of a round."""
    count = layers // LAYERS_PER_FRAGMENT
    slots = count + 1
    apart = INNER_STEPS // slots
    at: list[tuple[int, ...]] = [()] * (INNER_STEPS if even else slots * apart)
    for fragment in range(count):
        first = fragment * LAYERS_PER_FRAGMENT
        neighbours = range(first, first + LAYERS_PER_FRAGMENT)
        step = fragment * INNER_STEPS // slots if even else fragment * apart
        at[step] = tuple(range(fragment, layers, count) if strided else neighbours)
    return tuple(at)


def waiting(round_s: float, sent_gbit: float, link_gbit_s: Values) -> Values:
    """Utilisation when training waits: H t / (H t + S / B)."""
    return round_s / (round_s + sent_gbit / link_gbit_s)


def keeping_rounds(round_s: float, sent_gbit: float, link_gbit_s: Values) -> Values:
    """Utilisation when rounds grow longer instead: H t / max(H t, S / B)."""
    return round_s / np.maximum(round_s, sent_gbit / link_gbit_s)
