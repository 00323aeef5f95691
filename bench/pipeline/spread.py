"""How our time compares with each rival's over many settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from bench.pipeline.comparison import Comparison
from bench.pipeline.rivals import RIVALS


@dataclass(frozen=True, slots=True)
class Spread:
    """Comparisons in settings of one kind."""

    comparisons: Sequence[Comparison]

    def quartiles(self) -> Mapping[str, tuple[float, float, float]]:
        """Ours over each rival's, and over the bound; full ones against ours at full depth."""
        found: dict[str, list[float]] = {"the bound": []}
        for each in self.comparisons:
            ours = each.ours[0].seconds
            found["the bound"].append(ours / each.bound_s)
            for rival in RIVALS:
                if rival.name in each.rivals:
                    mine = each.ours_full.seconds if rival.full_depth else ours
                    ratio = mine / each.rivals[rival.name].seconds
                    found.setdefault(rival.name, []).append(ratio)
        return {name: _three(ratios) for name, ratios in found.items() if len(ratios) > 1}


def _three(ratios: Sequence[float]) -> tuple[float, float, float]:
    low, median, high = quantiles(ratios, n=4, method="inclusive")
    return low, median, high
