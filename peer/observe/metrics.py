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

from peer.facts import CheckpointOutcome, Durations, Facts, PeerState, RoundPhase, Spent
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


class One(NamedTuple):
    """A metric with one value; absent where that is None."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    said: str
    read: Callable[[Now], float | None]

    def family(self, now: Now) -> Metric:
        """The metric with its current values."""
        family, value = self.kind(self.name, self.said), self.read(now)
        if value is not None:
            family.add_metric([], value)
        return family


class Many(NamedTuple):
    """A metric with a value for each set of labels."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    said: str
    labels: tuple[str, ...]
    read: Callable[[Now], Labelled]

    def family(self, now: Now) -> Metric:
        """The metric with its current values."""
        family = self.kind(self.name, self.said, labels=self.labels)
        for labels, value in self.read(now):
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


COUNTER: Final = CounterMetricFamily
GAUGE: Final = GaugeMetricFamily

METRICS: Final[tuple[One | Many, ...]] = (
    One(
        COUNTER,
        "loco_inner_steps",
        "Inner optimizer steps done by this peer.",
        lambda now: now.facts.inner_steps,
    ),
    One(COUNTER, "loco_tokens", "Tokens trained by this peer.", lambda now: now.facts.tokens),
    One(
        GAUGE,
        "loco_train_loss",
        "Mean training loss of the last round, in nats per token.",
        lambda now: now.facts.train_loss,
    ),
    One(
        GAUGE,
        "loco_validation_loss",
        "Loss of the slow weights on the run's validation blocks, in nats per token.",
        lambda now: now.validation_loss,
    ),
    One(
        GAUGE,
        "loco_round",
        "Round of the run that this peer is in.",
        lambda now: _in_run(now, now.facts.round),
    ),
    One(
        GAUGE,
        "loco_step",
        "Nominal inner step of the run that this peer is at.",
        lambda now: _in_run(now, now.facts.step),
    ),
    One(
        GAUGE,
        "loco_total_steps",
        "Nominal inner steps of the whole run.",
        lambda now: now.progress.total_steps,
    ),
    One(
        GAUGE,
        "loco_learning_rate",
        "Learning rate of the present step.",
        lambda now: now.progress.learning_rate,
    ),
    One(
        GAUGE,
        "loco_tokens_per_second",
        "Tokens that this peer trains.",
        lambda now: now.progress.tokens_per_s,
    ),
    One(
        GAUGE,
        "loco_swarm_tokens_per_second",
        "Tokens that all peers train, by what they tell of their speed.",
        lambda now: now.progress.swarm_tokens_per_s,
    ),
    One(
        GAUGE,
        "loco_run_left_seconds",
        "Time to the end of the run, at the pace of the last minutes, in seconds.",
        lambda now: now.progress.left_s,
    ),
    One(
        GAUGE,
        "loco_inner_steps_per_average",
        "Inner steps between two averages of this peer (H), as the run says or as it has chosen.",
        lambda now: now.facts.inner_steps_per_average,
    ),
    One(
        GAUGE,
        "loco_compute_utilisation",
        "Tokens trained over those that the trainer alone would have trained, as a ratio.",
        lambda now: now.facts.compute_utilisation(now.now_s),
    ),
    One(
        GAUGE,
        "loco_replica_distance",
        "Root mean square per parameter of our fast weights less the last partner's.",
        lambda now: now.facts.replica_distance,
    ),
    Many(
        COUNTER,
        "loco_data_blocks",
        "Blocks of the corpus that changes of the swarm's members have left out or repeated.",
        ("fate",),
        lambda now: _of(lost=now.facts.lost_blocks, repeated=now.facts.repeated_blocks),
    ),
    Many(
        GAUGE, "loco_corpus_pieces", "Pieces of the corpus, by where they are.", ("where",), _pieces
    ),
    One(
        COUNTER,
        "loco_corpus_fetched_bytes",
        "Bytes of pieces that have come from other peers.",
        lambda now: now.facts.corpus.fetched_bytes if now.facts.corpus.pieces else None,
    ),
    One(
        COUNTER,
        "loco_corpus_wait_seconds",
        "Time for which training stood still for pieces of the corpus, in seconds.",
        lambda now: now.facts.corpus.waited_s if now.facts.corpus.pieces else None,
    ),
    One(
        GAUGE,
        "loco_averaged_share",
        "Share of the last 50 rounds that were averaged, 0 to 1.",
        lambda now: now.facts.averaged_share,
    ),
    Many(
        COUNTER,
        "loco_outer_rounds",
        "Rounds ended, by outcome; a skipped one has a reason.",
        ("outcome", "reason"),
        _rounds,
    ),
    One(
        COUNTER,
        "loco_stalled_seconds",
        "Time for which training stood still for fragments that were late, in seconds.",
        lambda now: now.facts.stalled_s,
    ),
    One(
        COUNTER,
        "loco_state_divergence",
        "Chunks of the outer copy found to differ from a better one of another peer.",
        lambda now: now.facts.diverged,
    ),
    Many(
        COUNTER,
        "loco_contributions_refused",
        "Contributions of other peers to fragments that were not taken, by reason.",
        ("reason",),
        lambda now: _each(REFUSED_CONTRIBUTIONS, now.facts.refused),
    ),
    Many(
        COUNTER,
        "loco_audits",
        "Averages of other peers that were worked out again in part, by outcome.",
        ("outcome",),
        lambda now: _each(AuditOutcome, now.facts.audits),
    ),
    Many(
        COUNTER,
        "loco_microbatches",
        "Microbatches of a pipeline at this peer, by what has happened to them.",
        ("what",),
        lambda now: _each(Counted, now.facts.microbatches),
    ),
    Many(
        COUNTER,
        "loco_wire_bytes",
        "Bytes handed to and taken from streams to peers, framing included.",
        ("direction", "protocol"),
        _wire,
    ),
    Many(GAUGE, "loco_peers", "Other peers known, by state.", ("state",), _peers),
    Many(
        GAUGE,
        "loco_peer_rtt_seconds",
        "Smoothed round-trip time to a linked peer.",
        ("peer",),
        _rtt,
    ),
    Many(
        GAUGE,
        "loco_group_info",
        "Part of the model that this peer holds, and the group of those that do; always 1.",
        ("group", "part"),
        _group,
    ),
    One(
        COUNTER,
        "loco_other_group_refused",
        "Proposals, contributions and requests that were meant for another group.",
        lambda now: now.facts.refused.get(RefusalReason.OTHER_GROUP, 0),
    ),
    Many(
        COUNTER,
        "loco_trainer_restarts",
        "Restarts of the trainer process, by reason.",
        ("reason",),
        _restarts,
    ),
    One(
        COUNTER,
        "loco_p2pd_restarts",
        "Restarts of the libp2p daemon.",
        lambda now: now.carried.restarts,
    ),
    One(
        COUNTER,
        "loco_directory_restarts",
        "Restarts of the directory.",
        lambda now: now.facts.directory_restarts,
    ),
    One(
        COUNTER,
        "loco_failed_streams",
        "Streams from other peers that a bug of ours has ended.",
        lambda now: now.carried.failed_streams,
    ),
    Many(
        COUNTER,
        "loco_peer_faults",
        "What other peers sent that no honest peer sends, by kind.",
        ("fault",),
        lambda now: _each(Fault, now.facts.faults),
    ),
    One(
        COUNTER,
        "loco_peers_convicted",
        "Peers of which it was proved that they have signed averages of their own making.",
        lambda now: now.facts.convicted,
    ),
    Many(
        COUNTER,
        "loco_checkpoints",
        "Checkpoints of this peer, by how they ended.",
        ("outcome",),
        lambda now: _each(CheckpointOutcome, now.facts.checkpoints),
    ),
    One(
        GAUGE,
        "loco_checkpoint_age_seconds",
        "Since the last checkpoint was on the disk.",
        _checkpoint_age,
    ),
    Many(
        GAUGE,
        "loco_reachable",
        "Whether others can dial this peer: 1 yes, 0 no; absent while unknown.",
        ("family",),
        _reachable,
    ),
    One(
        GAUGE,
        "loco_relays",
        "Peers that relay for this one.",
        lambda now: len(now.facts.reach.relays),
    ),
    One(
        GAUGE,
        "loco_relayed_peers",
        "Peers that this one is connected to through relays alone.",
        lambda now: now.facts.reach.relayed_peers,
    ),
    One(
        GAUGE,
        "loco_relay_circuits",
        "Connections of others that this peer relays.",
        lambda now: now.facts.reach.circuits,
    ),
    One(
        COUNTER,
        "loco_relay_carried_bytes",
        "Bytes of others that this peer has relayed.",
        lambda now: now.facts.reach.carried_bytes,
    ),
    Many(
        COUNTER,
        "loco_packed_vectors",
        "Partners' vectors, by how they came: as differences, again as a whole, or as codes.",
        ("came",),
        lambda now: _of(
            packed=now.facts.packing.packed,
            whole=now.facts.packing.whole,
            plain=now.facts.packing.plain,
        ),
    ),
    One(
        COUNTER,
        "loco_packed_blocks",
        "Blocks of vectors that came packed.",
        lambda now: now.facts.packing.blocks,
    ),
    One(
        COUNTER,
        "loco_misread_blocks",
        "Those that were read wrongly and sent again.",
        lambda now: now.facts.packing.misread,
    ),
    Many(
        COUNTER,
        "loco_packing_bytes",
        "What the codes of our own vectors take, and what was sent of them.",
        ("of",),
        lambda now: _of(codes=now.facts.packing.code_bytes, sent=now.facts.packing.sent_bytes),
    ),
)
"""Those of every peer."""

OF_STAGES: Final[tuple[One | Many, ...]] = (
    Many(
        COUNTER,
        "loco_pipeline_seconds",
        "Time that went into the microbatches of a pipeline here, summed over all of them.",
        ("into",),
        lambda now: [((str(what),), now.facts.pipeline.spent_s[what]) for what in Spent],
    ),
    Many(
        GAUGE,
        "loco_pipeline_iteration_seconds",
        "An iteration of a data peer, as planned and as measured.",
        ("how",),
        lambda now: _of(
            planned=now.facts.pipeline.planned_s, measured=now.facts.pipeline.iteration_s
        ),
    ),
    One(
        COUNTER,
        "loco_pipeline_other_plans",
        "Microbatches that came by another plan than those of other data peers.",
        lambda now: now.facts.pipeline.other_plans,
    ),
    Many(
        GAUGE,
        "loco_pipeline_line_seconds",
        "How long a boundary that leaves for a peer occupies the line.",
        ("peer",),
        _lines,
    ),
    One(
        GAUGE,
        "loco_pipeline_replicas_apart_ratio",
        "Distance to the weights of the last partner, a replica of this stage, over their size.",
        lambda now: now.facts.pipeline.replicas_apart,
    ),
)
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
        for metric in (*METRICS, *(OF_STAGES if now.facts.holds_stage else ())):
            yield metric.family(now)
        yield _lasted(now.facts.phases)
        yield SummaryMetricFamily(
            "loco_state_heal_seconds",
            "Time that it took to fetch such a chunk, in seconds.",
            count_value=now.facts.healed,
            sum_value=now.facts.healed_s,
        )
        yield _build(self._version, now.facts.loops)


def _lasted(phases: Mapping[RoundPhase, Durations]) -> Metric:
    family = HistogramMetricFamily(
        "loco_round_seconds", "Duration of each phase of a round, in seconds.", labels=["phase"]
    )
    for phase, seen in phases.items():
        family.add_metric([str(phase)], seen.cumulative(), seen.sum_s)
    return family


def _build(version: str, loops: Mapping[str, str]) -> Metric:
    """What runs: the version, and the loops that code vectors in its two processes."""
    family = GaugeMetricFamily(
        "loco_build_info",
        "Version of loco-peer, and the loops that code vectors; always 1.",
        labels=["version", "trainer_codec", "daemon_codec"],
    )
    chosen = [loops.get(side, "").partition(":")[0] for side in ("trainer", "daemon")]
    family.add_metric([version, *chosen], 1)
    return family
