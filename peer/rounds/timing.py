"""How long a round spent in each of its phases."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """Seconds that one round spent in each phase."""

    train_s: float
    match_s: float
    exchange_s: float
    apply_s: float
