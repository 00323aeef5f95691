"""Models that are trained, and the ensembles that are made of them.

All spend one budget, of PARTS parts. Without a generalist: a seed of the mix for BRANCH parts,
whose weights all experts begin with, and the rest in experts. With one: the generalist goes on to
the end of its own schedule, and the experts share what is left. So seeds are counted, those of
other sizes too (HDEE leaves all seeds out).

    dense       one model of the mix
    equal       three experts of one size, equally many steps (HDEE's M_Ho-I_Ho)
    sizes       a small, a medium and a large one, equally many steps (M_He-I_Ho); body FLOPs of
                small and large are those of two medium ones, their seeds come on top
    steps       more steps where people say that the text is harder (M_Ho-I_He)
    gain        as unequal, more steps where the first half of the equal experts gained most
    anchored    three experts, and the generalist beside them in the ensemble
    left-out    the same experts without it: what it is worth at the end
    doubled     the equal experts and the dense model: twice the compute

A domain's place in LABELS is how hard its text is said to be; `gain` has the same shares in another
order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .domains import MIX

PARTS: Final = 48
BRANCH: Final = 12
GENERALIST_PARTS: Final = 24
BESIDE_PARTS: Final = 8
"""An expert beside a generalist has so many."""
EQUAL_PARTS: Final = 12
UNEQUAL_PARTS: Final = (9, 12, 15)
"""HDEE's 300, 400 and 500 steps."""
MEDIUM: Final = "medium"
UNEQUAL_SIZES: Final = ("small", MEDIUM, "large")
LABELS: Final = ("docs", "python", "headers")
"""The domains, from easy to hard."""


@dataclass(frozen=True, slots=True)
class Training:
    """A model.

    Attributes:
        domain: what it trains on.
        parts: of the budget, that its schedule is laid out for.
        begins_with_seed: begins with the weights of its size's seed at BRANCH.
        stops_at: parts that are trained, where the schedule is not gone through.
    """

    name: str
    domain: str
    parts: int
    size: str = MEDIUM
    begins_with_seed: bool = False
    stops_at: int | None = None

    @property
    def trained_parts(self) -> int:
        return self.parts if self.stops_at is None else self.stops_at


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Models that answer together; of one alone every rule gives its own loss."""

    name: str
    members: tuple[Training, ...]


DENSE: Final = Training("dense", MIX, PARTS)
GENERALIST: Final = Training("generalist", MIX, GENERALIST_PARTS)


def seed_of(size: str) -> Training:
    """Where experts of this size begin; of the medium size that is the generalist on its way."""
    if size == MEDIUM:
        return GENERALIST
    return Training(f"seed-{size}", MIX, GENERALIST_PARTS, size, stops_at=BRANCH)


def expert(domain: str, parts: int = EQUAL_PARTS, size: str = MEDIUM) -> Training:
    """An expert that begins with a seed."""
    return Training(f"{domain}-{parts}-{size}", domain, parts, size, begins_with_seed=True)


def unequal_steps(name: str, order: Sequence[str]) -> Ensemble:
    """More steps for each domain than for the one before."""
    pairs = zip(order, UNEQUAL_PARTS, strict=True)
    return Ensemble(name, tuple(expert(domain, parts) for domain, parts in pairs))


def _fixed() -> Iterator[Ensemble]:
    equal = tuple(expert(domain) for domain in LABELS)
    beside = tuple(expert(domain, BESIDE_PARTS) for domain in LABELS)
    sized = zip(LABELS, UNEQUAL_SIZES, strict=True)
    yield Ensemble("dense", (DENSE,))
    yield Ensemble("anchored", (GENERALIST, *beside))
    yield Ensemble("left-out", beside)
    yield Ensemble("equal", equal)
    yield Ensemble("doubled", (*equal, DENSE))
    yield unequal_steps("steps", LABELS)
    yield Ensemble("sizes", tuple(expert(domain, size=size) for domain, size in sized))


ENSEMBLES: Final[Mapping[str, Ensemble]] = {each.name: each for each in _fixed()}
BY_GAIN: Final = "gain"
ARMS: Final = (*ENSEMBLES, BY_GAIN)


def trainings_of(ensemble: Ensemble) -> dict[Training, int]:
    """All that is trained for an ensemble, and how many parts of it."""
    found = {member: member.trained_parts for member in ensemble.members}
    for member in ensemble.members:
        if member.begins_with_seed:
            found.setdefault(seed_of(member.size), BRANCH)
    return found
