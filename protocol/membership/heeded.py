"""Whose word on where the swarm is counts: that of peers which have beaten for some time.

Idea. Anybody can say hello, in as many names as he likes, and claim any step in it. What many say
together moves a peer: how much it owes to a round, where it jumps, whether it lets its weights go.
So a peer must first have been there for a while, as a member that does its work is anyway.

Rules
  1. A peer is heeded when it has beaten BEATS times at least, over HEEDED_AFTER_S at least. A hello
     is no beat.
  2. Where none of those asked about is heeded, all are: at the start of a run, and for a newcomer,
     nobody has been heard for long.
  3. This is about numbers of which the middle is taken. A newcomer is a partner, an owner, a source
     and a holder of data at once.

What it does not do: a liar that beats for HEEDED_AFTER_S is heeded. Then its identity is there to
be seen, one place in the middle is all it has, and it holds a link for it.
"""

from collections.abc import Iterable
from typing import Final

from .view import Member

BEATS: Final = 4
HEEDED_AFTER_S: Final = 5.0
"""Less than a peer that is back listens before it leads (returning.py)."""


def is_heeded(member: Member, now_s: float) -> bool:
    """Whether this peer has beaten for long enough (rule 1)."""
    return member.beats >= BEATS and now_s - member.first_beat_s >= HEEDED_AFTER_S


def heeded(members: Iterable[Member], now_s: float) -> tuple[Member, ...]:
    """Those whose numbers count; all, where none has beaten for long enough (rule 2)."""
    everybody = tuple(members)
    return tuple(member for member in everybody if is_heeded(member, now_s)) or everybody
