"""The parts of data peers and of relays in the exchange of microbatches (exchange.py)."""

from collections.abc import Sequence
from typing import Final

import trio

from peer.facts import Facts, PeerState
from peer.observe.event_names import EventName
from peer.observe.events import Events
from peer.rounds.services import Services
from peer.training.shared import SLOTS
from protocol.membership.view import TRAINING, Member
from protocol.microbatch.checks import Checks
from protocol.microbatch.core import Command
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.relay import RelayCore
from protocol.routing.routers import PlannedRouter, RandomRouter, plan_of, router_of
from protocol.run.amendments import AmendedSpec
from protocol.run.layout import DATA_STAGE

from .exchange import PATIENCE_S, StageExchange
from .peers import StagePeers
from .survey import Planner


def exchange_of(
    amended: AmendedSpec,
    stage: int,
    peers: StagePeers,
    services: Services,
    plan: Planner = plan_of,
) -> StageExchange:
    """The exchange of a peer that holds this stage."""
    if stage != DATA_STAGE:
        relay = RelayRole(amended, peers, services)
        return StageExchange(relay, amended, stage, peers, services, plan)
    router = router_of(amended.founding, services.network.peer_id)
    planned = router if isinstance(router, PlannedRouter) else None
    data_peer = DataPeerRole(router, peers, services)
    return StageExchange(data_peer, amended, stage, peers, services, plan, planned)


# --- data peers -----------------------------------------------------------------------------------
class LeftOut:
    """The stages that a run trains without, since nobody holds them now."""

    def __init__(self, facts: Facts, events: Events) -> None:
        self._facts = facts
        self._events = events
        self._since_s: dict[int, float] = {}

    def report(self, core: DataPeerCore) -> None:
        now_s = trio.current_time()
        for stage in core.left_out:
            if stage not in self._since_s:
                self._since_s[stage] = now_s
                self._events.emit(EventName.STAGE_LEFT_OUT, stage=stage, step=self._facts.step)
        for stage in self._since_s.keys() - set(core.left_out):
            seconds = round(now_s - self._since_s.pop(stage), 1)
            step = self._facts.step
            self._events.emit(EventName.STAGE_TAKEN_IN, stage=stage, step=step, seconds=seconds)
        if self._facts.state is PeerState.TRAINING:
            self._facts.now_doing(_doing(core.missing_stages, core.left_out))


def _doing(missing: Sequence[int], left_out: Sequence[int]) -> str:
    if not missing:
        return "training"
    stages = " and ".join(map(str, missing))
    if set(missing) <= set(left_out):
        return f"training without stage {stages}, which nobody holds"
    return f"waiting for a peer that holds stage {stages}"


CHECK_DRAWS: Final = b"loco/v1/stage-checks\0"
"""Our signature of this seeds the draws of checks: nobody else can make it."""


class DataPeerRole:
    """Implements `StageRole`."""

    def __init__(self, router: RandomRouter, peers: StagePeers, services: Services) -> None:
        checks = Checks(services.sign(CHECK_DRAWS).hex())
        self.core = DataPeerCore(
            services.network.peer_id, router, PATIENCE_S, in_flight=SLOTS, checks=checks
        )
        self._peers, self._facts = peers, services.facts
        self._left_out = LeftOut(services.facts, services.events)

    def look_around(self, now_s: float) -> Sequence[Command]:
        others = self._peers.others()
        trained = self._facts.step > 0 or any(m.progress.step > 0 for m in others)
        commands = self.core.peers_changed(self._peers.relays(), now_s, trained=trained)
        self._left_out.report(self.core)
        return commands

    def step_of(self, step: float) -> float:
        return step

    async def wait_unneeded(self) -> None:
        """Return at once: a data peer's own end is the end."""


# --- relays ---------------------------------------------------------------------------------------
class RelayRole:
    """Implements `StageRole`."""

    def __init__(self, amended: AmendedSpec, peers: StagePeers, services: Services) -> None:
        self.core = RelayCore(SLOTS, PATIENCE_S)
        self._peers, self._facts, self._heard = peers, services.facts, services.heard
        self._total_steps_at = amended.total_steps_at

    def step_of(self, step: float) -> float:
        """No further than the data peers are, and not to the end while one of them trains."""
        there = self._peers.data_peers()
        step = min(step, max((float(m.progress.step) for m in there), default=step))
        may_end = self.core.may_end(
            trio.current_time(),
            ended=step >= self._total_steps_at(step),
            needed=any(map(self._trains, there)),
        )
        return step if may_end else self._total_steps_at(step) - 1.0

    async def wait_unneeded(self) -> None:
        """Wait until no data peer trains, since they validate to the last."""
        self._facts.now_doing("waiting for the data peers to end")
        with trio.move_on_after(PATIENCE_S):
            while any(m.progress.state == TRAINING for m in self._peers.data_peers()):
                await self._heard.park()

    def _trains(self, member: Member) -> bool:
        return member.progress.state == TRAINING and not self._has_ended(member)

    def _has_ended(self, member: Member) -> bool:
        return member.progress.step >= self._total_steps_at(member.progress.step)

    def look_around(self, now_s: float) -> Sequence[Command]:
        there = self._peers.data_peers()
        ended = bool(there) and all(map(self._has_ended, there))
        training = [m.peer_id for m in there if self._trains(m)]
        alive = [m.peer_id for m in there]
        return self.core.peers_changed(training, now_s, ended=ended, alive=alive)
