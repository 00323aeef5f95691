"""Fetching what some peer has: one peer after another is asked, until one can answer.

What a peer says of itself does not bring it forward: those in the middle of the steps that are
heard are asked first, in an order that follows from their ids and ours. A peer that could not help
is not asked again at once: soon where that may pass, later where it broke the protocol or cannot
help for long (`pause_after`).
"""

import math
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final, TypeVar

import blake3
import numpy as np
import trio

from peer.content.fetching import ContentClient, ExpectedState, fetch_from, whole_state
from peer.facts import Facts, PeerState
from peer.runtime import Network, PeerId
from peer.state.home import HomeError
from protocol.content.samples import Float32Vector
from protocol.errors import InvalidRunSpec, LocoError, Refused, RemoteProtocolError
from protocol.membership.book import BackOff
from protocol.membership.view import Member, Roster, View
from protocol.outcomes import RefusalReason
from protocol.wire.content_messages import StateScalars

T = TypeVar("T")

FETCH_WEIGHTS_S: Final = 300.0
SOURCE_PAUSE_S: Final = 0.5
"""After the first failure of a source; then longer, up to MAX_SOURCE_PAUSE_S."""
MAX_SOURCE_PAUSE_S: Final = 2.0
TRIES_FOR_ONE: Final = 4
"""Peers that are asked to help, for each that may help at once."""
DOUBT_PAUSE_S: Final = 30.0
"""After a source broke the protocol, refused for good, or holds what is too large to be fetched."""

PERMANENT_REFUSALS: Final = frozenset(
    {
        RefusalReason.OTHER_RUN,
        RefusalReason.VERSION,
        RefusalReason.DUPLICATE_IDENTITY,
        RefusalReason.NOT_ADMITTED,
    }
)
"""Refusals that trying again cannot change."""


def is_permanent(error: LocoError) -> bool:
    return isinstance(error, Refused) and error.reason in PERMANENT_REFUSALS


class NoSource:
    """Nobody to fetch from. Implements `BlobSource`."""

    async def blob(self, digest: str) -> bytes:
        await trio.lowlevel.checkpoint()
        raise Refused(RefusalReason.UNAVAILABLE, f"blob {digest} is not in this home")


class NobodyHelped(LocoError):
    """No peer gave what was asked for in time."""


def pause_after(error: LocoError) -> float:
    """The least time until a source that failed with this error is asked again."""
    too_large = isinstance(error, Refused) and error.reason is RefusalReason.TOO_LARGE
    in_vain = too_large or isinstance(error, RemoteProtocolError) or is_permanent(error)
    return DOUBT_PAUSE_S if in_vain else 0.0


class Sources:
    def __init__(self, network: Network, facts: Facts) -> None:
        self._network = network
        self._facts = facts

    async def fetch(
        self,
        ask: Callable[[ContentClient], Awaitable[T]],
        among: Roster | View,
        preferred: PeerId | None = None,
        patience_s: float = math.inf,
    ) -> T:
        """Ask one peer after another until one can answer.

        Args:
            among: the roster for what any peer of the run has, a view for what its group has.
            preferred: is asked first.
            patience_s: nobody is asked after that; who is giving may go on.

        Raises:
            Refused: everybody refuses for good.
            NobodyHelped
            InvalidRunSpec: what was received cannot be used here.
            HomeError: it cannot be kept here.
        """
        waits, refused = BackOff(SOURCE_PAUSE_S, MAX_SOURCE_PAUSE_S), dict[PeerId, LocoError]()
        until_s = trio.current_time() + patience_s
        while True:
            sources = in_order(among, self._facts.peer_id, preferred)
            if not sources:
                self._facts.now_doing("waiting for a peer that could help")
            for peer_id in sources:
                if not waits.is_due(peer_id, trio.current_time()):
                    continue
                refused.pop(peer_id, None)
                try:
                    async with fetch_from(self._network, peer_id) as client:
                        return await ask(client)
                except (InvalidRunSpec, HomeError):
                    raise  # nobody else could help with that
                except LocoError as error:
                    self._facts.now_doing(f"{peer_id[-8:]} could not help: {error}")
                    waits.failed(peer_id, trio.current_time(), pause_after(error))
                    if is_permanent(error):
                        refused[peer_id] = error
            if sources and all(peer_id in refused for peer_id in sources):
                raise refused[sources[0]]
            if trio.current_time() >= until_s:
                raise NobodyHelped(f"no peer could help within {patience_s:.0f} s")
            await trio.sleep(SOURCE_PAUSE_S)

    async def help_with(
        self,
        ask: Callable[[ContentClient], Awaitable[bool]],
        among: View,
        apart_from: Collection[PeerId],
        most: int,
    ) -> None:
        """Ask others, some at once, each but once: the leader does what they cannot.

        `ask` says whether the peer has helped; where it has not, the next one is asked. Of a large
        swarm few are asked, because each works for us, whether it helps in the end or not.
        """
        others = in_order(among, self._facts.peer_id, None)
        others = [peer_id for peer_id in others if peer_id not in apart_from]
        waiting = iter(others[: TRIES_FOR_ONE * most])

        async def help_() -> None:
            for peer_id in waiting:
                try:
                    async with fetch_from(self._network, peer_id) as client:
                        if await ask(client):
                            return
                except LocoError:
                    continue  # the next one, or the one that leads, gives what is missing

        async with trio.open_nursery() as nursery:
            for _ in range(most):
                nursery.start_soon(help_)


def ready_or_resting(members: Iterable[Member]) -> list[Member]:
    """Members that train, or have; where there are none, the paused ones."""
    told = list(members)
    ready = [m for m in told if m.progress.state in (PeerState.TRAINING, PeerState.FINISHED)]
    return ready or [m for m in told if m.progress.state == PeerState.PAUSED]


def in_order(among: Roster | View, own_id: PeerId, preferred: PeerId | None) -> list[PeerId]:
    """Everybody alive who may have what we need, in the order in which to ask.

    `preferred` comes first, then those in the middle of the steps that all claim, then the others;
    peers that depend on relays come after all others; equals in an order that nobody but their ids
    and ours decides.
    """
    alive = among.alive(trio.current_time())
    asked = ready_or_resting(alive) or list(alive)
    steps = sorted(member.progress.step for member in asked)
    edge = (len(steps) - 1) // 4
    low, high = (steps[edge], steps[-1 - edge]) if steps else (0, 0)

    def rank(member: Member) -> tuple[bool, bool, bool, bytes]:
        lot = blake3.blake3(f"{own_id}/{member.peer_id}".encode()).digest(length=8)
        in_the_middle = low <= member.progress.step <= high
        return member.peer_id != preferred, member.relayed, not in_the_middle, lot

    return [member.peer_id for member in sorted(asked, key=rank)]


Weights = tuple[PeerId, Float32Vector, StateScalars]
"""Slow weights, who gave them, and what that peer says of them."""


async def weights_from(client: ContentClient, group: str, padded_parameters: int) -> Weights:
    slow_P, momentum_P = np.zeros((2, padded_parameters), np.float32)
    state = await whole_state(client, ExpectedState(group), slow_P, momentum_P)
    return client.remote_peer_id, slow_P, state


async def weights_of(sources: Sources, view: View, padded_parameters: int) -> Weights | None:
    """Fetch the weights of another group; None where nobody holds them, or gives them in time.

    Raises:
        Refused, InvalidRunSpec: as `Sources.fetch`.
    """
    if not view.alive(trio.current_time()):
        return None
    with trio.move_on_after(FETCH_WEIGHTS_S):
        return await sources.fetch(lambda f: weights_from(f, view.group, padded_parameters), view)
    return None
