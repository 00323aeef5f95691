"""Questions about machines on offer that several tests ask."""

from dataclasses import replace

from protocol.pipeline.question import PlanQuestion, Workload
from protocol.pipeline.tables import MachineOffer, link_matrices

WORKLOAD = Workload(
    parameters=1_000_000,
    num_layers=8,
    hidden_size=100,
    context_length=50,
    sequences=2,
    batch_microbatches=4,
    inner_steps=10,
    vector_bytes=1_000_000,
    state_bytes=16_000_000,
)
PLACES = ("Iowa", "Iowa", "LA", "Oregon", "London", "NL")


def offers_at(*places: str, compute_us: int = 200_000, slots: int = 2) -> tuple[MachineOffer, ...]:
    """Equal machines at these places."""
    return tuple(MachineOffer(f"{p}-{i}", p, compute_us, slots, 0.5) for i, p in enumerate(places))


def question(offers: tuple[MachineOffer, ...] | None = None, **changes) -> PlanQuestion:
    """Three stages of which two are visited, planned briefly."""
    if offers is None:
        offers = tuple(
            MachineOffer(f"{place}-{i}", place, 200_000 + 50_000 * i, 2, 0.5)
            for i, place in enumerate(PLACES)
        )
    asked = PlanQuestion(
        offers, *link_matrices(offers, {}), WORKLOAD, stages=3, visited=2, evaluations=60
    )
    return replace(asked, **changes)
