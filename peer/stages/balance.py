"""Sees to it that no stage is short of peers while ours has too many.

A peer that should hold another stage begins anew: its process joins again, and goes over to that
one, for its checkpoints are of the one it leaves (peer/process/rejoin.py).
"""

from typing import Final

import trio

from peer.observe.facts import Facts
from peer.observe.status import PeerState
from peer.process.rejoin import JoinAgain, addresses_of
from protocol.run.assignment import Balance

from .company import StageCompany

LOOK_EVERY_S: Final = 1.0


async def keep_balance(stage: int, company: StageCompany, facts: Facts, visited: int) -> None:
    """Watch until cancelled.

    Args:
        stage: ours.
        visited: stages of a path.

    Raises:
        JoinAgain: another stage needs us more.
    """
    balance = Balance(facts.peer_id, visited)
    while True:
        await trio.sleep(LOOK_EVERY_S)
        if facts.state is not PeerState.TRAINING:
            continue
        holders = [list(others) for others in company.holders()]
        holders[stage].append(facts.peer_id)
        move = balance.due_move(holders, trio.current_time())
        if move is not None:
            raise JoinAgain(
                addresses_of(company.others()),
                f"stage {move.target} needs a peer more than stage {move.source}, which has"
                f" {len(holders[move.source])}",
                move.target,
            )
