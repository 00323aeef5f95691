"""The beginning of a stage that all its peers have left while the run was trained.

Its weights are made of its neighbours' (peer/state/rebuilt_stage.py), and all are told so. The step
is that of the peers that train: they wait for this stage, and go on with it from where they are.
"""

import trio

from peer.observe.event_names import EventName
from peer.ports import PeerId
from peer.state.rebuilt_stage import Neighbour, rebuild
from protocol.membership.group import Group
from protocol.membership.heeded import heeded
from protocol.membership.view import Roster, View
from protocol.run.amendments import AmendedSpec
from protocol.run.layout import Layout, part_of_stage
from protocol.schedule.data_plan import start_position
from protocol.schedule.rounds import middle

from .beginning import Arrival, FirstState, Fresh
from .sources import GivenWeights, weights_of


class Rebuilt:
    """A stage that is rebuilt from its neighbours.

    Args:
        first: the model's first weights, for what no neighbour resembles.
        layouts: of all stages.
    """

    ages = True

    def __init__(self, stage: int, first: Fresh, layouts: tuple[Layout, ...]) -> None:
        self._stage = stage
        self._first = first
        self._layouts = layouts

    async def take(self, arrival: Arrival) -> FirstState:
        """Fetch the neighbours, and make our weights of theirs."""
        await self._first.take(arrival)
        found: list[tuple[PeerId, Neighbour]] = []
        for stage in neighbours_of(self._stage, len(self._layouts)):
            given = await self._fetch(stage, arrival)
            if given is not None:
                neighbour = Neighbour(self._layouts[stage], given.slow_P, given.gradient_norm)
                found.append((given.remote, neighbour))
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

    async def _fetch(self, stage: int, arrival: Arrival) -> GivenWeights | None:
        """A neighbour's weights; None where nobody holds it, or gives it in time."""
        group = Group(arrival.held.group.run_id, part_of_stage(stage)).digest
        view = View(arrival.roster, group)
        if not view.alive(trio.current_time()):
            return None
        arrival.facts.now_doing(f"rebuilding stage {self._stage}: fetching stage {stage}")
        return await weights_of(arrival.sources, view, self._layouts[stage].padded_parameters)


def neighbours_of(stage: int, stages: int) -> list[int]:
    """The stages whose layers stand next to this one's."""
    return [each for each in (stage - 1, stage + 1) if 0 <= each < stages]


def where_others_are(spec: AmendedSpec, roster: Roster) -> FirstState:
    """Where those that hold other stages stand: the middle of their steps, and of the data."""
    now_s = trio.current_time()
    others = [member.progress for member in heeded(roster.alive(now_s), now_s)]
    steps = [progress.step for progress in others if progress.step <= spec.longest_steps]
    positions = [(p.epoch, p.position) for p in others if (p.epoch, p.position) != (0, 0)]
    epoch, position = start_position(positions or [(0, 0)])
    step = int(middle(steps, 0))
    return FirstState(step // spec.founding.sync.round_steps - 1, step, epoch, position)
