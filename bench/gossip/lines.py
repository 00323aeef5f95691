"""Transfers over lines that they share, in virtual time.

A transfer goes over one or more lines at once: that of its pair, an uplink. Each line is divided
evenly among the transfers that use it now, and a transfer is as fast as the worst of its lines lets
it be. What a transfer cannot use of its part is given to nobody else, so shared lines are somewhat
slower here than TCP would have them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .agenda import Action, Agenda

_EPSILON: Final = 1e-9


@dataclass(slots=True, eq=False)
class Transfer:
    """Something on its way.

    Attributes:
        alone_s: by line, how long it takes if nothing else uses that line.
        done: what happens when it has arrived.
        left: the part that has not arrived.
    """

    alone_s: Mapping[str, float]
    done: Action
    left: float = 1.0
    per_s: float = 0.0


class SharedLines:
    """All transfers under way. See the top of the file."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._under_way: dict[Transfer, None] = {}
        self._since_s = 0.0
        self._version = 0

    def begin(self, alone_s: Mapping[str, float], done: Action) -> None:
        """Put something on its way."""
        self._advance()
        self._under_way[Transfer(alone_s, done)] = None
        self._divide()

    def _advance(self) -> None:
        passed_s = self._agenda.now_s - self._since_s
        for transfer in self._under_way:
            transfer.left -= transfer.per_s * passed_s
        self._since_s = self._agenda.now_s

    def _divide(self) -> None:
        """Divide the lines anew, and look again when the next transfer is through."""
        self._version += 1
        users = Counter(line for transfer in self._under_way for line in transfer.alone_s)
        for transfer in self._under_way:
            transfer.per_s = 1 / max(
                alone_s * users[line] for line, alone_s in transfer.alone_s.items()
            )
        if self._under_way:
            version = self._version
            soonest_s = min(transfer.left / transfer.per_s for transfer in self._under_way)
            self._agenda.after(soonest_s, lambda: self._arrived(version))

    def _arrived(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        arrived = [transfer for transfer in self._under_way if transfer.left <= _EPSILON]
        for transfer in arrived:
            del self._under_way[transfer]
        self._divide()
        for transfer in arrived:
            transfer.done()
