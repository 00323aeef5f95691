"""Prometheus metrics of one peer.

Numbers have one source: at each scrape the daemon makes one `Now` of what its parts know, and each
metric is a row of METRICS that reads it. The registry is our own, so that many peers live in one
process, and nothing but ours is exposed.

A peer is in one group, so its metrics need no label for it: `loco_group_info` names it, and joins
with the others by `instance`.

What is unknown is absent, never zero; every reason for a skipped round is there from the start, at
zero.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from peer.facts import CheckpointOutcome, Facts, PeerState, Spent
from peer.ports import NetworkStatistics
from protocol.membership.book import Fault
from protocol.membership.dial_back import Reach
from protocol.membership.view import Member
from protocol.microbatch.core import Counted
from protocol.outcomes import AuditOutcome, RefusalReason, SkipReason

from .progress import RunProgress

TRAINER_RESTART_REASONS: Final = (
    "died", "hung", "error", "unusable", "non_finite", "out_of_memory",
)  # fmt: skip
"""Reasons that are there from the start; others may follow."""
REFUSED_CONTRIBUTIONS: Final = (RefusalReason.AHEAD, RefusalReason.BEHIND, RefusalReason.TWICE)
"""Reasons for which an owner does not take a contribution."""


@dataclass(frozen=True, slots=True)
class Now:
    """What this peer knows at one moment, by trio's clock.

    Attributes:
        progress: how far the run is.
        validation_loss: our own, or what stands for it.
        alive: the other peers that live.
        carried: by the network, since it started.
    """

    facts: Facts
    now_s: float = 0.0
    progress: RunProgress = field(default_factory=RunProgress)
    validation_loss: float | None = None
    alive: tuple[Member, ...] = ()
    carried: NetworkStatistics = field(default_factory=lambda: NetworkStatistics({}, {}, 0))


Labelled = Iterable[tuple[tuple[str, ...], float]]
"""Values, each behind those of the labels."""


class Row(NamedTuple):
    """One metric: a value, absent where that is None; or one for each set of labels."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    said: str
    read: Callable[[Now], float | Labelled | None]
    labels: tuple[str, ...] = ()

    def family(self, name: str, now: Now) -> Metric:
        """The metric with its current values."""
        family, found = self.kind(name, self.said, labels=self.labels), self.read(now)
        values = [((), found)] if isinstance(found, int | float) else found or ()
        for labels, value in values:
            family.add_metric(labels, value)
        return family


def _of(**values: float | None) -> Labelled:
    """One label, by its values."""
    return [((name,), value) for name, value in values.items() if value is not None]


Kind = TypeVar("Kind", bound=StrEnum)


def _each(kinds: Iterable[Kind], counts: Mapping[Kind, int]) -> Labelled:
    """One label, of a closed list."""
    return [((str(kind),), counts.get(kind, 0)) for kind in kinds]


def _wire(now: Now) -> Labelled:
    carried = {"sent": now.carried.sent_bytes, "received": now.carried.received_bytes}
    for direction, by_protocol in carried.items():
        for protocol, count in sorted(by_protocol.items()):
            yield (direction, protocol), count


def _rounds(now: Now) -> Labelled:
    yield ("averaged", ""), now.facts.averaged
    for reason in SkipReason:
        yield ("skipped", str(reason)), now.facts.skipped.get(reason, 0)


def _group(now: Now) -> Labelled:
    if now.facts.held is not None and now.facts.group is not None:
        yield (now.facts.group, now.facts.held.group.part), 1


def _reachable(now: Now) -> Labelled:
    reach = now.facts.reach
    known = {"ip4": reach.v4, "ip6": reach.v6}
    return _of(**{n: float(r is Reach.YES) for n, r in known.items() if r is not Reach.UNKNOWN})


def _pieces(now: Now) -> Labelled:
    corpus = now.facts.corpus
    elsewhere = corpus.pieces - corpus.here
    counts = _of(here=corpus.here, elsewhere=elsewhere, only_here=corpus.only_here)
    return counts if corpus.pieces else ()


def _restarts(now: Now) -> Labelled:
    return _of(**(dict.fromkeys(TRAINER_RESTART_REASONS, 0) | now.facts.restarts))


def _peers(now: Now) -> Labelled:
    states = Counter(member.progress.state for member in now.alive)
    return [((str(state),), states.get(state, 0)) for state in PeerState]


def _rtt(now: Now) -> Labelled:
    return [((m.peer_id,), m.rtt_s) for m in now.alive if m.rtt_s is not None]


def _checkpoint_age(now: Now) -> float | None:
    at_s = now.facts.checkpoint_at_s
    return None if at_s is None else now.now_s - at_s


def _in_run(now: Now, value: float) -> float | None:
    return value if now.facts.run_id else None


def _lines(now: Now) -> Labelled:
    links = now.facts.pipeline.links
    return [((link.peer_id,), link.out_s) for link in links if link.out_us]


_counter: Final = partial(Row, CounterMetricFamily)
_gauge: Final = partial(Row, GaugeMetricFamily)

METRICS: Final[dict[str, Row]] = {
    "loco_inner_steps": _counter(
        "Inner optimizer steps done by this peer.", lambda now: now.facts.inner_steps
    ),
    "loco_tokens": _counter("Tokens trained by this peer.", lambda now: now.facts.tokens),
    "loco_train_loss": _gauge(
        "Mean training loss of the last round, in nats per token.", lambda now: now.facts.train_loss
    ),
    "loco_validation_loss": _gauge(
        "Loss of the slow weights on the run's validation blocks, in nats per token.",
        lambda now: now.validation_loss,
    ),
    "loco_round": _gauge(
        "Round of the run that this peer is in.", lambda now: _in_run(now, now.facts.round)
    ),
    "loco_step": _gauge(
        "Nominal inner step of the run that this peer is at.",
        lambda now: _in_run(now, now.facts.step),
    ),
    "loco_total_steps": _gauge(
        "Nominal inner steps of the whole run.", lambda now: now.progress.total_steps
    ),
    "loco_learning_rate": _gauge(
        "Learning rate of the present step.", lambda now: now.progress.learning_rate
    ),
    "loco_tokens_per_second": _gauge(
        "Tokens that this peer trains.", lambda now: now.progress.tokens_per_s
    ),
    "loco_swarm_tokens_per_second": _gauge(
        "Tokens that all peers train, by what they tell of their speed.",
        lambda now: now.progress.swarm_tokens_per_s,
    ),
    "loco_run_left_seconds": _gauge(
        "Time to the end of the run, at the pace of the last minutes, in seconds.",
        lambda now: now.progress.left_s,
    ),
    "loco_inner_steps_per_average": _gauge(
        "Inner steps between two averages of this peer (H), as the run says or as it has chosen.",
        lambda now: now.facts.inner_steps_per_average,
    ),
    "loco_compute_utilisation": _gauge(
        "Tokens trained over those that the trainer alone would have trained, as a ratio.",
        lambda now: now.facts.compute_utilisation(now.now_s),
    ),
    "loco_replica_distance": _gauge(
        "Root mean square per parameter of our fast weights less the last partner's.",
        lambda now: now.facts.replica_distance,
    ),
    "loco_data_blocks": _counter(
        "Blocks of the corpus that changes of the swarm's members have left out or repeated.",
        lambda now: _of(lost=now.facts.lost_blocks, repeated=now.facts.repeated_blocks),
        ("fate",),
    ),
    "loco_corpus_pieces": _gauge("Pieces of the corpus, by where they are.", _pieces, ("where",)),
    "loco_corpus_fetched_bytes": _counter(
        "Bytes of pieces that have come from other peers.",
        lambda now: now.facts.corpus.fetched_bytes if now.facts.corpus.pieces else None,
    ),
    "loco_corpus_wait_seconds": _counter(
        "Time for which training stood still for pieces of the corpus, in seconds.",
        lambda now: now.facts.corpus.waited_s if now.facts.corpus.pieces else None,
    ),
    "loco_averaged_share": _gauge(
        "Share of the last 50 rounds that were averaged, 0 to 1.",
        lambda now: now.facts.averaged_share,
    ),
    "loco_outer_rounds": _counter(
        "Rounds ended, by outcome; a skipped one has a reason.", _rounds, ("outcome", "reason")
    ),
    "loco_stalled_seconds": _counter(
        "Time for which training stood still for fragments that were late, in seconds.",
        lambda now: now.facts.stalled_s,
    ),
    "loco_state_divergence": _counter(
        "Chunks of the outer copy found to differ from a better one of another peer.",
        lambda now: now.facts.diverged,
    ),
    "loco_contributions_refused": _counter(
        "Contributions of other peers to fragments that were not taken, by reason.",
        lambda now: _each(REFUSED_CONTRIBUTIONS, now.facts.refused),
        ("reason",),
    ),
    "loco_audits": _counter(
        "Averages of other peers that were worked out again in part, by outcome.",
        lambda now: _each(AuditOutcome, now.facts.audits),
        ("outcome",),
    ),
    "loco_microbatches": _counter(
        "Microbatches of a pipeline at this peer, by what has happened to them.",
        lambda now: _each(Counted, now.facts.microbatches),
        ("what",),
    ),
    "loco_wire_bytes": _counter(
        "Bytes handed to and taken from streams to peers, framing included.",
        _wire,
        ("direction", "protocol"),
    ),
    "loco_peers": _gauge("Other peers known, by state.", _peers, ("state",)),
    "loco_peer_rtt_seconds": _gauge("Smoothed round-trip time to a linked peer.", _rtt, ("peer",)),
    "loco_group_info": _gauge(
        "Part of the model that this peer holds, and the group of those that do; always 1.",
        _group,
        ("group", "part"),
    ),
    "loco_other_group_refused": _counter(
        "Proposals, contributions and requests that were meant for another group.",
        lambda now: now.facts.refused.get(RefusalReason.OTHER_GROUP, 0),
    ),
    "loco_trainer_restarts": _counter(
        "Restarts of the trainer process, by reason.", _restarts, ("reason",)
    ),
    "loco_p2pd_restarts": _counter(
        "Restarts of the libp2p daemon.", lambda now: now.carried.restarts
    ),
    "loco_directory_restarts": _counter(
        "Restarts of the directory.", lambda now: now.facts.directory_restarts
    ),
    "loco_failed_streams": _counter(
        "Streams from other peers that a bug of ours has ended.",
        lambda now: now.carried.failed_streams,
    ),
    "loco_peer_faults": _counter(
        "What other peers sent that no honest peer sends, by kind.",
        lambda now: _each(Fault, now.facts.faults),
        ("fault",),
    ),
    "loco_peers_convicted": _counter(
        "Peers of which it was proved that they have signed averages of their own making.",
        lambda now: now.facts.convicted,
    ),
    "loco_checkpoints": _counter(
        "Checkpoints of this peer, by how they ended.",
        lambda now: _each(CheckpointOutcome, now.facts.checkpoints),
        ("outcome",),
    ),
    "loco_checkpoint_age_seconds": _gauge(
        "Since the last checkpoint was on the disk.", _checkpoint_age
    ),
    "loco_reachable": _gauge(
        "Whether others can dial this peer: 1 yes, 0 no; absent while unknown.",
        _reachable,
        ("family",),
    ),
    "loco_relays": _gauge(
        "Peers that relay for this one.", lambda now: len(now.facts.reach.relays)
    ),
    "loco_relayed_peers": _gauge(
        "Peers that this one is connected to through relays alone.",
        lambda now: now.facts.reach.relayed_peers,
    ),
    "loco_relay_circuits": _gauge(
        "Connections of others that this peer relays.", lambda now: now.facts.reach.circuits
    ),
    "loco_relay_carried_bytes": _counter(
        "Bytes of others that this peer has relayed.", lambda now: now.facts.reach.carried_bytes
    ),
    "loco_packed_vectors": _counter(
        "Partners' vectors, by how they came: as differences, again as a whole, or as codes.",
        lambda now: _of(
            packed=now.facts.packing.packed,
            whole=now.facts.packing.whole,
            plain=now.facts.packing.plain,
        ),
        ("came",),
    ),
    "loco_packed_blocks": _counter(
        "Blocks of vectors that came packed.", lambda now: now.facts.packing.blocks
    ),
    "loco_misread_blocks": _counter(
        "Those that were read wrongly and sent again.", lambda now: now.facts.packing.misread
    ),
    "loco_packing_bytes": _counter(
        "What the codes of our own vectors take, and what was sent of them.",
        lambda now: _of(codes=now.facts.packing.code_bytes, sent=now.facts.packing.sent_bytes),
        ("of",),
    ),
}
"""Those of every peer."""

OF_STAGES: Final[dict[str, Row]] = {
    "loco_pipeline_seconds": _counter(
        "Time that went into the microbatches of a pipeline here, summed over all of them.",
        lambda now: [((str(what),), now.facts.pipeline.spent_s[what]) for what in Spent],
        ("into",),
    ),
    "loco_pipeline_iteration_seconds": _gauge(
        "An iteration of a data peer, as planned and as measured.",
        lambda now: _of(
            planned=now.facts.pipeline.planned_s, measured=now.facts.pipeline.iteration_s
        ),
        ("how",),
    ),
    "loco_pipeline_other_plans": _counter(
        "Microbatches that came by another plan than those of other data peers.",
        lambda now: now.facts.pipeline.other_plans,
    ),
    "loco_pipeline_line_seconds": _gauge(
        "How long a boundary that leaves for a peer occupies the line.", _lines, ("peer",)
    ),
    "loco_pipeline_replicas_apart_ratio": _gauge(
        "Distance to the weights of the last partner, a replica of this stage, over their size.",
        lambda now: now.facts.pipeline.replicas_apart,
    ),
}
"""Those of a peer that holds a stage: where the time goes, and what was planned."""


class Metrics(Collector):
    """The metrics of one peer.

    Args:
        read: makes the record of now; called at each scrape, in the daemon's own task.
        version: of loco-peer.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, read: Callable[[], Now], *, version: str) -> None:
        self._read = read
        self._version = version
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """All families, as of now."""
        now = self._read()
        for name, row in (METRICS | (OF_STAGES if now.facts.holds_stage else {})).items():
            yield row.family(name, now)
        rounds = HistogramMetricFamily(
            "loco_round_seconds", "Duration of each phase of a round, in seconds.", labels=["phase"]
        )
        for phase, seen in now.facts.phases.items():
            rounds.add_metric([str(phase)], seen.cumulative(), seen.sum_s)
        yield rounds
        yield SummaryMetricFamily(
            "loco_state_heal_seconds",
            "Time that it took to fetch such a chunk, in seconds.",
            count_value=now.facts.healed,
            sum_value=now.facts.healed_s,
        )
        loops = [now.facts.loops.get(of, "").partition(":")[0] for of in ("trainer", "daemon")]
        build = _gauge(
            "Version of loco-peer, and the loops that code vectors; always 1.",
            lambda _: [((self._version, *loops), 1)],
            ("version", "trainer_codec", "daemon_codec"),
        )
        yield build.family("loco_build_info", now)
