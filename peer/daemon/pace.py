"""How many steps of a round are ours: the rules of protocol/rounds.py with what we have heard."""

from collections.abc import Sequence
from statistics import median

import trio

from protocol.rounds import Quotas, catch_up, owed_steps, place
from protocol.view import Member

from .facts import Facts


class Pace:
    """The quotas of one peer, round after round.

    Args:
        inner_steps: H.
        facts: of this peer.
    """

    def __init__(self, inner_steps: int, facts: Facts) -> None:
        self._inner_steps = inner_steps
        self._facts = facts
        self._quotas = Quotas()

    def __repr__(self) -> str:
        return f"<Pace of {self._inner_steps} steps, {self._quotas!r}>"

    def quota(self, round_: int, training: Sequence[Member]) -> int:
        """Our steps of a round that begins now.

        Args:
            training: the others that train.
        """
        own_speed, now_s = self._facts.steps_per_s, trio.current_time()
        speeds = [*(m.progress.steps_per_s for m in training), own_speed]
        rounds_per_s = median(speeds) / self._inner_steps
        places = [
            place(m.progress.round, m.progress.fraction, now_s - m.told_s, rounds_per_s)
            for m in training
        ]
        owed = owed_steps(self._inner_steps, own_speed, speeds)
        return self._quotas.next(catch_up(owed, round_, places))
