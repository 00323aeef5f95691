"""The peers of a pipeline by stage, as the roster knows them now, and the balance between stages.

A peer that should hold another stage begins anew: its process joins again, and goes over to that
one, because its checkpoints are of the one it leaves (peer/process/rejoin.py).
"""

from typing import Final

import trio

from peer.facts import Facts, PeerState
from peer.process.rejoin import JoinAgain
from protocol.membership.group import Group
from protocol.membership.view import Member, Roster, View, direct_if_any
from protocol.run.assignment import Balance, stage_need
from protocol.run.layout import DATA_STAGE, part_of_stage
from protocol.wire.stage_messages import RelaysByStage


class StagePeers:
    def __init__(self, roster: Roster, run_id: str, stages: int) -> None:
        self._groups = [Group(run_id, part_of_stage(stage)).digest for stage in range(stages)]
        self._roster = roster
        self._views = [View(roster, group) for group in self._groups]

    def data_peers(self) -> tuple[Member, ...]:
        """The others that hold the data and are alive, by peer id."""
        return self._views[DATA_STAGE].alive(trio.current_time())

    def others(self) -> tuple[Member, ...]:
        """The others that are alive and hold a stage, by peer id."""
        alive = self._roster.alive(trio.current_time())
        return tuple(member for member in alive if member.progress.group in self._groups)

    def stages(self) -> dict[str, int]:
        held = ((member.peer_id, member.progress.group) for member in self.others())
        return {peer_id: self._groups.index(group) for peer_id, group in held if group}

    def relays(self) -> RelaysByStage:
        """The others that hold each further stage and train, relayed ones last, sorted."""
        now_s = trio.current_time()
        training = (view.members_training(now_s) for view in self._views[DATA_STAGE + 1 :])
        return tuple(tuple(m.peer_id for m in direct_if_any(members)) for members in training)

    def holders(self) -> tuple[tuple[str, ...], ...]:
        now_s = trio.current_time()
        return tuple(tuple(m.peer_id for m in view.alive(now_s)) for view in self._views)

    def newcomers(self) -> tuple[str, ...]:
        others = self.others()
        return tuple(m.peer_id for m in others if m.progress.state == PeerState.DOWNLOADING)

    def stage_of(self, peer_id: str) -> int | None:
        """The stage of another peer; None while it is not known to be alive, or holds none."""
        member = self._roster.living(peer_id, trio.current_time())
        group = None if member is None else member.progress.group
        return self._groups.index(group) if group in self._groups else None


LOOK_EVERY_S: Final = 1.0


async def keep_balance(stage: int, peers: StagePeers, facts: Facts, visited: int) -> None:
    """Watch until cancelled.

    Args:
        stage: ours.
        visited: stages of a path.

    Raises:
        JoinAgain: another stage needs us more.
    """
    balance = Balance(facts.peer_id)
    while True:
        await trio.sleep(LOOK_EVERY_S)
        if facts.state is not PeerState.TRAINING:
            continue
        holders = [list(others) for others in peers.holders()]
        holders[stage].append(facts.peer_id)
        move = balance.due_move(stage_need(holders, visited), trio.current_time())
        if move is not None:
            raise JoinAgain(
                f"stage {move.target} needs a peer more than stage {move.source}, which has"
                f" {len(holders[move.source])}",
                part_of_stage(move.target),
            )
