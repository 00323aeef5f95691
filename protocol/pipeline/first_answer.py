"""The first thing that people ask of machines on offer: how long, for what money, which way.

Replicas are the way where every machine holds the whole model; a pipeline where one does not, and
then one that skips nothing, for skipping costs learning that no table shows. A run ends when a
machine of middling speed has done its steps, and all train meanwhile: N machines train N times the
tokens of one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .question import Question
from .replicas import SECONDS_PER_HOUR, Estimate, diloco, noloco, state_fits
from .tables import Offer


@dataclass(frozen=True, slots=True)
class Verdict:
    """A run on these machines, by one way.

    Attributes:
        way: noloco, diloco, full or skippipe.
        tokens: of all peers with data together.
        cost: of all machines, in the currency of the table's prices.
    """

    way: str
    tokens: int
    tokens_per_s: float
    hours: float
    cost: float


def needs_pipeline(question: Question) -> bool:
    """Whether a machine is known to be too small for the whole model."""
    return state_fits(question.offers, question.workload.state_bytes) is False


def too_small_for_the_whole(question: Question) -> tuple[Offer, ...]:
    """Machines that are known to lack the memory for the whole model's state."""
    needed = question.workload.state_bytes
    return tuple(o for o in question.offers if o.memory_bytes and o.memory_bytes < needed)


def replicas_of(question: Question) -> Mapping[str, Estimate]:
    """What these machines would do as replicas, for one microbatch each if none are asked for."""
    tables = (question.offers, question.latency_us, question.bytes_per_s, question.workload)
    number = question.microbatches or len(question.offers)
    return {"noloco": noloco(*tables, number), "diloco": diloco(*tables, number)}


def verdict_of(
    question: Question, way: str, estimate: Estimate, tokens_per_peer: int, data_peers: int
) -> Verdict:
    """How long the run takes this way, and what it costs."""
    tokens = tokens_per_peer * data_peers
    hours = tokens / estimate.tokens_per_s / SECONDS_PER_HOUR
    price = sum(offer.price_per_hour for offer in question.offers)
    return Verdict(way, tokens, estimate.tokens_per_s, hours, hours * price)
