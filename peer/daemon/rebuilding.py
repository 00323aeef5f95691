"""The beginning of a stage that all its peers have left while the run was trained.

Its weights are made of its neighbours' (peer/state/rebuilt_stage.py), and all are told so. The step
is that of the peers that train: they wait for this stage, and go on with it from where they are.
"""

from statistics import median_high
from typing import Final

import numpy as np
import trio

from peer.observe.event_names import EventName
from peer.ports import PeerId
from peer.state.rebuilt_stage import Neighbour, rebuild
from peer.state.service import Fetcher
from protocol.membership.group import Group
from protocol.membership.view import Roster, View
from protocol.run.layout import Layout
from protocol.run.run_spec import RunSpec
from protocol.run.stages import part_of_stage
from protocol.schedule.data_plan import start_position

from .beginning import Arrival, FirstState, Fresh

NEIGHBOUR_S: Final = 300.0
"""Longest time for one neighbour's weights."""


class Rebuilt:
    """See the top of the file.

    Args:
        first: the model's first weights, for what no neighbour resembles.
        layouts: of all stages.
    """

    ages = True

    def __init__(self, stage: int, first: Fresh, layouts: tuple[Layout, ...]) -> None:
        self._stage = stage
        self._first = first
        self._layouts = layouts

    def __repr__(self) -> str:
        return f"<Rebuilt stage {self._stage}>"

    async def take(self, arrival: Arrival) -> FirstState:
        """Fetch the neighbours, and make our weights of theirs."""
        await self._first.take(arrival)
        found: list[tuple[PeerId, Neighbour]] = []
        for stage in neighbours_of(self._stage, len(self._layouts)):
            found += await self._fetch(stage, arrival)
        own = self._layouts[self._stage]
        kept = [entry.name for entry in own.entries]
        if found:
            neighbours = [neighbour for _, neighbour in found]
            kept = rebuild(own, arrival.slow_P, neighbours)
        arrival.events.emit(
            EventName.STAGE_REBUILT,
            stage=self._stage,
            remotes=[remote for remote, _ in found],
            untrained=kept,
        )
        return where_others_are(arrival.spec, arrival.roster)

    async def _fetch(self, stage: int, arrival: Arrival) -> list[tuple[PeerId, Neighbour]]:
        """The neighbour and the peer that gave it; nothing where nobody gives it in time."""
        layout, facts = self._layouts[stage], arrival.facts
        group = Group(arrival.held.group.run_id, part_of_stage(stage)).digest
        view = View(arrival.roster, group)
        if not view.alive(trio.current_time()):
            return []
        slow_P, momentum_P = np.zeros((2, layout.padded_parameters), np.float32)
        facts.now_doing(f"rebuilding stage {self._stage}: fetching stage {stage}")

        async def ask(fetcher: Fetcher) -> tuple[PeerId, Neighbour]:
            state = await fetcher.state(group, slow_P, momentum_P)
            return fetcher.remote_peer_id, Neighbour(layout, slow_P, state.gradient_norm)

        with trio.move_on_after(NEIGHBOUR_S):
            return [await arrival.sources.fetch(ask, view)]
        return []


def neighbours_of(stage: int, stages: int) -> list[int]:
    """The stages whose layers stand next to this one's."""
    return [each for each in (stage - 1, stage + 1) if 0 <= each < stages]


def where_others_are(spec: RunSpec, roster: Roster) -> FirstState:
    """Where those that hold other stages stand: the middle of their steps, and of the data."""
    now_s = trio.current_time()
    others = [member.progress for member in roster.alive(now_s)]
    last = spec.total_rounds * spec.sync.inner_steps
    steps = [progress.step for progress in others if progress.step <= last]
    positions = [(p.epoch, p.position) for p in others if (p.epoch, p.position) != (0, 0)]
    epoch, position = start_position(positions or [(0, 0)])
    step = median_high(steps or [0])
    return FirstState(step // spec.sync.inner_steps - 1, step, epoch, position)
