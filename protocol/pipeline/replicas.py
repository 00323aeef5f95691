"""What machines would achieve as plain replicas, each with the whole model: NoLoCo and DiLoCo.

A round is H inner steps; the exchange of a round overlaps with the next one's training, so a round
takes whichever is longer. Lines are taken to be free of other traffic.

    noloco   each machine trains at its own pace and sends the whole vector to one partner, any of
             the others; its exchange takes the mean over partners of the slower way
    diloco   all train the same round, quotas following speeds, so its length is that of the median
             machine; every machine sends each other one 1/n of the vector as a contribution and 1/n
             as a result. The slowest line decides
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from .problem import US_PER_S, Matrix
from .tables import MachineOffer
from .workload import Workload

TRAINING_PER_FORWARD = 3
"""Forward and backward, in forwards."""
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a way of training would achieve.

    Attributes:
        fits: whether the model's state fits in the memory of all; None if a table is silent.
        iteration_s: for as many microbatches as an iteration of the pipelines has.
        bytes_per_hour: sent, by machine.
        utilisation: share of the time in which a machine computes, by machine.
    """

    fits: bool | None
    iteration_s: float
    tokens_per_s: float
    bytes_per_hour: dict[str, float]
    utilisation: dict[str, float]
    cost_per_billion_tokens: float


def cost_per_billion_tokens(offers: Sequence[MachineOffer], tokens_per_s: float) -> float:
    """What a billion tokens cost on all these machines."""
    price_per_s = sum(offer.price_per_hour for offer in offers) / SECONDS_PER_HOUR
    return price_per_s / tokens_per_s * 1e9


def state_fits(offers: Sequence[MachineOffer], state_bytes: int) -> bool | None:
    """Whether every machine has the memory for so much training state."""
    known = [offer.memory_bytes for offer in offers if offer.memory_bytes is not None]
    if any(memory < state_bytes for memory in known):
        return False
    return True if len(known) == len(offers) else None


def noloco(
    offers: Sequence[MachineOffer],
    latency_us: Matrix,
    bytes_per_s: Matrix,
    workload: Workload,
    microbatches: int,
) -> Estimate:
    """Gossip in pairs."""
    rounds = []
    for machine, offer in enumerate(offers):
        train_s = _train_s(offer, workload)
        others = [other for other in range(len(offers)) if other != machine]
        exchange_s = fmean(
            max(
                workload.vector_bytes / bytes_per_s[a][b] + latency_us[a][b] / US_PER_S
                for a, b in ((machine, other), (other, machine))
            )
            for other in others
        ) if others else 0.0  # fmt: skip
        rounds.append((train_s, max(train_s, exchange_s)))
    sent = workload.vector_bytes if len(offers) > 1 else 0
    return _estimate(offers, workload, microbatches, rounds, sent)


def diloco(
    offers: Sequence[MachineOffer],
    latency_us: Matrix,
    bytes_per_s: Matrix,
    workload: Workload,
    microbatches: int,
) -> Estimate:
    """Fragments among all."""
    number = len(offers)
    train_s = median(_train_s(offer, workload) for offer in offers)
    share = 2 * workload.vector_bytes / number
    exchange_s = max(
        (
            share / bytes_per_s[a][b] + 2 * latency_us[a][b] / US_PER_S
            for a in range(number)
            for b in range(number)
            if a != b
        ),
        default=0.0,
    )
    rounds = [(train_s, max(train_s, exchange_s))] * number
    steps = [train_s / _train_s(offer, workload) for offer in offers]
    return _estimate(offers, workload, microbatches, rounds, share * (number - 1), steps)


def _train_s(offer: MachineOffer, workload: Workload) -> float:
    """A round of one machine."""
    step_us = workload.batch_microbatches * offer.compute_us * TRAINING_PER_FORWARD
    return workload.inner_steps * step_us / US_PER_S


def _estimate(
    offers: Sequence[MachineOffer],
    workload: Workload,
    microbatches: int,
    rounds: Sequence[tuple[float, float]],
    sent_bytes: float,
    shares: Sequence[float] | None = None,
) -> Estimate:
    """Put together what (seconds of training, seconds in all) of a round of each machine give."""
    quota = workload.inner_steps * workload.batch_microbatches * workload.tokens
    speeds = [
        quota * share / whole_s
        for (_, whole_s), share in zip(rounds, shares or [1.0] * len(rounds), strict=True)
    ]
    tokens_per_s = sum(speeds)
    names = [offer.name for offer in offers]
    return Estimate(
        state_fits(offers, workload.state_bytes),
        microbatches * workload.tokens / tokens_per_s,
        tokens_per_s,
        {n: sent_bytes / s * SECONDS_PER_HOUR for n, (_, s) in zip(names, rounds, strict=True)},
        {n: train_s / s for n, (train_s, s) in zip(names, rounds, strict=True)},
        cost_per_billion_tokens(offers, tokens_per_s),
    )
