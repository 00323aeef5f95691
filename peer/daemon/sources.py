"""Fetching what some peer has: one peer after another is asked, until one can answer."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import trio

from peer.observe.facts import Facts
from peer.observe.status import PeerState
from peer.ports import Network, PeerId, Work
from peer.state.service import Fetcher, fetch_from
from protocol.errors import InvalidRunSpec, LocoError
from protocol.membership.view import Roster, View

from .joining import is_final

T = TypeVar("T")

FETCH_WEIGHTS_S: Final = 300.0
SOURCE_PAUSE_S: Final = 0.5
"""Between two tries to fetch from a peer."""


class Sources:
    """The peers that may have what we need; see the top of the file."""

    def __init__(self, network: Network, facts: Facts) -> None:
        self._network = network
        self._facts = facts

    def __repr__(self) -> str:
        return f"<Sources of {self._facts.peer_id}>"

    async def fetch(
        self,
        ask: Callable[[Fetcher], Awaitable[T]],
        among: Roster | View,
        preferred: PeerId | None = None,
    ) -> T:
        """Ask one peer after another until one can answer.

        Args:
            among: what any peer of the run has is asked of the roster, what those of our group have
                of our view.
            preferred: is asked first.

        Raises:
            Refused: everybody refuses for good.
            InvalidRunSpec: what was received cannot be used here.
        """
        while True:
            sources, final = _ready_first(among, preferred), list[LocoError]()
            if not sources:
                self._facts.now_doing("waiting for a peer that could help")
            for peer_id in sources:
                try:
                    async with fetch_from(self._network, peer_id) as fetcher:
                        return await ask(fetcher)
                except InvalidRunSpec:
                    raise
                except LocoError as error:
                    self._facts.now_doing(f"{peer_id[-8:]} could not help: {error}")
                    if is_final(error):
                        final.append(error)
            if sources and len(final) == len(sources):
                raise final[0]
            await trio.sleep(SOURCE_PAUSE_S)


def _ready_first(among: Roster | View, preferred: PeerId | None) -> list[PeerId]:
    """Everybody alive who may have what we need: `preferred` first, then the newest."""
    alive = among.alive(trio.current_time())
    ready = [m for m in alive if m.progress.state in (PeerState.TRAINING, PeerState.FINISHED)]
    ready.sort(key=lambda m: (m.peer_id != preferred, -m.progress.round, m.peer_id))
    return [m.peer_id for m in ready] or [m.peer_id for m in alive]


async def fetch_weights(
    sources: Sources, view: View, padded_parameters: int, path: Path, work: Work
) -> Path:
    """Write the slow weights of another group to a file, as fp32 values alone.

    Raises:
        LocoError: nobody gave them in time.
    """
    slow_P, momentum_P = np.zeros((2, padded_parameters), np.float32)
    with trio.move_on_after(FETCH_WEIGHTS_S):
        await sources.fetch(lambda fetcher: fetcher.state(view.group, slow_P, momentum_P), view)
        await work.run(slow_P.tofile, path)
        return path
    raise LocoError(f"nobody gave the weights of another stage within {FETCH_WEIGHTS_S:.0f} s")
