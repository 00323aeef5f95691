"""The arms of the long study: a way, what liars send, and one of several defences.

    none      nothing is judged
    now       the daemon's: distances and lengths that are plausible, and clipped (plausible.py)
    trim      `now`, and owners take the trimmed mean (fragments alone)
    loss      `now`, and what does not help is not believed: who judges (a partner; an owner)
              measures the loss on a few blocks of its own before and after. What raises it, and
              helps less than the middle of the last partners' (of all contributions) does, is left
              out. An owner leaves out a third at most. (Templar's validators, arXiv 2505.21684)
    half      the same for what helps less than half as much as the middle
    centred   clipping around a centre that has momentum (arXiv 2012.10333). Fragments: each peer
              sends the momentum of its contributions, clipped around the last result by the middle
              distance; without liars that is the same outer step. Pairs: each peer keeps a
              centre of the weights that it was sent, moved on by its own slow moves, and clips
              what it is sent around that
    trust     FLTrust (arXiv 2012.13995): a move counts as its cosine with one's own (with the
              owner's contribution), no less than 0, at one's own length
    course    the same with the outer momentum, that all know, in the place of the owner's
              contribution (fragments alone)

Beside the lies of liars.py there is `sly`, made for `loss` and `half`: the mean of what the honest
send, and as much against them as a liar finds on blocks of its own to be let through.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .arms import NONE, PEERS, SHARES, Way

DEFENCES: Final[dict[Way, tuple[str, ...]]] = {
    "pairs": ("none", "now", "loss", "half", "centred", "trust"),
    "fragments": ("none", "now", "trim", "loss", "half", "centred", "trust", "course"),
}
MEASURING: Final = ("loss", "half")
ATTACKS: Final = ("collude", "inner", "flip", "scale-10", "sly")
SLY: Final = "sly"


@dataclass(frozen=True, slots=True)
class LongArm:
    """One company, what the last `liars` of it send, and how the others defend."""

    way: Way
    attack: str
    liars: int
    defence: str
    absent: int = 0

    @property
    def peers(self) -> int:
        """Those who are there."""
        return PEERS - self.absent

    @property
    def honest(self) -> int:
        """They come first."""
        return self.peers - self.liars

    @property
    def name(self) -> str:
        """In the results."""
        return f"{self.way}-{self.attack}-{self.liars or self.peers}-{self.defence}"

    @property
    def reference(self) -> str:
        """The arm of the same honest peers alone, with the daemon's defences."""
        return f"{self.way}-{NONE}-{self.honest}-now"


def arms_of(way: Way) -> Iterator[LongArm]:
    """All arms of a way: those without liars, then every lie against every defence."""
    for liars in SHARES:
        yield LongArm(way, NONE, 0, "now", absent=liars)
    for defence in DEFENCES[way]:
        yield LongArm(way, NONE, 0, defence)
        for attack in ATTACKS:
            for liars in SHARES:
                if attack != SLY or defence in ("now", *MEASURING):
                    yield LongArm(way, attack, liars, defence)
