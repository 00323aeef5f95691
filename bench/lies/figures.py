"""Counts of a run: what was averaged, what was lost, and how much of it was the liars'."""

from dataclasses import dataclass


@dataclass(slots=True)
class Figures:
    """Counts over the honest peers (pairs), or over the chunks of all cycles (fragments).

    Attributes:
        averaged: means that were taken; lost: those that were not, of them `lost_by_liars` since a
            liar had its part.
        weight: of liars' vectors in all means together, each mean having 1.
        honest: vectors of honest peers that were judged, of them `clipped` counted less.
    """

    averaged: int = 0
    lost: int = 0
    lost_by_liars: int = 0
    weight: float = 0.0
    honest: int = 0
    clipped: int = 0

    def note_averaged(self, weight: float) -> None:
        """A mean, with this weight of liars' vectors."""
        self.averaged += 1
        self.weight += weight

    def note_lost(self, *, by_liar: bool) -> None:
        """No mean came about."""
        self.lost += 1
        self.lost_by_liars += by_liar

    def note_honest(self, share: float) -> None:
        """An honest vector counted so much, 1 as any other."""
        self.honest += 1
        self.clipped += share < 1

    @property
    def lost_share(self) -> float:
        """Means that did not come about, of all."""
        return self.lost / max(1, self.averaged + self.lost)

    @property
    def liars_share(self) -> float:
        """Weight of the liars in what was averaged."""
        return self.weight / max(1, self.averaged)

    @property
    def clipped_share(self) -> float:
        """Honest vectors that counted less."""
        return self.clipped / max(1, self.honest)
