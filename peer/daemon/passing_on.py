"""Passing on who belongs to the run: all that is known with a new link, then what is new.

A statement is passed on once by each peer, to all that it is linked with but the one it came from;
so it reaches everybody in as many steps as there are links between two peers. What a link brings
may end other links: of peers that are not admitted any more.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import trio

from protocol.wire.messages import Statements

from .door import Door
from .link import Link

FAREWELL_S: Final = 1.0
"""How long a peer that is not admitted any more has to hear of it."""


class PassingOn:
    """Forwards statements over links: all known ones over a new link, then every new one once.

    Args:
        links: those that live now.
        post: puts a message into the outbox of a link.
    """

    def __init__(
        self,
        door: Door,
        links: Callable[[], Iterable[Link]],
        post: Callable[[Link, Statements], None],
    ) -> None:
        self._door = door
        self._links = links
        self._post = post

    async def begin(self, link: Link, stall_s: float) -> None:
        """Tell a newly linked peer everything; past its outbox, which beats need."""
        for message in self._door.all_told():
            await link.talk.send(message, stall_s=stall_s)

    def heard(self, link: Link, message: Statements) -> None:
        """A linked peer tells what it knows. Raises RemoteProtocolError."""
        new = self._door.heard(message)
        if new:
            self.tell(new, but=link)

    def tell(self, messages: Sequence[Statements], but: Link | None = None) -> None:
        """Tell all what is new, then end the links of those that are not admitted any more."""
        for link in list(self._links()):
            for message in messages:
                if link is not but:
                    self._post(link, message)
        for link in list(self._links()):
            if self._door.judge(link.peer_id) is not None:
                link.scope.deadline = min(link.scope.deadline, trio.current_time() + FAREWELL_S)
