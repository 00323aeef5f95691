"""Places of those that read from us, and the door to them.

Each peer and each network has its share of the places (protocol/membership/budget.py).
"""

from collections.abc import Awaitable, Callable

from peer.ports import Stream
from protocol.membership.budget import Budget, Shares
from protocol.outcomes import RefusalReason

from .conversation import Conversation


class Readers:
    """See the top of the file."""

    def __init__(self, shares: Shares) -> None:
        self._places = Budget(shares)

    @property
    def taken(self) -> int:
        """Places that are held."""
        return self._places.taken

    async def serve(
        self, stream: Stream, answer: Callable[[Conversation], Awaitable[None]]
    ) -> None:
        """Have a stream answered in a place of its own, or refuse it."""
        talk, peer_id, address = Conversation(stream), stream.remote_peer_id, stream.remote_address
        if not self._places.has_room(peer_id, address):
            sentence = f"I serve {self.taken} readers already; ask another, or later"
            await talk.refuse(RefusalReason.TOO_MANY, sentence)
            return
        self._places.take(peer_id, address)
        try:
            await answer(talk)
        finally:
            self._places.give_back(peer_id, address)
