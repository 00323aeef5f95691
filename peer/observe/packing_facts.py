"""What this peer knows of vectors that travel packed, for the metrics."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from .families import counter


@dataclass(slots=True)
class PackingFacts:
    """Counts since the start.

    Attributes:
        packed, plain: partners' vectors that came as differences, and that came as codes though
            the run's codec packs.
        blocks: of those that came packed.
        misread: blocks of these that were read wrongly, found by their sums, and sent again.
        whole: vectors whose digest alone was wrong, and that were sent again as a whole.
        code_bytes, sent_bytes: what the codes of our own vectors take, and what of them travelled.
    """

    packed: int = 0
    plain: int = 0
    blocks: int = 0
    misread: int = 0
    whole: int = 0
    code_bytes: int = 0
    sent_bytes: int = 0


def packing_metrics(facts: PackingFacts) -> Iterator[Metric]:
    """Those of now."""
    vectors = CounterMetricFamily(
        "loco_packed_vectors",
        "Partners' vectors, by how they came: as differences, again as a whole, or as codes.",
        labels=["came"],
    )
    for came, value in (
        ("packed", facts.packed),
        ("whole", facts.whole),
        ("plain", facts.plain),
    ):
        vectors.add_metric([came], value)
    yield vectors
    yield counter("loco_packed_blocks", "Blocks of vectors that came packed.", facts.blocks)
    yield counter(
        "loco_misread_blocks", "Those that were read wrongly and sent again.", facts.misread
    )
    taken = CounterMetricFamily(
        "loco_packing_bytes",
        "What the codes of our own vectors take, and what was sent of them.",
        labels=["of"],
    )
    taken.add_metric(["codes"], facts.code_bytes)
    taken.add_metric(["sent"], facts.sent_bytes)
    yield taken
