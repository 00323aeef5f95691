"""The final averaging: who meets whom so that all peers end with the mean of all.

The idea. After the last training step, and only then, peers wait for each other. N peers that see
the same roster (all peers that take part, sorted) meet by the bits of their places: in meeting b,
place i meets place i XOR 2^(b-1). After log2 N meetings each has the mean of all, up to what the
code rounds off.

    N = 6: places 0 .. 3 make the cube, 4 and 5 are over
    meeting 0    4 to 0, 5 to 1          both take the mean; 0 and 1 now stand for two peers
    meeting 1    0 with 1, 2 with 3      weighted by how many peers each stands for
    meeting 2    0 with 2, 1 with 3
    meeting 3    0 to 4, 1 to 5          4 and 5 take over the result

The rules
  1. A peer has *ended* when its last round of training is averaged. It then waits until all others
     that train have ended, for WAIT_ROUNDS rounds at most (matchmaking.py), but MIN_WAIT_S at
     least; one that still trains then takes no part, and takes over the result as a joiner does.
     Where peers choose the length of their rounds it waits for as long as an exchange may last.
  2. A meeting is held only between peers with the same roster (its digest is in the proposal). The
     peer with the lower place asks.
  3. A meeting that fails is left out, and counted; the plan goes on, because the others rely on it.
  4. For each meeting that is left out because the two rosters differ, a peer meets a random one
     when its plan is over, as in training: then the mean is reached nearly, not exactly.
  5. A peer that is over takes the result from one other alone, whoever the ids make that. The mean
     of all is half as far from the mean of two as one peer from another; a result that is further
     away moves it no further than a partner in training would, and its own share counts.

Source: recursive doubling (Thakur, Rabenseifner and Gropp 2005).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import blake3

MIN_WAIT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """One exchange of the plan, as one of the two sees it.

    Attributes:
        number: in the plan; the same for both.
        asks: whether we ask.
        own_share: weight of our weights in the mean that we take: 0 to 1.
    """

    number: int
    partner: str
    asks: bool
    own_share: float


def roster_digest(roster: Iterable[str]) -> str:
    """Digest of the peers that take part: 32 hex digits, the same for equal sets."""
    return blake3.blake3("/".join(sorted(roster)).encode()).hexdigest(length=16)


def meetings(roster: Sequence[str], own_id: str) -> tuple[Meeting, ...]:
    """The meetings of one peer, in order; none for a peer alone.

    Args:
        roster: all that take part, ourselves among them, in any order.
    """
    places = sorted(roster)
    own = places.index(own_id)
    num_bits = len(places).bit_length() - 1
    cube = 1 << num_bits
    if own >= cube:
        partner = places[own - cube]
        return (
            Meeting(0, partner, asks=False, own_share=0.5),
            Meeting(num_bits + 1, partner, asks=False, own_share=0.0),
        )
    planned = []
    over = own + cube < len(places)
    if over:
        planned.append(Meeting(0, places[own + cube], asks=True, own_share=0.5))
    for bit in range(num_bits):
        other = own ^ (1 << bit)
        ours, theirs = _stand_for(places, own, bit), _stand_for(places, other, bit)
        share = ours / (ours + theirs)
        planned.append(Meeting(bit + 1, places[other], asks=own < other, own_share=share))
    if over:
        planned.append(Meeting(num_bits + 1, places[own + cube], asks=True, own_share=1.0))
    return tuple(planned)


def _stand_for(places: Sequence[str], place: int, bits: int) -> int:
    """How many peers a place of the cube stands for after the meetings of the first `bits` bits."""
    cube = 1 << (len(places).bit_length() - 1)
    first = place >> bits << bits
    return sum(1 + (each + cube < len(places)) for each in range(first, first + (1 << bits)))
