"""Prometheus metrics of one peer.

Numbers have one source: at each scrape the collector reads a frozen `MetricsSnapshot`, which the
daemon makes from the `statistics()` of its parts. Only what has no total to read, the histogram of
durations, is observed as it happens. The registry is our own, so that many peers live in one
process, and nothing but ours is exposed.

A peer is in one group, so its metrics need no label for it: `loco_group_info` names it, and joins
with the others by `instance`.

What is unknown is absent, never zero; every reason for a skipped round is there from the start, at
zero.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from protocol.membership.conduct import Fault
from protocol.microbatch.counts import Counted
from protocol.outcomes import AuditOutcome, RefusalReason

from .checkpoint_metrics import CheckpointOutcome, checkpoint_metrics
from .corpus_facts import CorpusFacts
from .corpus_metrics import corpus_metrics
from .families import counter, counter_by, gauge
from .packing_facts import PackingFacts, packing_metrics
from .pipeline_facts import PipelineFacts
from .pipeline_metrics import pipeline_metrics
from .progress import RunProgress
from .reach_facts import ReachFacts
from .reach_metrics import reach_metrics
from .round_metrics import Durations, RoundPhase, round_metrics
from .status import Outcomes, PeerState

TRAINER_RESTART_REASONS: Final = (
    "died", "hung", "error", "unusable", "non_finite", "out_of_memory",
)  # fmt: skip
"""Reasons that are there from the start; others may follow."""
REFUSED_CONTRIBUTIONS: Final = (RefusalReason.AHEAD, RefusalReason.BEHIND, RefusalReason.TWICE)
"""Reasons for which an owner does not take a contribution."""


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The numbers that a scrape reads. None is unknown.

    Attributes:
        inner_steps, tokens: done by this daemon.
        round, step: of the run; `step` is nominal.
        progress: how far the run is.
        inner_steps_per_average: H, of this peer.
        sent_bytes, received_bytes: by libp2p protocol id.
        peers: other peers by state.
        rtt_s: smoothed round-trip time by peer id, linked peers only.
        compute_utilisation: share of what the trainer alone would have trained, 0 to 1.
        trainer_restarts: by reason.
        replica_distance: root mean square per parameter of our fast weights, as we sent them, less
            the last partner's.
        lost_blocks, repeated_blocks: of the corpus, by changes of the swarm's members.
        stalled_s: time for which training stood still for fragments that were late.
        diverged, healed, healed_s: chunks of the outer copy that differed from a better one, those
            that were fetched, and how long that took.
        refused: contributions of others to fragments that were not taken, and whatever was meant
            for another group, by reason.
        faults: held against other peers, by kind.
        checkpoints, checkpoint_age_s: by how they ended; since the last, None before the first.
        audits: of averages that other peers have signed, by outcome.
        convicted: peers that were proved to have lied.
        corpus: None where its pieces are not known.
        pipeline: None where we hold the whole model.
        group, part: digest of the group, and the part of the model that all in it hold.
        failed_streams: of other peers, ended by a bug here.
        loops: what codes vectors, for `trainer` and `daemon`; why, if it was to be another.
    """

    inner_steps: int = 0
    tokens: int = 0
    train_loss: float | None = None
    validation_loss: float | None = None
    outcomes: Outcomes = Outcomes()
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    received_bytes: Mapping[str, int] = field(default_factory=dict)
    peers: Mapping[PeerState, int] = field(default_factory=dict)
    rtt_s: Mapping[str, float] = field(default_factory=dict)
    compute_utilisation: float | None = None
    trainer_restarts: Mapping[str, int] = field(default_factory=dict)
    replica_distance: float | None = None
    lost_blocks: int = 0
    repeated_blocks: int = 0
    round: int | None = None
    step: int | None = None
    progress: RunProgress = field(default_factory=RunProgress)
    inner_steps_per_average: int | None = None
    stalled_s: float = 0.0
    diverged: int = 0
    healed: int = 0
    healed_s: float = 0.0
    refused: Mapping[RefusalReason, int] = field(default_factory=dict)
    faults: Mapping[Fault, int] = field(default_factory=dict)
    checkpoints: Mapping[CheckpointOutcome, int] = field(default_factory=dict)
    checkpoint_age_s: float | None = None
    audits: Mapping[AuditOutcome, int] = field(default_factory=dict)
    convicted: int = 0
    microbatches: Mapping[Counted, int] = field(default_factory=dict)
    corpus: CorpusFacts | None = None
    pipeline: PipelineFacts | None = None
    group: str | None = None
    part: str | None = None
    p2pd_restarts: int = 0
    directory_restarts: int = 0
    failed_streams: int = 0
    loops: Mapping[str, str] = field(default_factory=dict)
    reach: ReachFacts = field(default_factory=ReachFacts)
    packing: PackingFacts = field(default_factory=PackingFacts)


class Metrics:
    """The metrics of one peer.

    Args:
        read: makes the snapshot of now; called at each scrape, in the daemon's own task.
        version: of loco-peer.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, read: Callable[[], MetricsSnapshot], *, version: str) -> None:
        self.registry = CollectorRegistry()
        self._round_seconds = {phase: Durations() for phase in RoundPhase}
        self.registry.register(_SnapshotCollector(read, self._round_seconds, version))

    def __repr__(self) -> str:
        counts = " ".join(f"{p} {d.count}" for p, d in self._round_seconds.items())
        return f"<Metrics, durations observed: {counts}>"

    def observe_round(self, phase: RoundPhase, seconds: float) -> None:
        """Count one phase of one round."""
        self._round_seconds[phase].observe(seconds)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _SnapshotCollector(Collector):
    def __init__(
        self,
        read: Callable[[], MetricsSnapshot],
        durations: Mapping[RoundPhase, Durations],
        version: str,
    ) -> None:
        self._read = read
        self._durations = durations
        self._version = version

    def collect(self) -> Iterable[Metric]:
        now = self._read()
        yield from _training(now)
        yield _blocks(now)
        yield from () if now.corpus is None else corpus_metrics(now.corpus)
        yield from round_metrics(now.outcomes, self._durations)
        yield from _fragments(now)
        yield from _swarm(now)
        yield from _group(now)
        yield from _restarts(now)
        yield from reach_metrics(now.reach)
        yield from packing_metrics(now.packing)
        yield _build(self._version, now.loops)


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


def _training(now: MetricsSnapshot) -> Iterator[Metric]:
    yield counter("loco_inner_steps", "Inner optimizer steps done by this peer.", now.inner_steps)
    yield counter("loco_tokens", "Tokens trained by this peer.", now.tokens)
    yield gauge(
        "loco_train_loss",
        "Mean training loss of the last round, in nats per token.",
        now.train_loss,
    )
    yield gauge(
        "loco_validation_loss",
        "Loss of the slow weights on the run's validation blocks, in nats per token.",
        now.validation_loss,
    )
    yield gauge("loco_round", "Round of the run that this peer is in.", now.round)
    yield gauge("loco_step", "Nominal inner step of the run that this peer is at.", now.step)
    yield from _progress(now.progress)
    yield gauge(
        "loco_inner_steps_per_average",
        "Inner steps between two averages of this peer (H), as the run says or as it has chosen.",
        now.inner_steps_per_average,
    )
    yield gauge(
        "loco_compute_utilisation",
        "Tokens trained over those that the trainer alone would have trained, as a ratio.",
        now.compute_utilisation,
    )
    yield gauge(
        "loco_replica_distance",
        "Root mean square per parameter of our fast weights less the last partner's.",
        now.replica_distance,
    )


def _progress(now: RunProgress) -> Iterator[Metric]:
    yield gauge("loco_total_steps", "Nominal inner steps of the whole run.", now.total_steps)
    yield gauge("loco_learning_rate", "Learning rate of the present step.", now.learning_rate)
    yield gauge("loco_tokens_per_second", "Tokens that this peer trains.", now.tokens_per_s)
    yield gauge(
        "loco_swarm_tokens_per_second",
        "Tokens that all peers train, by what they tell of their speed.",
        now.swarm_tokens_per_s,
    )
    yield gauge(
        "loco_run_left_seconds",
        "Time to the end of the run, at the pace of the last minutes, in seconds.",
        now.left_s,
    )


def _blocks(now: MetricsSnapshot) -> Metric:
    family = CounterMetricFamily(
        "loco_data_blocks",
        "Blocks of the corpus that changes of the swarm's members have left out or repeated.",
        labels=["fate"],
    )
    family.add_metric(["lost"], now.lost_blocks)
    family.add_metric(["repeated"], now.repeated_blocks)
    return family


def _fragments(now: MetricsSnapshot) -> Iterator[Metric]:
    yield counter(
        "loco_stalled_seconds",
        "Time for which training stood still for fragments that were late, in seconds.",
        now.stalled_s,
    )
    yield counter(
        "loco_state_divergence",
        "Chunks of the outer copy found to differ from a better one of another peer.",
        now.diverged,
    )
    yield SummaryMetricFamily(
        "loco_state_heal_seconds",
        "Time that it took to fetch such a chunk, in seconds.",
        count_value=now.healed,
        sum_value=now.healed_s,
    )
    yield counter_by(
        "reason",
        "loco_contributions_refused",
        "Contributions of other peers to fragments that were not taken, by reason.",
        REFUSED_CONTRIBUTIONS,
        now.refused,
    )
    yield counter_by(
        "outcome",
        "loco_audits",
        "Averages of other peers that were worked out again in part, by outcome.",
        AuditOutcome,
        now.audits,
    )
    yield counter_by(
        "what",
        "loco_microbatches",
        "Microbatches of a pipeline at this peer, by what has happened to them.",
        Counted,
        now.microbatches,
    )
    if now.pipeline is not None:
        yield from pipeline_metrics(now.pipeline)


def _swarm(now: MetricsSnapshot) -> Iterator[Metric]:
    wire = CounterMetricFamily(
        "loco_wire_bytes",
        "Bytes handed to and taken from streams to peers, framing included.",
        labels=["direction", "protocol"],
    )
    for direction, by_protocol in (("sent", now.sent_bytes), ("received", now.received_bytes)):
        for protocol, count in sorted(by_protocol.items()):
            wire.add_metric([direction, protocol], count)
    yield wire
    peers = GaugeMetricFamily("loco_peers", "Other peers known, by state.", labels=["state"])
    for state in PeerState:
        peers.add_metric([str(state)], now.peers.get(state, 0))
    yield peers
    rtt = GaugeMetricFamily(
        "loco_peer_rtt_seconds", "Smoothed round-trip time to a linked peer.", labels=["peer"]
    )
    for peer_id, seconds in sorted(now.rtt_s.items()):
        rtt.add_metric([peer_id], seconds)
    yield rtt


def _group(now: MetricsSnapshot) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "loco_group_info",
        "Part of the model that this peer holds, and the group of those that do; always 1.",
        labels=["group", "part"],
    )
    if now.group is not None and now.part is not None:
        info.add_metric([now.group, now.part], 1)
    yield info
    yield counter(
        "loco_other_group_refused",
        "Proposals, contributions and requests that were meant for another group.",
        now.refused.get(RefusalReason.OTHER_GROUP, 0),
    )


def _restarts(now: MetricsSnapshot) -> Iterator[Metric]:
    trainer = CounterMetricFamily(
        "loco_trainer_restarts", "Restarts of the trainer process, by reason.", labels=["reason"]
    )
    reasons = dict.fromkeys(TRAINER_RESTART_REASONS, 0) | dict(now.trainer_restarts)
    for reason, count in reasons.items():
        trainer.add_metric([reason], count)
    yield trainer
    yield counter("loco_p2pd_restarts", "Restarts of the libp2p daemon.", now.p2pd_restarts)
    yield counter("loco_directory_restarts", "Restarts of the directory.", now.directory_restarts)
    yield counter(
        "loco_failed_streams",
        "Streams from other peers that a bug of ours has ended.",
        now.failed_streams,
    )
    yield counter_by(
        "fault",
        "loco_peer_faults",
        "What other peers sent that no honest peer sends, by kind.",
        Fault,
        now.faults,
    )
    yield counter(
        "loco_peers_convicted",
        "Peers of which it was proved that they have signed averages of their own making.",
        now.convicted,
    )
    yield from checkpoint_metrics(now.checkpoints, now.checkpoint_age_s)
