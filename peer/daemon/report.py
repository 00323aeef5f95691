"""`status` and metrics, put together from what the parts know. Reads only."""

from statistics import median_low

import trio

from peer.observe.amendment_lines import amendments_json
from peer.observe.facts import Facts
from peer.observe.metrics import Metrics, Now
from peer.observe.status import PeerStatus, Status
from peer.ports import Network
from protocol.membership.group import Group
from protocol.membership.view import Member, Roster, View
from protocol.run.layout import DATA_STAGE, part_of_stage, stage_of_part

from .join_address import join_address
from .progress import ProgressReport


class Report:
    """Reads the parts of one peer.

    Attributes:
        metrics_url: where Prometheus finds us; None until that is known.
        progress: how far the run is.
    """

    def __init__(self, *, facts: Facts, roster: Roster, network: Network, version: str) -> None:
        self._facts = facts
        self._roster = roster
        self._network = network
        self.metrics_url: str | None = None
        self.metrics = Metrics(self.now, version=version)
        self.progress = ProgressReport(facts, roster)

    def now(self) -> Now:
        """What is known at this moment."""
        now_s = trio.current_time()
        return Now(
            self._facts,
            now_s,
            self.progress.now(),
            self._validation_loss(),
            tuple(self._roster.alive(now_s)),
            self._network.statistics(),
        )

    def status(self) -> Status:
        """This peer, for `loco-peer status`."""
        now = self.now()
        facts, known = now.facts, now.facts.run_id is not None
        joins_at = join_address(self._network, facts)
        return Status(
            peer_id=facts.peer_id,
            run_id=facts.run_id,
            state=facts.state,
            round=facts.round if known else None,
            progress=now.progress,
            chosen_inner_steps=facts.chosen_inner_steps,
            tokens=facts.earlier_tokens + facts.tokens,
            train_loss=facts.train_loss,
            validation_loss=now.validation_loss,
            outcomes=facts.outcomes(),
            peers=tuple(_peer_status(member) for member in now.alive),
            metrics=self.metrics_url,
            part=facts.held.group.part if facts.held else None,
            microbatches={str(what): count for what, count in facts.microbatches.items()},
            pipeline=facts.pipeline.to_json() if facts.holds_stage else None,
            amendments=amendments_json(facts.spec),
            codec=_codec_sentence(facts),
            reach=facts.reach.to_json(),
            address=joins_at.address,
            reachable_from=str(joins_at.scope),
            doing=facts.doing,
            since_s=now.now_s - facts.doing_since_s,
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
