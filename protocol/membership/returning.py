"""Coming back to a run with a checkpoint: a peer follows others, leads, or waits.

When all machines of a run were down, each comes back with a checkpoint of its own, and the newest
should be what the run goes on from. Nobody knows who else will come. So those that are back say how
far their checkpoint is, and wait a little for each other.

Rules
  1. Somebody of our group trains, or has finished: take their state, be it behind our checkpoint,
     which stays on our disk: what one peer says of a newer one moves no swarm. Where others have
     been heard for longer than it (heeded.py), we do so when it has been heard for as long.
  2. Else listen for LISTEN_S: links are being made.
  3. Of those that are back, the one with the furthest checkpoint leads (of equals, the higher peer
     id): it goes on from its own, and the others follow.
  4. After LEADER_S nobody is waited for: a leader that has not begun may be gone, or lie.
  5. A peer without a usable checkpoint never leads.

Peers that do not see each other lead both, and meet later as two parts of a swarm do.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from .heeded import heeded
from .view import Member

LISTEN_S: Final = 8.0
LEADER_S: Final = 120.0
RETURNING: Final = "returning"
THERE: Final = frozenset({"training", "finished"})


class Course(StrEnum):
    """The next thing that a peer that is back does."""

    FOLLOW = "follow"
    LEAD = "lead"
    WAIT = "wait"


def choose_course(
    own: tuple[int, str] | None, others: Iterable[Member], waited_s: float, now_s: float
) -> Course:
    """Look at those that are alive, and choose.

    Args:
        own: the step of our checkpoint, and our peer id; None without one.
        others: of our group.
        waited_s: since we are back.
        now_s: by the clock of those members.
    """
    others = list(others)
    if any(member.progress.state in THERE for member in heeded(others, now_s)):
        return Course.FOLLOW
    if own is None or waited_s < LISTEN_S:
        return Course.WAIT
    if waited_s >= LEADER_S:
        return Course.LEAD
    if any(member.progress.state in THERE for member in others):
        return Course.WAIT
    back = [(m.progress.step, m.peer_id) for m in others if m.progress.state == RETURNING]
    return Course.LEAD if own > max(back, default=(-1, "")) else Course.WAIT
