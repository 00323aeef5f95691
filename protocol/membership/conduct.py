"""What is held against peers for how they behave, for how long, and what follows from it.

Idea. A peer that sends what no honest peer sends is hostile or broken. One fault ends a stream;
many must not cost us as many streams. So faults add up to a score, and scores fade: a peer that was
mended comes back by itself.

Rules
  1. A fault adds its weight. A score halves every HALF_LIFE_S.
  2. From SLOWED_FROM on the peer's streams are served after a wait. From IGNORED_FROM on it is
     ignored, until its score has faded to TAKEN_BACK_AT: it is not linked, and not served.
  3. Only what breaks the protocol, or cannot be true, is a fault. What lines, disks and clocks do
     is none: streams that end, stall or come too late, a peer that is busy or was restarted. Nor
     is what views explain: an owner by another view, a partner of another round.
  4. Nobody else is told. What one peer holds against another moves nobody else (a liar would have
     honest peers ignored); a fault that all can prove is a matter for a ban.

Invariant: at most MAX_KEPT scores are kept, the highest ones.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

HALF_LIFE_S: Final = 300.0
SLOWED_FROM: Final = 2.5
IGNORED_FROM: Final = 7.5
"""Three faults of weight 1, and eight, within minutes: each fades a little until the next."""
TAKEN_BACK_AT: Final = 2.0
HIGHEST: Final = 32.0
"""No score is higher, so nobody is ignored for longer than twenty minutes after its last fault."""
SLOWED_S: Final = 2.0
"""The wait before a stream of a slowed peer is served."""
MAX_KEPT: Final = 1024
_FADED: Final = 0.05
"""Scores below this are forgotten."""


class Fault(StrEnum):
    """What is held against a peer."""

    BROKEN_RULE = "broken_rule"
    """It sent what the protocol does not allow."""
    BAD_VECTOR = "bad_vector"
    """Its vector had the wrong length, digest or layout, or was not finite."""
    IMPLAUSIBLE = "implausible"
    """Its values are much further away than those of others."""


WEIGHTS: Final = {Fault.BROKEN_RULE: 1.0, Fault.BAD_VECTOR: 2.0, Fault.IMPLAUSIBLE: 1.0}


@dataclass(slots=True)
class _Score:
    value: float
    of_s: float
    ignored: bool = False

    def at(self, now_s: float) -> float:
        return self.value * math.exp2((self.of_s - now_s) / HALF_LIFE_S)


class Conduct:
    """Scores of other peers. See the top of the file."""

    def __init__(self) -> None:
        self._scores: dict[str, _Score] = {}
        self.faults = dict.fromkeys(Fault, 0)

    def score(self, now_s: float, peer_id: str) -> float:
        """What is held against a peer now."""
        score = self._scores.get(peer_id)
        return 0.0 if score is None else score.at(now_s)

    def note(self, now_s: float, peer_id: str, fault: Fault) -> bool:
        """Add a fault; whether the peer is ignored from now on, and was not before."""
        self.faults[fault] += 1
        was_ignored = self.is_ignored(now_s, peer_id)
        value = min(HIGHEST, self.score(now_s, peer_id) + WEIGHTS[fault])
        ignored = was_ignored or value >= IGNORED_FROM
        self._scores[peer_id] = _Score(value, now_s, ignored)
        self._forget(now_s)
        return ignored and not was_ignored

    def is_ignored(self, now_s: float, peer_id: str) -> bool:
        """Whether a peer is not heard at all (rule 2)."""
        score = self._scores.get(peer_id)
        if score is None or not score.ignored:
            return False
        score.ignored = score.at(now_s) > TAKEN_BACK_AT
        return score.ignored

    def ignored(self, now_s: float) -> frozenset[str]:
        """The peers that are ignored."""
        return frozenset(peer for peer in self._scores if self.is_ignored(now_s, peer))

    def wait_s(self, now_s: float, peer_id: str) -> float:
        """For how long a stream of this peer waits before it is served."""
        return SLOWED_S if self.score(now_s, peer_id) >= SLOWED_FROM else 0.0

    def _forget(self, now_s: float) -> None:
        """Forget what has faded, and of too many the lowest scores."""
        kept = {peer: score for peer, score in self._scores.items() if score.at(now_s) > _FADED}
        while len(kept) > MAX_KEPT:
            del kept[min(kept, key=lambda peer: kept[peer].at(now_s))]
        self._scores = kept
