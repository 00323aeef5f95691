"""Whether a partner's average helps: judged by our own loss, with it and without.

Theory. A vector may lie within all usual distances (protocol/plausible.py) and still lead nowhere.
Whether it does shows in the loss of a few held-out blocks, the same ones with the average and
without, so that the difference is known far better than either. That of honest partners is near
zero, and now and then below; so it is held against that of other partners.

Rules
  1. An average is refused if it raises our loss, and helps less than the middle of the last
     KEPT_AVERAGES averages does, in which each partner has one voice. So at most half of what comes
     is refused, wherever we are: a peer that is far from all others comes to them.
  2. Before LEAST_VOICES partners were measured nothing is refused: of fewer a liar may be the
     middle.
  3. A partner that was refused ODD_ONES times in a row is let through the next time, within what is
     plausible, which is clipped: so parts of a swarm come together again over whatever lies between
     them. It has rested before each, ever longer, so a liar has a few of these in an hour.
  4. At most TRIED_SHARE as many blocks are tried as the round trains. Where that is too little for
     LEAST_TOKENS, nothing is measured, and nothing refused.

The figures are those with which the rule was measured (docs/results/hostile.md).
"""

import math
from collections import deque
from typing import Final

from protocol.plausible import KEPT_AVERAGES, ODD_ONES, keep_newest, middle_of

LEAST_VOICES: Final = 3
TRIED_SHARE: Final = 0.0225
"""Blocks tried of those trained, which takes 1.5% of the time of their training: two losses of a
block take two thirds of it, as training has one pass forward and two back, which cost about the
same."""
LEAST_TOKENS: Final = 1024
MOST_BLOCKS: Final = 16


def trial_blocks(steps: int, batch_size: int, context_length: int, fragments: int) -> int:
    """Blocks to try an average on, after these steps, one of `fragments` a round (rule 4)."""
    blocks = min(MOST_BLOCKS, int(TRIED_SHARE * steps * batch_size / fragments))
    return blocks if blocks * context_length >= LEAST_TOKENS else 0


class Helpfulness:
    def __init__(self) -> None:
        self._gains: deque[tuple[str, float]] = deque(maxlen=KEPT_AVERAGES)
        self._refused: dict[str, int] = {}

    def takes(self, peer_id: str, gain: float) -> bool:
        """Whether to take an average that lowers our loss by `gain`."""
        gain = gain if math.isfinite(gain) else -math.inf
        helps = gain >= self._needed
        self._gains.append((peer_id, gain))
        refused = 0 if helps else self._refused.get(peer_id, 0) + 1
        keep_newest(self._refused, peer_id, refused % (ODD_ONES + 1))  # rule 3
        return self._refused[peer_id] == 0

    @property
    def _needed(self) -> float:
        """The least gain of an average that is taken (rules 1 and 2)."""
        senders, gains = [peer for peer, _ in self._gains], [gain for _, gain in self._gains]
        if len(set(senders)) < LEAST_VOICES:
            return -math.inf
        return min(0.0, middle_of(senders, gains))
