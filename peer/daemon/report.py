"""`status` and metrics, put together from what the parts know. Reads only.

The console says every few seconds how far the run is. All who show the address to join by show the
same one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low
from typing import Any, Final

import trio

from peer.facts import Facts, PartnerRecord, PeerState
from peer.network.reachability import Scope, address_to_join, scope_of
from peer.observe.events import EventLog
from peer.observe.experts import ExpertBoard
from peer.observe.history import SAMPLE_EVERY_S, History
from peer.observe.metrics import Metrics, Now
from peer.observe.problems import Observed, problems_of
from peer.observe.status import Outcomes, PeerStatus, Status, amendments_json, progress_line
from peer.options.providers import FIRST_GUESSES
from peer.runtime import Address, Network
from peer.training.schedule import learning_rate
from protocol.address.multiaddr import split_peer_id
from protocol.membership.dial_back import Reach
from protocol.membership.group import Group
from protocol.membership.view import Member, View
from protocol.run.layout import DATA_STAGE, part_of_stage, stage_of_part
from protocol.schedule.progress import Watched, progress_sentence
from protocol.schedule.rounds import RunPace

from .experts import ExpertPeers
from .services import DaemonServices

_CURES: Final = {
    Scope.NETWORK: (
        "from elsewhere: forward its port and give --announce HOST:PORT, or have a peer with an"
        " open port relay"
    ),
    Scope.MACHINE: "for others: --listen 0.0.0.0:PORT",
}


@dataclass(frozen=True, slots=True)
class JoinAddress:
    """An address of ours with our peer id, from where it can be dialled, and where it was named."""

    address: Address
    scope: Scope
    named_by: str | None = None

    @property
    def note(self) -> str:
        """A warning for its reader; empty where anybody can dial it."""
        if self.scope is Scope.ANYWHERE:
            return ""
        return f"only reachable from {self.scope}; {_CURES[self.scope]}"


def join_address(network: Network, facts: Facts) -> JoinAddress:
    """A provider's word goes before an inner address at which a neighbour there gets through."""
    reach = facts.reach
    known = any(scope_of(each) is Scope.ANYWHERE for each in reach.working)
    address = address_to_join(
        network.addresses,
        given=[
            each for each, origin in reach.given.items() if not (known and origin in FIRST_GUESSES)
        ],
        working=reach.working,
        needs_relay=reach.reach is Reach.NO,
    )
    named_by = reach.given.get(split_peer_id(address)[0])
    return JoinAddress(address, scope_of(address), named_by)


class Report:
    """Reads the parts of one peer, for `status`, metrics and the console.

    Speeds of others are what they tell of themselves, in inner steps per second; all train batches
    of the same size. The stages of a pipeline train the same tokens together: there a peer has no
    speed of its own.

    Attributes:
        metrics_url: where Prometheus finds us; None until that is known.
        price_per_hour: of this machine; None where nobody has said it.
    """

    def __init__(self, services: DaemonServices) -> None:
        self._services = services
        self._facts = services.facts
        self._roster = services.roster
        self._pace = RunPace()
        self._watched = Watched()
        self._started_s = trio.current_time()
        self._history = History()
        self._board = ExpertBoard()
        self._recent: Status | None = None
        self._recent_s = 0.0
        self.metrics_url: str | None = None
        self.price_per_hour: float | None = None
        self.metrics = Metrics(self.now, version=services.version)

    def now(self) -> Now:
        carried = self._services.network.statistics()
        return Now(self._facts, self.status(), carried, trio.current_time())

    async def keep_history(self) -> None:
        while True:
            self._history.note(self.recent(), self._services.network.statistics())
            await trio.sleep(SAMPLE_EVERY_S)

    def snapshot(self, *, history: bool) -> dict[str, Any]:
        """The status, who averages with whom, and the last lines for people.

        Args:
            history: whether all that curves are made of is told, too.
        """
        alive = [member.peer_id for member in self._roster.alive(trio.current_time())]
        told = self.status().to_json() | {
            "log": list(self._services.events.tail),
            "pairs": pairs_json(self._facts, alive),
        }
        return told | {"history": self._history.to_json()} if history else told

    def recent(self) -> Status:
        """The status of the last second, doing what is done now; many that look share one."""
        now_s = trio.current_time()
        old_s = max(now_s - LOOK_S, self._facts.doing_since_s)
        if self._recent is None or self._recent_s <= old_s:
            self._recent, self._recent_s = self.status(), now_s
        return self._recent

    @cached_property
    def _expert_peers(self) -> ExpertPeers:
        return ExpertPeers(self._roster, self._facts)

    @property
    def _experts(self) -> ExpertPeers | None:
        return None if self._facts.expert_run is None else self._expert_peers

    def status(self) -> Status:
        facts, now_s = self._facts, trio.current_time()
        alive = list(self._roster.alive(now_s))
        joins_at = join_address(self._services.network, facts)
        return Status(
            peer_id=facts.peer_id,
            run_id=facts.run_id,
            state=facts.state,
            round=facts.round if facts.run_id is not None else None,
            step=facts.step if facts.run_id is not None else None,
            chosen_inner_steps=facts.chosen_inner_steps,
            tokens=facts.earlier_tokens + facts.tokens,
            train_loss=facts.train_loss,
            validation_loss=self._validation_loss(),
            replica_loss=facts.replica_loss,
            outcomes=Outcomes(facts.averaged, dict(facts.skipped), facts.averaged_share),
            peers=tuple(
                _peer_status(member, facts.partners.get(member.peer_id)) for member in alive
            ),
            metrics=self.metrics_url,
            part=facts.held.group.part if facts.held else None,
            expert=facts.expert,
            experts=self._experts.status() if self._experts else (),
            matrix=self._board.matrix(facts, alive),
            microbatches={str(what): count for what, count in facts.microbatches.items()},
            pipeline=facts.pipeline.to_json() if facts.holds_stage else None,
            amendments=amendments_json(facts.spec),
            successor=None if facts.successor is None else facts.successor.to_json(),
            ranks=facts.ranks,
            codec=_codec_sentence(facts),
            reach=facts.reach.to_json(),
            address=joins_at.address,
            address_from=joins_at.named_by,
            reachable_from=str(joins_at.scope),
            doing=self._watched.words(facts.doing, facts.progress, now_s),
            since_s=now_s - facts.doing_since_s,
            problems=problems_of(Observed(facts, alive, self._services.pacing.loads, now_s)),
            up_s=now_s - self._started_s,
            price_per_hour=self.price_per_hour,
            seconds=facts.seconds,
            **self._progress(alive, now_s),
        )

    def _progress(self, alive: list[Member], now_s: float) -> dict[str, Any]:
        facts = self._facts
        if facts.spec is None or facts.run_id is None:
            return {}
        trains, step = facts.state is PeerState.TRAINING, facts.nominal_step
        if trains:
            self._pace.note(now_s, step)
        else:
            self._pace.rest()
        total = facts.spec.total_steps_at(step)
        own = swarm = None
        if facts.held is not None and not facts.holds_stage:
            own = facts.steps_per_s * facts.tokens_per_step if trains else 0.0
            training = facts.held.view.members_training(now_s)
            others = (m.progress.steps_per_s for m in training)
            swarm = own + facts.tokens_per_step * sum(others)
        return {
            "total_steps": total,
            "learning_rate": learning_rate(facts.spec.at_step(step).optimizer, step, total),
            "tokens_per_s": own,
            "swarm_tokens_per_s": swarm,
            "left_s": self._pace.left_s(total) if trains else None,
        }

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


def _peer_status(member: Member, met: PartnerRecord | None) -> PeerStatus:
    progress, met = member.progress, met or PartnerRecord()
    return PeerStatus(
        member.peer_id,
        progress.state,
        progress.round,
        member.rtt_s,
        progress.step,
        progress.validation_loss,
        met.averages,
        met.average_s,
    )


MOST_PEERS: Final = 32
"""Peers in a map of pairs: more would be too small to be read, and too much to ask for."""


def pairs_json(facts: Facts, alive: Sequence[str]) -> dict[str, Any]:
    """The map of averages: a row for each teller, a column for each partner, this peer first.

    A peer tells those that it is linked with of each of its averages in pairs (`AveragedWith` in
    protocol/wire/messages.py); another may say otherwise of the same pair. Peers that are not
    linked do not stand there, whoever tells of them.
    """
    shown, never = [facts.peer_id, *alive][:MOST_PEERS], PartnerRecord()
    told = {**facts.others_partners, facts.peer_id: facts.partners}
    rows = [[told.get(a, {}).get(b, never) for b in shown] for a in shown]
    return {
        "peers": shown,
        "averages": [[met.averages for met in row] for row in rows],
        "average_s": [[met.average_s for met in row] for row in rows],
    }


def _codec_sentence(facts: Facts) -> str | None:
    if facts.codec is None:
        return None
    sides = (f"{side} {loops}" for side, loops in sorted(facts.loops.items()))
    return f"{facts.codec}: {', '.join(sides)}"


ShowLine = Callable[[str], bool]
"""Shows a line that goes on, or none where it is empty. Returns whether people see it."""
LOOK_S: Final = 1.0
SAY_EVERY_S: Final = 15.0
REPEAT_S: Final = 30.0
"""How often it is said again what is waited for, or fails."""


@dataclass(eq=False)
class Console:
    """Tells people how far the run is: what is new, or goes on for long.

    Args:
        export: the command that takes the model.
        show: the line at the bottom of a terminal; what people see there is not said again.
    """

    report: Report
    facts: Facts
    events: EventLog
    export: str
    show: ShowLine

    def __post_init__(self) -> None:
        self._step: int | None = None
        self._doing = ""
        self._is_alone = self._is_over = False
        self._next_s = self._again_s = 0.0

    async def run(self) -> None:
        """Tell people, until cancelled; then how to take the model, if that was not told yet."""
        try:
            while True:
                await trio.sleep(LOOK_S)
                self._look()
        finally:
            if self.facts.run_over:
                self._say_over()

    def _look(self) -> None:
        facts, now, now_s = self.facts, self.report.recent(), trio.current_time()
        rests = facts.state in (PeerState.FINISHED, PeerState.PAUSED) or facts.doing == "training"
        doing, lasts_s = now.doing or facts.doing, now_s - facts.doing_since_s
        is_shown = self.show("" if rests else progress_sentence(doing, facts.progress, lasts_s))
        match facts.state:
            case PeerState.TRAINING if facts.doing == "training":
                self._say_progress(now, now_s)
            case PeerState.FINISHED:
                self._say_over("this peer serves its state; ")
            case PeerState.PAUSED | PeerState.LEAVING:
                pass
            case _ if facts.doing != self._doing or (now_s >= self._again_s and not is_shown):
                self._doing, self._again_s = facts.doing, now_s + REPEAT_S
                self.events.say(doing)

    def _say_over(self, and_now: str = "") -> None:
        if not self._is_over:
            self.events.say(f"{and_now}the model: {self.export}")
        self._is_over = True

    def _say_progress(self, now: Status, now_s: float) -> None:
        if now.train_loss is None or now.step == self._step or now_s < self._next_s:
            return
        is_alone = now.trainers == 1
        if is_alone and not self._is_alone:
            self.events.say("training alone: nobody else is here")
        self._is_alone, self._step, self._next_s = is_alone, now.step, now_s + SAY_EVERY_S
        self.events.say(progress_line(now, losses=True))
