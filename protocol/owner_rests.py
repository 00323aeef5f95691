"""Who is not chosen as owner for a while: who was, and brought no result.

Idea. A peer behind a thin line, one that sleeps and one that has just joined own their share of the
chunks like everybody else, and what they do not bring in time nobody steps. Each peer keeps for
itself who has failed it; since a result goes to all, or to nobody, all keep much the same.

Rules
  1. A member that owned chunks of a send and brought no result for them rests: it is not chosen
     before something comes from it, nor for the next REST sends; twice as many for each further
     failure in a row. A result in time ends the row.
  2. If more than half of those asked failed in one send, it is rather we who were late, and nobody
     rests.
  3. A member whose chunks come from another owner rests in its own eyes, too: the others have
     ceased to choose it, and what it sent to itself is in nobody's average.
  4. When all rest, nobody does.
"""

from collections.abc import Collection, Iterable
from typing import Final

REST: Final = 6
"""Sends: one or two rounds of three to six fragments."""
MAX_REST: Final = 96


class OwnerRests:
    """The members of one peer's view, as owners.

    Args:
        own: the peer itself.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._sends = 0
        self._silent: set[str] = set()
        self._until: dict[str, int] = {}
        self._in_a_row: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<OwnerRests {sorted(self._resting)} after {self._sends} sends>"

    @property
    def _resting(self) -> set[str]:
        return {m for m, until in self._until.items() if until > self._sends} | self._silent

    def chosen(self, members: Collection[str]) -> list[str]:
        """One more send: those of the members that may own chunks of it, in order."""
        self._sends += 1
        self._until = {m: until for m, until in self._until.items() if m in members}
        self._in_a_row = {m: count for m, count in self._in_a_row.items() if m in members}
        self._silent &= set(members)
        return sorted(set(members) - self._resting) or sorted(members)

    def returned(self, owners: Iterable[str], failed: Collection[str]) -> None:
        """A send is over: who was asked, and who of them brought no result (rules 1 and 2)."""
        asked = set(owners)
        if 2 * len(failed) > len(asked):
            return
        for member in asked:
            if member in failed:
                self._rest(member)
            else:
                self._in_a_row.pop(member, None)

    def heard(self, member: str) -> None:
        """Something came from it."""
        self._silent.discard(member)

    def _rest(self, member: str) -> None:
        if member not in self._resting:
            row = self._in_a_row[member] = self._in_a_row.get(member, 0) + 1
            self._until[member] = self._sends + min(MAX_REST, REST * 2 ** (row - 1))
        if member != self._own:
            self._silent.add(member)
