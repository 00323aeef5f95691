"""A peer's metrics with every value known."""

from collections import Counter
from typing import Any

from peer.facts import (
    CheckpointOutcome,
    CorpusFacts,
    Facts,
    HeldPart,
    PackingFacts,
    PeerState,
    PipelineFacts,
    ReachFacts,
    RoundTiming,
)
from peer.observe.metrics import Metrics, Now
from peer.observe.status import PeerStatus, Status
from peer.runtime import NetworkStatistics
from protocol.membership.dial_back import Reach
from protocol.membership.group import Group
from protocol.outcomes import SkipReason
from protocol.routing.measures import LinkTimes

NOTHING: Any = None


def full_record() -> Now:
    facts = Facts(
        "12D3KooWMe",
        1,
        chosen_inner_steps=50,
        inner_steps=100,
        tokens=102400,
        tokens_per_step=1024,
        averaged=9,
        skipped=Counter({SkipReason.NO_PARTNER: 1}),
        alone_steps_per_s=1.0,
        training_since_s=0.0,
        restarts=Counter({"died": 1}),
        replica_distance=1e-3,
        corpus=CorpusFacts(pieces=40, here=12, only_here=2, fetched_bytes=1 << 20, waited_s=2.5),
        lost_blocks=3,
        repeated_blocks=2,
        held=HeldPart(Group("ab" * 16, "stage/0"), NOTHING, "int8", NOTHING),
        pipeline=PipelineFacts(
            planned_s=1.25,
            iteration_s=1.5,
            links=(LinkTimes("12D3KooWAbc", 20_000, 5_000),),
            replicas_apart=0.025,
        ),
        checkpoints=Counter({CheckpointOutcome.WRITTEN: 3}),
        checkpoint_at_s=80.0,
        reach=ReachFacts(v4=Reach.YES, v6=Reach.NO),
        packing=PackingFacts(9, 1, 900, 20, 1, 1000, 600),
    )
    facts.recent.extend([True] * 9 + [False])
    facts.count_timing(RoundTiming(0.5, 0.5, 0.5, 0.5))
    carried = {"/loco/gossip/1": 1000, "/loco/hello/1": 10}
    return Now(
        facts,
        Status(
            round=10,
            step=500,
            total_steps=1600,
            learning_rate=0.01,
            tokens_per_s=2900.0,
            swarm_tokens_per_s=8400.0,
            left_s=372.0,
            train_loss=2.5,
            validation_loss=2.6,
            matrix={
                "names": ("general", "code"),
                "losses": ((1.5, 2.0), (2.5, 1.25)),
                "together": (1.5, 1.3),
                "gains": (1e-15, 2e-15),
                "advice": None,
            },
            peers=(PeerStatus("12D3KooWAbc", PeerState.TRAINING, rtt_s=0.02),),
        ),
        NetworkStatistics(carried, carried, 0),
        100.0,
    )


def full_metrics() -> Metrics:
    return Metrics(full_record, version="0.1.0")
