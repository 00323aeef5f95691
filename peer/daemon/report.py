"""`status` and metrics, put together from what the parts know. Reads only."""

from collections import Counter
from dataclasses import dataclass
from statistics import median_low

import trio

from peer.observe.amendment_lines import amendments_json
from peer.observe.facts import Facts
from peer.observe.metrics import Metrics, MetricsSnapshot
from peer.observe.round_metrics import RoundPhase
from peer.observe.status import Outcomes, PeerState, PeerStatus, Status
from peer.ports import Network
from peer.rounds.timing import RoundTiming
from protocol.membership.group import Group
from protocol.membership.view import Member, Roster, View
from protocol.run.stages import DATA_STAGE, part_of_stage, stage_of_part

from .join_address import join_address
from .links import Links
from .progress import ProgressReport


@dataclass(slots=True)
class Restarts:
    """Restarts of what the daemon supervises besides the trainer."""

    p2pd: int = 0
    directory: int = 0


class Report:
    """Reads the parts of one peer.

    Attributes:
        metrics_url: where Prometheus finds us; None until that is known.
        progress: how far the run is.
    """

    def __init__(
        self,
        *,
        facts: Facts,
        roster: Roster,
        links: Links,
        network: Network,
        restarts: Restarts,
        version: str,
    ) -> None:
        self._facts = facts
        self._roster = roster
        self._links = links
        self._network = network
        self._restarts = restarts
        self.metrics_url: str | None = None
        self.metrics = Metrics(self.snapshot, version=version)
        self.progress = ProgressReport(facts, roster)

    def __repr__(self) -> str:
        return f"<Report of {self._facts.peer_id}>"

    def observe_round(self, timing: RoundTiming) -> None:
        """Count the phases of one round."""
        self.metrics.observe_round(RoundPhase.TRAIN, timing.train_s)
        self.metrics.observe_round(RoundPhase.MATCH, timing.match_s)
        self.metrics.observe_round(RoundPhase.EXCHANGE, timing.exchange_s)
        self.metrics.observe_round(RoundPhase.APPLY, timing.apply_s)

    def status(self) -> Status:
        """This peer, for `loco-peer status`."""
        facts, now_s = self._facts, trio.current_time()
        known, progress = facts.run_id is not None, self.progress.now()
        joins_at = join_address(self._network, facts)
        return Status(
            peer_id=facts.peer_id,
            run_id=facts.run_id,
            state=facts.state,
            round=facts.round if known else None,
            step=facts.step if known else None,
            total_steps=progress.total_steps,
            learning_rate=progress.learning_rate,
            tokens_per_s=progress.tokens_per_s,
            swarm_tokens_per_s=progress.swarm_tokens_per_s,
            left_s=progress.left_s,
            chosen_inner_steps=facts.chosen_inner_steps,
            tokens=facts.earlier_tokens + facts.tokens,
            train_loss=facts.train_loss,
            validation_loss=self._validation_loss(),
            outcomes=self._outcomes(),
            peers=tuple(_peer_status(member) for member in self._roster.alive(now_s)),
            metrics=self.metrics_url,
            part=facts.held.group.part if facts.held else None,
            microbatches={str(what): count for what, count in facts.microbatches.items()},
            pipeline=facts.pipeline.to_json() if self._holds_stage else None,
            amendments=amendments_json(facts.spec),
            codec=_codec_sentence(facts),
            reach=facts.reach.to_json(),
            address=joins_at.address,
            reachable_from=str(joins_at.scope),
            doing=facts.doing,
            since_s=now_s - facts.doing_since_s,
        )

    def snapshot(self) -> MetricsSnapshot:
        """This peer, for a scrape."""
        facts, carried = self._facts, self._network.statistics()
        alive = self._roster.alive(trio.current_time())
        states = Counter(m.progress.state for m in alive)
        return MetricsSnapshot(
            inner_steps=facts.inner_steps,
            tokens=facts.tokens,
            train_loss=facts.train_loss,
            validation_loss=self._validation_loss(),
            outcomes=self._outcomes(),
            sent_bytes=carried.sent_bytes,
            received_bytes=carried.received_bytes,
            peers={state: states.get(state, 0) for state in PeerState},
            rtt_s={m.peer_id: m.rtt_s for m in alive if m.rtt_s is not None},
            compute_utilisation=facts.compute_utilisation(),
            trainer_restarts=dict(facts.restarts),
            replica_distance=facts.replica_distance,
            lost_blocks=facts.lost_blocks,
            repeated_blocks=facts.repeated_blocks,
            stalled_s=facts.stalled_s,
            diverged=facts.diverged,
            healed=facts.healed,
            healed_s=facts.healed_s,
            refused=dict(facts.refused),
            faults=dict(facts.faults),
            checkpoints=dict(facts.checkpoints),
            checkpoint_age_s=(
                None
                if facts.checkpoint_at_s is None
                else trio.current_time() - facts.checkpoint_at_s
            ),
            audits=dict(facts.audits),
            convicted=facts.convicted,
            microbatches=dict(facts.microbatches),
            corpus=facts.corpus if facts.corpus.pieces else None,
            pipeline=facts.pipeline if self._holds_stage else None,
            group=facts.group,
            part=None if facts.held is None else facts.held.group.part,
            round=facts.round if facts.run_id else None,
            step=facts.step if facts.run_id else None,
            progress=self.progress.now(),
            inner_steps_per_average=facts.inner_steps_per_average,
            p2pd_restarts=self._restarts.p2pd,
            directory_restarts=self._restarts.directory,
            failed_streams=carried.failed_streams,
            loops=dict(facts.loops),
            reach=facts.reach,
            packing=facts.packing,
        )

    def _validation_loss(self) -> float | None:
        """Our own, or that of the data peers: a relay has no data to measure one with."""
        held = self._facts.held
        if held is None or stage_of_part(held.group.part) in (None, DATA_STAGE):
            return self._facts.validation_loss
        group = Group(held.group.run_id, part_of_stage(DATA_STAGE)).digest
        members = View(self._roster, group).alive(trio.current_time())
        losses = [m.progress.validation_loss for m in members]
        known = [loss for loss in losses if loss is not None]
        return median_low(known) if known else None

    @property
    def _holds_stage(self) -> bool:
        held = self._facts.held
        return held is not None and stage_of_part(held.group.part) is not None

    def _outcomes(self) -> Outcomes:
        facts = self._facts
        return Outcomes(facts.averaged, dict(facts.skipped), facts.averaged_share())


def _peer_status(member: Member) -> PeerStatus:
    progress = member.progress
    return PeerStatus(
        member.peer_id,
        progress.state,
        progress.round,
        member.rtt_s,
        progress.step,
        progress.validation_loss,
    )


def _codec_sentence(facts: Facts) -> str | None:
    """The run's codec, and what codes with it on either side."""
    if facts.codec is None:
        return None
    sides = (f"{side} {loops}" for side, loops in sorted(facts.loops.items()))
    return f"{facts.codec}: {', '.join(sides)}"
