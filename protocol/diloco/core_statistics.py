"""What the core of the fragment exchange counts."""

from dataclasses import dataclass

from .healing import HealingStatistics
from .owner import OwnerStatistics


@dataclass(frozen=True, slots=True)
class FragmentCoreStatistics:
    """Counts since the start.

    Attributes:
        lost_items: what came for a fragment and did not fit.
    """

    healing: HealingStatistics
    owner: OwnerStatistics
    lost_items: int
