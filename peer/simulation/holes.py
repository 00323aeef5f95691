"""A roster that does not show everybody.

In a small swarm links are symmetric, and peers tell each other of everybody they know; views are
equal after seconds. In a large one they are not: each peer holds links to a part of the others. To
show what that does to matchmaking in a swarm of a few dozen, a `HoledRoster` leaves out a fixed
random part of the others, drawn anew for each reader, where it is asked who trains.
"""

from typing import Final

import blake3

from protocol.membership.view import Member, Roster

_STEPS: Final = 2**64


class HoledRoster(Roster):
    """See the top of the file.

    Args:
        reader: whose roster it is.
        hidden_fraction: part of the others that it does not see among those in training.
    """

    def __init__(self, silence_s: float, seed: int, reader: str, hidden_fraction: float) -> None:
        super().__init__(silence_s)
        self._seed = seed
        self._reader = reader
        self._hidden_fraction = hidden_fraction

    def members_training(self, now_s: float) -> tuple[Member, ...]:
        """Those alive that train and are seen, by peer id."""
        training = super().members_training(now_s)
        return tuple(member for member in training if not self.hides(member.peer_id))

    def hides(self, peer_id: str) -> bool:
        """Whether this reader never sees that peer train."""
        text = f"{self._seed}/hole/{self._reader}/{peer_id}"
        drawn = int.from_bytes(blake3.blake3(text.encode()).digest(length=8), "big")
        return drawn < self._hidden_fraction * _STEPS
