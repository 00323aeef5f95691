"""`loco-peer export --swarm`, as the daemon hears it: slow weights of one other peer, in a file.

One peer for each request, so that the command can say how far it is, and one vector is held at a
time.
"""

from typing import Any

import numpy as np
import trio

from peer.content.fetching import ExpectedState, fetch_from
from peer.content.gathering import whole_state
from peer.facts import HeldPart
from peer.observe.control import Handler
from peer.ports import Network, PeerId, Work
from protocol.errors import LocoError

from .peer import Peer
from .peer_parts import PeerParts

MAX_FETCH_S = 3600.0
"""For one peer's weights; below the least rate it is left sooner (peer/content/fetching.py)."""


class SwarmWeights:
    """What a command may ask of the weights of others."""

    def __init__(self, peer: Peer, parts: PeerParts) -> None:
        self._peer = peer
        self._network: Network = parts.network
        self._work: Work = parts.work
        self._facts = parts.facts

    def handlers(self) -> dict[str, Handler]:
        """The handler of each request, by its name."""
        return {"holders": self.holders, "fetch_weights": self.fetch_weights}

    async def holders(self, _: dict[str, Any]) -> dict[str, Any]:
        """The peers of our group that live, ourselves left out."""
        alive = self._held().view.alive(trio.current_time())
        return {"peers": [member.peer_id for member in alive]}

    async def fetch_weights(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Write the slow weights of a peer to a file, fp32 values alone. Raises LocoError."""
        peer_id: PeerId = wanted["peer"]
        held = self._held()
        expected = ExpectedState(held.group.digest, layout_digest=held.shape.layout_digest)
        slow_P, momentum_P = np.zeros((2, held.shape.padded_parameters), np.float32)
        with trio.move_on_after(MAX_FETCH_S) as scope:
            async with fetch_from(self._network, peer_id) as fetcher:
                state = await whole_state(fetcher, expected, slow_P, momentum_P)
        if scope.cancelled_caught:
            raise LocoError(f"its state did not come within {MAX_FETCH_S:.0f} s")
        path = self._peer.state_dir / "others-weights.f32"
        await self._work.run(slow_P.tofile, path)
        return {"path": str(path), "step": state.step}

    def _held(self) -> HeldPart:
        held = self._facts.held
        if held is None or self._peer.service is None:
            raise LocoError("there is no state yet; try again when this peer is training")
        return held
