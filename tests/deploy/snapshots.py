"""A peer's metrics with every value known."""

from peer.observe.checkpoint_metrics import CheckpointOutcome
from peer.observe.corpus_facts import CorpusFacts
from peer.observe.metrics import Metrics, MetricsSnapshot
from peer.observe.packing_facts import PackingFacts
from peer.observe.pipeline_facts import PipelineFacts
from peer.observe.progress import RunProgress
from peer.observe.reach_facts import ReachFacts
from peer.observe.round_metrics import RoundPhase
from peer.observe.status import Outcomes, PeerState
from protocol.membership.dial_back import Reach
from protocol.outcomes import SkipReason
from protocol.routing.vectors import LinkTimes


def full_snapshot() -> MetricsSnapshot:
    return MetricsSnapshot(
        reach=ReachFacts(v4=Reach.YES, v6=Reach.NO),
        packing=PackingFacts(9, 1, 900, 20, 1, 1000, 600),
        progress=RunProgress(160, 1600, 0.01, 2900.0, 8400.0, 372.0, 4),
        inner_steps=100,
        tokens=102400,
        train_loss=2.5,
        validation_loss=2.6,
        outcomes=Outcomes(averaged=9, skipped={SkipReason.NO_PARTNER: 1}, recent_share=0.9),
        sent_bytes={"/loco/gossip/1": 1000, "/loco/hello/1": 10},
        received_bytes={"/loco/gossip/1": 1000, "/loco/hello/1": 10},
        peers={PeerState.TRAINING: 1},
        rtt_s={"12D3KooWAbc": 0.02},
        compute_utilisation=0.97,
        trainer_restarts={"died": 1},
        replica_distance=1e-3,
        corpus=CorpusFacts(pieces=40, here=12, only_here=2, fetched_bytes=1 << 20, waited_s=2.5),
        lost_blocks=3,
        repeated_blocks=2,
        round=10,
        step=500,
        inner_steps_per_average=50,
        pipeline=PipelineFacts(
            planned_s=1.25,
            iteration_s=1.5,
            links=(LinkTimes("12D3KooWAbc", 20_000, 5_000),),
            replicas_apart=0.025,
        ),
        group="ab" * 16,
        part="model",
        checkpoints={CheckpointOutcome.WRITTEN: 3},
        checkpoint_age_s=20.0,
        p2pd_restarts=0,
        directory_restarts=0,
        failed_streams=0,
    )


def full_metrics(read=full_snapshot) -> Metrics:
    metrics = Metrics(read, version="0.1.0")
    for phase in RoundPhase:
        metrics.observe_round(phase, 0.5)
    return metrics
