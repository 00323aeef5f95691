"""Coming back to a run with a checkpoint: a peer follows others, leads, or waits.

When all machines of a run were down, each comes back with a checkpoint of its own, and the newest
should be what the run goes on from. Nobody knows who else will come. So those that are back say how
far their checkpoint is, and wait a little for each other.

Rules
  1. Somebody of our group trains, is paused, or has finished: take their state, be it behind our
     checkpoint, which stays on our disk: what one peer says of a newer one moves no swarm. Where
     others have been heard for longer than it (heeded.py), we do so when it has been heard for as
     long.
  2. But one that trains alone, so far behind our checkpoint that it would be lost beside us
     (rounds.py, rule 5), came back first with an older one. When we have listened for ALONE_S it
     does not count, and finds out from our steps that it has to take our state. While it has not,
     and another trains near our checkpoint, we wait: its state is not what the run goes on from.
  3. Else listen for LISTEN_S: links are being made.
  4. Of those that are back, the one with the furthest checkpoint leads (of equals, the higher peer
     id): it goes on from its own, and the others follow.
  5. After LEADER_S nobody is waited for: a leader that has not begun may be gone, or lie.
  6. A peer without a usable checkpoint never leads.

Peers that do not see each other lead both, and meet later as two parts of a swarm do.
"""

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from .heeded import heeded
from .view import TRAINING, Member

LISTEN_S: Final = 8.0
ALONE_S: Final = 30.0
"""That one trains alone is believed after so long: links to all that it knows are made in less."""
LEADER_S: Final = 120.0
RETURNING: Final = "returning"
THERE: Final = frozenset({TRAINING, "paused", "finished"})


class Course(StrEnum):
    """The next thing that a peer that is back does."""

    FOLLOW = "follow"
    LEAD = "lead"
    WAIT = "wait"


def choose_course(
    own: tuple[int, str] | None,
    others: Iterable[Member],
    waited_s: float,
    now_s: float,
    lost_lag: float = math.inf,
) -> Course:
    """Look at those that are alive, and choose.

    Args:
        own: the step of our checkpoint, and our peer id; None without one.
        others: of our group.
        waited_s: since we are back.
        now_s: by the clock of those members.
        lost_lag: steps behind which a peer takes the state of others; infinite where stages of a
            pipeline go by each other's steps, and so none begins by its own.
    """
    others = list(others)
    there = [m for m in heeded(others, now_s) if m.progress.state in THERE]
    older = [m for m in there if own is not None and m.progress.step < own[0] - lost_lag]
    is_first_back = len(older) == 1 and older[0].progress.state == TRAINING
    if there and not (is_first_back and len(there) <= 2):
        return Course.FOLLOW
    if own is None or waited_s < (ALONE_S if there else LISTEN_S):
        return Course.WAIT
    if waited_s >= LEADER_S:
        return Course.LEAD if there == older else Course.FOLLOW
    others = [member for member in others if member not in older]
    if any(member.progress.state in THERE for member in others):
        return Course.WAIT
    back = [(m.progress.step, m.peer_id) for m in others if m.progress.state == RETURNING]
    return Course.LEAD if own > max(back, default=(-1, "")) else Course.WAIT
