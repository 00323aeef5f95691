"""Coming back to a run with a checkpoint: a peer follows others, leads, or waits.

When all machines of a run were down, each comes back with a checkpoint of its own, and the run
should go on from the newest. Nobody knows who else will come. So those that are back say how far
their checkpoint is, and wait a little for each other.

Rules
  1. Somebody of our group trains, is paused, or has finished: take their state, even where it is
     behind our checkpoint, which stays on our disk: one peer's word of a newer one moves no swarm.
     Where some of them are established (view.py), only those count.
  2. But one that trains alone, so far behind our checkpoint that it would be lost beside us
     (rounds.py, rule 5), came back first with an older one. When we have listened for ALONE_S it
     does not count, and finds out from our steps that it has to take our state. While it has not,
     and another trains near our checkpoint, we wait: its state is not what the run goes on from.
  3. Else listen for LISTEN_S: links are being made. Where we remember others, and none of them can
     be reached, it may be our line that is down, and they train: then listen for UNREACHED_S.
  4. Of those that are back, the one with the furthest checkpoint leads (of equals, the higher peer
     id): it goes on from its own, and the others follow.
  5. After LEADER_S nobody is waited for: a leader that has not begun may be gone, or lie.
  6. A peer without a usable checkpoint never leads; but the founder does, where nobody is back with
     one: it has the seed, from which the run begins anew.

Peers that do not see each other lead both, and meet later as two parts of a swarm do.
"""

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from .view import TRAINING, Member, established

LISTEN_S: Final = 8.0
ALONE_S: Final = 30.0
"""After this long we believe that it trains alone: links to all known are made in less."""
LEADER_S: Final = 120.0
UNREACHED_S: Final = 300.0
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
    *,
    unreached: bool = False,
) -> Course:
    """Look at those that are alive, and choose.

    Args:
        own: the step of our checkpoint, and our peer id; step 0 for a founder without one, None for
            all others without one.
        others: of our group.
        waited_s: since we are back.
        now_s: by the clock of those members.
        lost_lag: steps behind which a peer takes the state of others; infinite where stages of a
            pipeline follow each other's steps, and so none begins by its own.
        unreached: others are remembered, and none has answered.
    """
    others = list(others)
    there = [m for m in established(others, now_s) if m.progress.state in THERE]
    older = [m for m in there if own is not None and m.progress.step < own[0] - lost_lag]
    is_first_back = len(older) == 1 and older[0].progress.state == TRAINING
    if there and not (is_first_back and len(there) <= 2):
        return Course.FOLLOW
    listen_s = UNREACHED_S if unreached else ALONE_S if there else LISTEN_S
    if own is None or waited_s < listen_s:
        return Course.WAIT
    if waited_s >= LEADER_S:
        return Course.LEAD if there == older else Course.FOLLOW
    others = [member for member in others if member not in older]
    if any(member.progress.state in THERE for member in others):
        return Course.WAIT
    steps = [(m.progress.step, m.peer_id) for m in others if m.progress.state == RETURNING]
    back = [(step, peer_id) for step, peer_id in steps if step > 0]
    return Course.LEAD if own > max(back, default=(-1, "")) else Course.WAIT
