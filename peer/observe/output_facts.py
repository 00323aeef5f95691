"""What this peer knows of how its outputs differ from those of its partners."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .names import short_id


@dataclass(slots=True)
class OutputFacts:
    """The present.

    Attributes:
        divergence: Jensen-Shannon divergence of our outputs and the partner's, nats per token;
            None before the first comparison, and when the last one gave no number.
        partner: of the last comparison.
        comparisons, spent_s: so far, and the time that they took.
    """

    divergence: float | None = None
    partner: str | None = None
    comparisons: int = 0
    spent_s: float = 0.0

    def to_json(self) -> dict[str, Any] | None:
        """Plain values; None before the first comparison."""
        if self.partner is None:
            return None
        return {
            "divergence": self.divergence,
            "partner": self.partner,
            "comparisons": self.comparisons,
        }


def output_line(told: Mapping[str, Any]) -> str:
    """What `to_json` gave, in a line for people."""
    divergence, partner = told["divergence"], short_id(told["partner"])
    if divergence is None:
        return f"{partner}'s could not be compared with ours"
    return f"{divergence:.2g} nats from {partner}'s (0 to {math.log(2):.2f}: docs/metrics.md)"
