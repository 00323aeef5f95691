"""Which stage of a pipeline a newcomer holds: the one that needs it most, unless it is given."""

from typing import Final

import blake3
import trio

from peer.facts import Facts
from peer.stages.company import StageCompany
from protocol.membership.group import Group
from protocol.membership.view import Roster
from protocol.run.assignment import needed_stage, newcomers_stage
from protocol.run.layout import part_of_stage
from protocol.run.run_spec import RunSpec

from .provision import ChosenStage

LOOK_AROUND_S: Final = 2.0
"""For how long a newcomer to a pipeline listens before it chooses a stage: its first link has told
it of all others, and they beat every second."""
LATECOMERS: Final = 2
"""The longest listening lasts so many times longer."""
LOOKS: Final = 3
"""So often, at most, a newcomer looks again after LOOK_AROUND_S who has chosen what."""


class StageChoice:
    """Chooses the stage that this peer holds.

    Args:
        given: the stage that this machine shall hold; None chooses.

    Attributes:
        given: the same.
    """

    def __init__(self, facts: Facts, roster: Roster, given: int | None = None) -> None:
        self._facts = facts
        self._roster = roster
        self.given = given

    async def choose(self, spec: RunSpec, run_id: str) -> ChosenStage:
        """Listen, choose, and let all know.

        Newcomers that come together listen for different times, so that the later ones hear what
        the earlier ones have chosen; and they look again, for that is heard with a beat.
        """
        facts, pipeline = self._facts, spec.pipeline
        facts.now_doing("checking which stage needs a peer")
        await trio.sleep(LOOK_AROUND_S * (1 + LATECOMERS * _share(facts.peer_id)))
        company = StageCompany(self._roster, run_id, pipeline.stages)
        counts = [len(others) for others in company.holders()]
        needed = needed_stage(counts, pipeline.num_visited)
        stage = needed if self.given is None else self.given
        facts.chosen = Group(run_id, part_of_stage(stage))
        if self.given is None:
            stage = await self._settled(company, stage, pipeline.num_visited)
            facts.chosen = Group(run_id, part_of_stage(stage))
        alive = self._roster.alive(trio.current_time())
        return ChosenStage(
            stage,
            has_holders=bool(company.holders()[stage]),
            is_trained=any(member.progress.step for member in alive),
        )

    async def _settled(self, company: StageCompany, stage: int, visited: int) -> int:
        """The stage to begin with, where others may have chosen at the same time."""
        peer_id = self._facts.peer_id
        for look in range(1, LOOKS + 1):
            await trio.sleep(LOOK_AROUND_S)
            holders = [{*others} for others in company.holders()]
            holders[stage].add(peer_id)
            newcomers = {peer_id, *company.newcomers()}
            settled = newcomers_stage(peer_id, holders, newcomers, visited, look)
            if settled is not None:
                return settled
        return stage


def _share(peer_id: str) -> float:
    """A number in [0, 1) that is a peer's own."""
    return int.from_bytes(blake3.blake3(peer_id.encode()).digest(length=4), "big") / 2**32
