"""Prometheus metrics of one peer (they are served by endpoint.py).

The registry is our own, so that many peers live in one process, and nothing but ours is exposed.
What is unknown is absent, never zero; every reason for a skipped round is there from the start, at
zero. `loco_group_info` names the group, so the other metrics need no label for it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

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

from peer.facts import CheckpointOutcome, Facts, PeerState
from peer.runtime import NetworkStatistics
from protocol.experts.matrix import ENSEMBLE
from protocol.membership.book import Fault
from protocol.membership.dial_back import Reach
from protocol.microbatch.core import MicrobatchEvent
from protocol.outcomes import AuditOutcome, RefusalReason, SkipReason

from .problems import CONDITIONS
from .status import Status

TRAINER_RESTART_REASONS: Final = (
    "died", "hung", "error", "unusable", "non_finite", "out_of_memory",
)  # fmt: skip
"""Reasons that are there from the start; others may follow."""
REFUSED_CONTRIBUTIONS: Final = (RefusalReason.AHEAD, RefusalReason.BEHIND, RefusalReason.TWICE)
"""Reasons that are there from the start; an owner has them most often."""


class Now(NamedTuple):
    """One peer at one moment of trio's clock."""

    facts: Facts
    status: Status
    carried: NetworkStatistics
    now_s: float


class Row(NamedTuple):
    """One metric: a value, or values by their label or labels. None is absent."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    said: str
    found: float | Mapping[Any, float | None] | None

    def family(self, declared: str) -> Metric:
        """The metric that is declared as `name` or `name{label,label}`."""
        name, *labels = re.findall(r"\w+", declared)
        family = self.kind(name, self.said, labels=labels)
        values = self.found.items() if isinstance(self.found, Mapping) else [((), self.found)]
        for at, value in values:
            if value is not None:
                family.add_metric((at,) if isinstance(at, str) else at, value)
        return family


_counter: Final = partial(Row, CounterMetricFamily)
_gauge: Final = partial(Row, GaugeMetricFamily)

# --- families -------------------------------------------------------------------------------------


def _of_training(now: Now) -> dict[str, Row]:
    facts, status, corpus = now.facts, now.status, now.facts.corpus
    elsewhere = corpus.pieces - corpus.here
    pieces = {"here": corpus.here, "elsewhere": elsewhere, "only_here": corpus.only_here}
    return {
        "loco_inner_steps": _counter("Inner optimizer steps done by this peer.", facts.inner_steps),
        "loco_tokens": _counter("Tokens trained by this peer.", facts.tokens),
        "loco_train_loss": _gauge(
            "Mean training loss of the last round, in nats per token.", status.train_loss
        ),
        "loco_validation_loss": _gauge(
            "Loss of the slow weights on the run's validation blocks, in nats per token.",
            status.validation_loss,
        ),
        "loco_compute_utilisation": _gauge(
            "Tokens trained over those that the trainer alone would have trained, as a ratio.",
            facts.compute_utilisation(now.now_s),
        ),
        "loco_trainer_restarts{reason}": _counter(
            "Restarts of the trainer process, by reason.",
            dict.fromkeys(TRAINER_RESTART_REASONS, 0) | facts.restarts,
        ),
        "loco_data_blocks{fate}": _counter(
            "Blocks of the corpus that changes of the swarm's members have left out or repeated.",
            {"lost": facts.lost_blocks, "repeated": facts.repeated_blocks},
        ),
        "loco_corpus_pieces{where}": _gauge(
            "Pieces of the corpus, by where they are.", pieces if corpus.pieces else None
        ),
        "loco_corpus_fetched_bytes": _counter(
            "Bytes of pieces that have come from other peers.",
            corpus.fetched_bytes if corpus.pieces else None,
        ),
        "loco_corpus_wait_seconds": _counter(
            "Time for which training stood still for pieces of the corpus, in seconds.",
            corpus.waited_s if corpus.pieces else None,
        ),
        "loco_trainer_seconds{into}": _counter(
            "Time of the trainer, by what it went into; the parts add up.", facts.spent_s
        ),
    }


def _of_the_run(now: Now) -> dict[str, Row]:
    facts, status = now.facts, now.status
    held = facts.held
    return {
        "loco_round": _gauge("Round of the run that this peer is in.", status.round),
        "loco_step": _gauge("Nominal inner step of the run that this peer is at.", status.step),
        "loco_total_steps": _gauge("Nominal inner steps of the whole run.", status.total_steps),
        "loco_learning_rate": _gauge("Learning rate of the present step.", status.learning_rate),
        "loco_tokens_per_second": _gauge("Tokens that this peer trains.", status.tokens_per_s),
        "loco_swarm_tokens_per_second": _gauge(
            "Tokens that all peers train, by what they tell of their speed.",
            status.swarm_tokens_per_s,
        ),
        "loco_run_left_seconds": _gauge(
            "Time to the end of the run, at the pace of the last minutes, in seconds.",
            status.left_s,
        ),
        "loco_group_info{group,part}": _gauge(
            "Part of the model that this peer holds, and the group of those that do; always 1.",
            None if held is None else {(held.group.digest, held.group.part): 1},
        ),
        "loco_other_group_refused": _counter(
            "Proposals, contributions and requests that were meant for another group.",
            facts.refused[RefusalReason.OTHER_GROUP],
        ),
    }


def _of_experts(experts: Mapping[str, Any]) -> dict[str, Row]:
    names = experts["names"]
    rows = zip((*names, ENSEMBLE), (*experts["losses"], experts["together"]), strict=True)
    losses = {(of, on): loss for of, row in rows for on, loss in zip(names, row, strict=True)}
    return {
        "loco_expert_loss{expert,domain}": _gauge(
            "Loss of an expert on the held-out blocks of a domain, in nats per token, as its peers"
            " tell; of the ensemble as the last eval here has found.",
            losses,
        ),
        "loco_expert_gain{expert}": _gauge(
            "Fall of an expert's loss on its own domain per FLOP, over its last validations.",
            dict(zip(names, experts["gains"], strict=True)),
        ),
    }


def _of_averaging(now: Now) -> dict[str, Row]:
    facts = now.facts
    return {
        "loco_inner_steps_per_average": _gauge(
            "Inner steps between two averages of this peer (H), as the run or the peer has chosen.",
            facts.inner_steps_per_average,
        ),
        "loco_outer_rounds{outcome,reason}": _counter(
            "Rounds ended, by outcome; a skipped one has a reason.",
            {("averaged", ""): facts.averaged}
            | {("skipped", str(reason)): facts.skipped[reason] for reason in SkipReason},
        ),
        "loco_averaged_share": _gauge(
            "Share of the last 50 rounds that were averaged, 0 to 1.", facts.averaged_share
        ),
        "loco_replica_distance": _gauge(
            "Root mean square per parameter of our fast weights less the last partner's.",
            facts.replica_distance,
        ),
        "loco_stalled_seconds": _counter(
            "Time for which training stood still for fragments that were late, in seconds.",
            facts.stalled_s,
        ),
        "loco_state_divergence": _counter(
            "Chunks of the outer copy found to differ from a better one of another peer.",
            facts.diverged,
        ),
        "loco_contributions_refused{reason}": _counter(
            "Contributions to fragments, and proposals, of others that were not taken, by reason.",
            dict.fromkeys(REFUSED_CONTRIBUTIONS, 0)
            | {why: n for why, n in facts.refused.items() if why is not RefusalReason.OTHER_GROUP},
        ),
        "loco_microbatches{what}": _counter(
            "Microbatches of a pipeline at this peer, by what has happened to them.",
            {what: facts.microbatches[what] for what in MicrobatchEvent},
        ),
        "loco_audits{outcome}": _counter(
            "Averages of other peers that were worked out again in part, by outcome.",
            {outcome: facts.audits[outcome] for outcome in AuditOutcome},
        ),
    }


def _of_packing(now: Now) -> dict[str, Row]:
    packing = now.facts.packing
    return {
        "loco_packed_vectors{came}": _counter(
            "Partners' vectors, by how they came: as differences, again as a whole, or as codes.",
            {"packed": packing.packed, "whole": packing.whole, "plain": packing.plain},
        ),
        "loco_packed_blocks": _counter("Blocks of vectors that came packed.", packing.blocks),
        "loco_misread_blocks": _counter(
            "Those that were read wrongly and sent again.", packing.misread
        ),
        "loco_packing_bytes{of}": _counter(
            "What the codes of our own vectors take, and what was sent of them.",
            {"codes": packing.code_bytes, "sent": packing.sent_bytes},
        ),
        "loco_packing_seconds": _counter(
            "Time that it took to pack our own vectors, in seconds.", packing.seconds
        ),
    }


def _of_stages(now: Now) -> dict[str, Row]:
    pipeline = now.facts.pipeline
    return {
        "loco_pipeline_seconds{into}": _counter(
            "Time that went into the microbatches of a pipeline here, summed over all of them.",
            pipeline.spent_s,
        ),
        "loco_pipeline_iteration_seconds{how}": _gauge(
            "An iteration of a data peer, as planned and as measured.",
            {"planned": pipeline.planned_s, "measured": pipeline.iteration_s},
        ),
        "loco_pipeline_other_plans": _counter(
            "Microbatches that came by another plan than those of other data peers.",
            pipeline.other_plans,
        ),
        "loco_pipeline_line_seconds{peer}": _gauge(
            "How long a boundary that leaves for a peer occupies the line.",
            {link.peer_id: link.out_s for link in pipeline.links if link.out_us},
        ),
        "loco_pipeline_replicas_apart_ratio": _gauge(
            "Distance to the weights of the last partner, a replica of the stage, over their size.",
            pipeline.replicas_apart,
        ),
    }


def _of_the_network(now: Now) -> dict[str, Row]:
    peers, reach, carried = now.status.peers, now.facts.reach, now.carried
    states = Counter(peer.state for peer in peers)
    return {
        "loco_peers{state}": _gauge(
            "Other peers known, by state.", {state: states[state] for state in PeerState}
        ),
        "loco_peer_rtt_seconds{peer}": _gauge(
            "Smoothed round-trip time to a linked peer.",
            {peer.peer_id: peer.rtt_s for peer in peers},
        ),
        "loco_wire_bytes{direction,protocol}": _counter(
            "Bytes handed to and taken from streams to peers, framing included.",
            {("sent", protocol): count for protocol, count in sorted(carried.sent_bytes.items())}
            | {("received", name): count for name, count in sorted(carried.received_bytes.items())},
        ),
        "loco_reachable{family}": _gauge(
            "Whether others can dial this peer: 1 yes, 0 no; absent while unknown.",
            {
                family: None if known is Reach.UNKNOWN else float(known is Reach.YES)
                for family, known in (("ip4", reach.v4), ("ip6", reach.v6))
            },
        ),
        "loco_relays": _gauge("Peers that relay for this one.", len(reach.relays)),
        "loco_relayed_peers": _gauge(
            "Peers that this one is connected to through relays alone.", reach.relayed_peers
        ),
        "loco_relay_circuits": _gauge(
            "Connections of others that this peer relays.", reach.circuits
        ),
        "loco_relay_carried_bytes": _counter(
            "Bytes of others that this peer has relayed.", reach.carried_bytes
        ),
    }


def _of_faults(now: Now) -> dict[str, Row]:
    facts, carried, at_s = now.facts, now.carried, now.facts.checkpoint_at_s
    return {
        "loco_problem{name}": _gauge(
            "What is wrong at this peer: 1 where it is, 0 where not.",
            dict.fromkeys(CONDITIONS, 0) | {each.name: 1 for each in now.status.problems},
        ),
        "loco_p2pd_restarts": _counter("Restarts of the libp2p daemon.", carried.restarts),
        "loco_directory_restarts": _counter("Restarts of the directory.", facts.directory_restarts),
        "loco_failed_streams": _counter(
            "Streams from other peers that a bug of ours has ended.", carried.failed_streams
        ),
        "loco_peer_faults{fault}": _counter(
            "What other peers sent that no honest peer sends, by kind.",
            {fault: facts.faults[fault] for fault in Fault},
        ),
        "loco_peers_convicted": _counter(
            "Peers of which it was proved that they have signed averages of their own making.",
            facts.convicted,
        ),
        "loco_checkpoints{outcome}": _counter(
            "Checkpoints of this peer, by how they ended.",
            {outcome: facts.checkpoints[outcome] for outcome in CheckpointOutcome},
        ),
        "loco_checkpoint_age_seconds": _gauge(
            "Since the last checkpoint was on the disk.", None if at_s is None else now.now_s - at_s
        ),
    }


class Metrics(Collector):
    """The metrics of one peer; `read` is called at each scrape, in the daemon's own task."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, read: Callable[[], Now], *, version: str) -> None:
        self._read = read
        self._version = version
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        facts = now.facts
        rows = _of_training(now) | _of_the_run(now) | _of_averaging(now) | _of_packing(now)
        rows |= _of_stages(now) if facts.holds_stage else {}
        experts = now.status.matrix
        rows |= _of_experts(experts) if experts is not None else {}
        rows |= _of_the_network(now) | _of_faults(now)
        loops = [facts.loops.get(of, "").partition(":")[0] for of in ("trainer", "daemon")]
        rows["loco_build_info{version,trainer_codec,daemon_codec}"] = _gauge(
            "Version of loco-peer, and the loops that code vectors; always 1.",
            {(self._version, *loops): 1},
        )
        for name, row in rows.items():
            yield row.family(name)
        rounds = HistogramMetricFamily(
            "loco_round_seconds", "Duration of each phase of a round, in seconds.", labels=["phase"]
        )
        for phase, seen in facts.phases.items():
            rounds.add_metric([phase], seen.cumulative(), seen.sum_s)
        yield rounds
        yield SummaryMetricFamily(
            "loco_state_heal_seconds",
            "Time that it took to fetch such a chunk, in seconds.",
            count_value=facts.healed,
            sum_value=facts.healed_s,
        )
