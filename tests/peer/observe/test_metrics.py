"""The metrics: their exact names, and what they say."""

from collections import Counter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from peer.facts import (
    CheckpointOutcome,
    CorpusFacts,
    Facts,
    HeldPart,
    MicrobatchTime,
    PackingFacts,
    PeerState,
    PipelineFacts,
    ReachFacts,
    RoundPhase,
)
from peer.observe.metrics import REFUSED_CONTRIBUTIONS, Metrics, Now
from peer.observe.problems import CONDITIONS, PeerProblem
from peer.observe.status import PeerStatus, Status
from peer.runtime import NetworkStatistics
from protocol.membership.dial_back import Reach
from protocol.membership.group import Group
from protocol.outcomes import RefusalReason, SkipReason
from protocol.routing.measures import LinkTimes

NAMES = {
    "loco_inner_steps_total",
    "loco_tokens_total",
    "loco_total_steps",
    "loco_learning_rate",
    "loco_tokens_per_second",
    "loco_swarm_tokens_per_second",
    "loco_run_left_seconds",
    "loco_train_loss",
    "loco_validation_loss",
    "loco_expert_loss",
    "loco_expert_gain",
    "loco_outer_rounds_total",
    "loco_averaged_share",
    "loco_round_seconds_bucket",
    "loco_round_seconds_sum",
    "loco_round_seconds_count",
    "loco_wire_bytes_total",
    "loco_peers",
    "loco_peer_rtt_seconds",
    "loco_compute_utilisation",
    "loco_trainer_restarts_total",
    "loco_replica_distance",
    "loco_data_blocks_total",
    "loco_corpus_pieces",
    "loco_corpus_fetched_bytes_total",
    "loco_corpus_wait_seconds_total",
    "loco_stalled_seconds_total",
    "loco_trainer_seconds_total",
    "loco_packing_seconds_total",
    "loco_state_divergence_total",
    "loco_state_heal_seconds_sum",
    "loco_state_heal_seconds_count",
    "loco_contributions_refused_total",
    "loco_microbatches_total",
    "loco_pipeline_seconds_total",
    "loco_pipeline_iteration_seconds",
    "loco_pipeline_other_plans_total",
    "loco_pipeline_line_seconds",
    "loco_pipeline_replicas_apart_ratio",
    "loco_group_info",
    "loco_other_group_refused_total",
    "loco_round",
    "loco_step",
    "loco_inner_steps_per_average",
    "loco_p2pd_restarts_total",
    "loco_directory_restarts_total",
    "loco_failed_streams_total",
    "loco_peer_faults_total",
    "loco_problem",
    "loco_checkpoints_total",
    "loco_checkpoint_age_seconds",
    "loco_audits_total",
    "loco_peers_convicted_total",
    "loco_reachable",
    "loco_relays",
    "loco_relayed_peers",
    "loco_relay_circuits",
    "loco_relay_carried_bytes_total",
    "loco_packed_vectors_total",
    "loco_packed_blocks_total",
    "loco_misread_blocks_total",
    "loco_packing_bytes_total",
    "loco_build_info",
}

NOTHING: Any = None
CARRIED = NetworkStatistics(
    {"/loco/gossip/1": 11}, {"/loco/gossip/1": 12}, 0, failed_streams=4, restarts=1
)


def full() -> Now:
    facts = Facts(
        "12D3me",
        1,
        chosen_inner_steps=12,
        inner_steps=10,
        tokens=1000,
        tokens_per_step=100,
        alone_steps_per_s=1.0,
        training_since_s=90.0,
        averaged=7,
        skipped=Counter({SkipReason.DEADLINE: 2}),
        restarts=Counter({"killed": 1}),
        replica_distance=0.125,
        lost_blocks=5,
        repeated_blocks=6,
        corpus=CorpusFacts(pieces=40, here=12, only_here=2, fetched_bytes=1 << 20, waited_s=2.5),
        stalled_s=1.5,
        diverged=4,
        healed=3,
        healed_s=0.5,
        refused=Counter(
            {RefusalReason.TWICE: 2, RefusalReason.NOT_LINKED: 1, RefusalReason.OTHER_GROUP: 3}
        ),
        checkpoints=Counter({CheckpointOutcome.WRITTEN: 8, CheckpointOutcome.FAILED: 9}),
        checkpoint_at_s=80.0,
        held=HeldPart(Group("ab" * 16, "stage/1"), NOTHING, "int8", NOTHING),
        pipeline=PipelineFacts(
            planned_s=1.25,
            spent_s={
                MicrobatchTime.COMPUTING: 1.0,
                MicrobatchTime.SENDING: 2.0,
                MicrobatchTime.WAITING: 0.5,
            },
            other_plans=3,
            links=(LinkTimes("12D3a", 40_000, 2_500, 0), LinkTimes("12D3b", 40_000)),
            replicas_apart=0.025,
        ),
        directory_restarts=2,
        loops={"trainer": "compiled", "daemon": "plain: ImportError: no numba"},
        reach=ReachFacts(
            v4=Reach.NO, relays=("12D3a",), relayed_peers=2, circuits=3, carried_bytes=7
        ),
        packing=PackingFacts(21, 22, 23, 24, 25, 26, 27),
    )
    facts.recent.extend([True, True, True, False])
    experts = {
        "names": ("general", "code"),
        "losses": ((1.5, 2.0), (None, 1.25)),
        "together": (1.5, None),
        "gains": (None, 2e-15),
        "advice": None,
    }
    status = Status(
        matrix=experts,
        round=4,
        step=123,
        total_steps=1600,
        learning_rate=0.01,
        tokens_per_s=2900.0,
        swarm_tokens_per_s=8400.0,
        left_s=372.0,
        train_loss=2.5,
        validation_loss=2.25,
        peers=(
            PeerStatus("12D3a", PeerState.TRAINING, rtt_s=0.25),
            PeerStatus("12D3b", PeerState.TRAINING),
        ),
        problems=(PeerProblem("split", "two", "troubleshooting.md#split"),),
    )
    return Now(facts, status, CARRIED, 100.5)


def nothing() -> Now:
    return Now(Facts("12D3me", 1), Status(), NetworkStatistics({}, {}), 0.0)


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (
            sample.name,
            *(f"{key}={value}" for key, value in sorted(sample.labels.items())),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_names_are_exactly_these() -> None:
    found = samples(Metrics(full, version="1"))
    assert {name[0] for name in found} == NAMES


def test_packed_vectors_are_told_by_how_they_came() -> None:
    found = samples(Metrics(full, version="1"))
    assert found["loco_packed_vectors_total", "came=packed"] == 21
    assert found["loco_packed_vectors_total", "came=plain"] == 22
    assert found["loco_packed_vectors_total", "came=whole"] == 25
    assert found["loco_packed_blocks_total",] == 23
    assert found["loco_misread_blocks_total",] == 24
    assert found["loco_packing_bytes_total", "of=codes"] == 26
    assert found["loco_packing_bytes_total", "of=sent"] == 27


def test_what_the_daemon_supervises() -> None:
    found = samples(Metrics(full, version="1"))
    assert found["loco_round",] == 4
    assert found["loco_compute_utilisation",] == pytest.approx(1000 / (10.5 * 100))
    assert found["loco_checkpoint_age_seconds",] == 20.5
    assert found["loco_p2pd_restarts_total",] == 1
    assert found["loco_directory_restarts_total",] == 2
    assert found["loco_failed_streams_total",] == 4


def test_what_is_wrong_is_one_and_all_else_zero() -> None:
    found = samples(Metrics(full, version="1"))
    told = {key[1]: value for key, value in found.items() if key[0] == "loco_problem"}
    assert told == {f"name={name}": float(name == "split") for name in CONDITIONS}


def test_how_far_the_run_is() -> None:
    found = samples(Metrics(full, version="1.2.3"))
    assert found["loco_total_steps",] == 1600
    assert found["loco_learning_rate",] == 0.01
    assert found["loco_tokens_per_second",] == 2900
    assert found["loco_swarm_tokens_per_second",] == 8400
    assert found["loco_run_left_seconds",] == 372


def test_numbers_are_read_at_each_scrape() -> None:
    now = [nothing()]
    metrics = Metrics(lambda: now[0], version="1.2.3")
    assert samples(metrics)["loco_tokens_total",] == 0
    unknown = "loco_build_info", "daemon_codec=", "trainer_codec=", "version=1.2.3"
    assert samples(metrics)[unknown] == 1
    now[0] = full()
    found = samples(metrics)
    assert found["loco_tokens_total",] == 1000
    assert found["loco_inner_steps_total",] == 10
    assert found["loco_outer_rounds_total", "outcome=averaged", "reason="] == 7
    assert found["loco_outer_rounds_total", "outcome=skipped", "reason=deadline"] == 2
    assert found["loco_averaged_share",] == 0.75
    assert found["loco_wire_bytes_total", "direction=sent", "protocol=/loco/gossip/1"] == 11
    assert found["loco_wire_bytes_total", "direction=received", "protocol=/loco/gossip/1"] == 12
    assert found["loco_peers", "state=training"] == 2
    assert found["loco_data_blocks_total", "fate=lost"] == 5
    assert found["loco_data_blocks_total", "fate=repeated"] == 6
    pieces = {w: found["loco_corpus_pieces", f"where={w}"] for w in ("here", "elsewhere")}
    assert pieces == {"here": 12, "elsewhere": 28}
    assert found["loco_corpus_wait_seconds_total",] == 2.5
    assert found["loco_peer_rtt_seconds", "peer=12D3a"] == 0.25
    assert found["loco_trainer_restarts_total", "reason=killed"] == 1
    assert found["loco_reachable", "family=ip4"] == 0
    assert ("loco_reachable", "family=ip6") not in found
    assert found["loco_relays",] == 1
    assert found["loco_relayed_peers",] == 2
    assert found["loco_relay_circuits",] == 3
    assert found["loco_relay_carried_bytes_total",] == 7
    build = "loco_build_info", "daemon_codec=plain", "trainer_codec=compiled", "version=1.2.3"
    assert found[build] == 1
    assert found["loco_group_info", f"group={full().facts.group}", "part=stage/1"] == 1
    assert found["loco_pipeline_seconds_total", "into=sending"] == 2
    assert found["loco_pipeline_iteration_seconds", "how=planned"] == 1.25
    assert ("loco_pipeline_iteration_seconds", "how=measured") not in found
    assert found["loco_pipeline_other_plans_total",] == 3
    assert found["loco_pipeline_replicas_apart_ratio",] == 0.025
    lines = {name[1:]: value for name, value in found.items() if name[0].endswith("line_seconds")}
    assert lines == {("peer=12D3a",): 0.0025}
    assert found["loco_other_group_refused_total",] == 3
    assert found["loco_step",] == 123
    assert found["loco_inner_steps_per_average",] == 12
    assert found["loco_stalled_seconds_total",] == 1.5
    assert found["loco_state_divergence_total",] == 4
    refused = {
        reason: found["loco_contributions_refused_total", f"reason={reason}"]
        for reason in REFUSED_CONTRIBUTIONS
    }
    assert refused == {RefusalReason.AHEAD: 0, RefusalReason.BEHIND: 0, RefusalReason.TWICE: 2}
    assert found["loco_contributions_refused_total", "reason=not_linked"] == 1
    assert ("loco_contributions_refused_total", "reason=other_group") not in found
    assert (found["loco_state_heal_seconds_count",], found["loco_state_heal_seconds_sum",]) == (
        3,
        0.5,
    )


def test_experts_have_their_losses_on_each_domain_and_so_has_the_ensemble() -> None:
    found = samples(Metrics(full, version="1.2.3"))
    losses = {name[1:]: value for name, value in found.items() if name[0] == "loco_expert_loss"}
    assert losses == {
        ("domain=general", "expert=general"): 1.5,
        ("domain=code", "expert=general"): 2.0,
        ("domain=code", "expert=code"): 1.25,
        ("domain=general", "expert=ensemble"): 1.5,
    }
    assert found["loco_expert_gain", "expert=code"] == 2e-15


def test_what_is_unknown_is_absent_and_what_may_come_is_zero() -> None:
    found = samples(Metrics(nothing, version="1"))
    for name in (
        "loco_train_loss",
        "loco_validation_loss",
        "loco_round",
        "loco_replica_distance",
        "loco_averaged_share",
    ):
        assert (name,) not in found
    for reason in SkipReason:
        assert found["loco_outer_rounds_total", "outcome=skipped", f"reason={reason}"] == 0
    assert found["loco_round_seconds_count", "phase=exchange"] == 0


def test_durations_fall_into_their_buckets() -> None:
    now = nothing()
    metrics = Metrics(lambda: now, version="1")
    for seconds in (0.1, 0.2, 20_000.0):
        now.facts.phases[RoundPhase.MATCH].observe(seconds)
    found = samples(metrics)
    assert found["loco_round_seconds_bucket", "le=0.1", "phase=match"] == 1
    assert found["loco_round_seconds_bucket", "le=0.3", "phase=match"] == 2
    assert found["loco_round_seconds_bucket", "le=+Inf", "phase=match"] == 3
    assert found["loco_round_seconds_sum", "phase=match"] == pytest.approx(20_000.3)
    assert found["loco_round_seconds_count", "phase=train"] == 0


def test_every_metric_explains_itself() -> None:
    for family in Metrics(full, version="1").registry.collect():
        assert family.documentation.endswith("."), family.name
