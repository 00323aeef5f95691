"""`loco-peer pause` and `resume`, as the daemon hears them (peer/rounds/pause.py does it)."""

from typing import Any

from peer.observe.control import Handler
from peer.rounds.pause import Pause, PauseRefused

from .peer import Peer


class PauseRequests:
    """What a command may ask of a peer's training."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def handlers(self) -> dict[str, Handler]:
        """The handler of each request, by its name."""
        return {"pause": self.pause, "resume": self.resume}

    async def pause(self, _: dict[str, Any]) -> dict[str, Any]:
        """Rest after the round under way. Raises PauseRefused."""
        self._training().begin()
        return {}

    async def resume(self, _: dict[str, Any]) -> dict[str, Any]:
        """Go on. Raises PauseRefused."""
        self._training().end()
        return {}

    def _training(self) -> Pause:
        if self._peer.rounds is None:
            raise PauseRefused("this peer does not train yet; try again when it does")
        return self._peer.rounds.pause
