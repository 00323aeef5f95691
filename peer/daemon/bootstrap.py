"""Finding the swarm: from the addresses that a user gave to the first live link.

There is no start-up deadline. Every address is tried again and again, with back-off. A failure, and
what would help, is said when it is new, and again every REPEAT_S. Only a refusal that trying again
cannot change ends it. An address of our own, as in a list that all machines share, is left out.

A multiaddr with `/p2p/` says who is there. For `host:port` the peer id is read from a TLS handshake
with that host: trust on first use; the link itself is then authenticated against that id.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from peer.facts import PeerState
from peer.network.dial_errors import BACKOFF, cure_of, mismatch_sentence
from peer.network.tls_probe import read_peer_id
from peer.observe.event_names import EventName
from peer.options.values import parse_host_port
from peer.runtime import Address, PeerId
from protocol.address.multiaddr import split_peer_id
from protocol.errors import LocoError, Refused, StreamLost
from protocol.limits import ANSWER_S
from protocol.outcomes import RefusalReason
from protocol.wire.messages import Hello

from .links import Links
from .report import LOOK_S, REPEAT_S
from .services import DaemonServices
from .sources import SOURCE_PAUSE_S, is_permanent


async def resolve_bootstrap(text: str) -> tuple[PeerId, Sequence[Address]]:
    """Raises StreamLost: nobody answers there; the message names the step that failed."""
    if text.startswith("/"):
        address, peer_id = split_peer_id(text)
        if peer_id is not None:
            return peer_id, (address,)
    where = parse_host_port(text)
    return await read_peer_id(where.host, where.port), (where.multiaddr(),)


ATTEMPT_S: Final = 20.0

Resolve = Callable[[str], Awaitable[tuple[PeerId, Sequence[Address]]]]
"""From a user's address to a peer id and multiaddrs; its LocoError names the step that failed."""


@dataclass(eq=False)
class Bootstrap:
    """Tries all addresses until one peer has taken us in."""

    services: DaemonServices
    links: Links
    addresses: Sequence[str]
    report_every_s: float = LOOK_S
    resolve: Resolve = resolve_bootstrap

    def __post_init__(self) -> None:
        self._facts = self.services.facts
        self._failing = self._facts.unlinked.failing
        self._num_own = 0
        self._said: dict[str, tuple[str, float]] = {}
        self._found: tuple[PeerId, Hello] | None = None
        self._refused: Refused | None = None

    async def enter(self) -> tuple[PeerId, Hello]:
        """The first peer that takes us in, and its hello.

        Raises:
            Refused: trying again cannot change that.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report)
            for address in self.addresses:
                nursery.start_soon(self._try, address, nursery.cancel_scope)
        if self._found is None:
            assert self._refused is not None
            raise self._refused
        self._failing.clear()
        return self._found

    async def _try(self, address: str, done: trio.CancelScope) -> None:
        pause_s = SOURCE_PAUSE_S
        while True:
            try:
                with trio.fail_after(ATTEMPT_S):
                    peer_id, addresses = await self.resolve(address)
                    if peer_id == self._facts.peer_id:
                        self._leave_out(address, done)
                        return
                    self._pin(address, peer_id, addresses)
                    hello = await self._dial(peer_id, addresses)
            except Refused as refused:
                self._failing[address] = f"refused: {refused.sentence}"
                if is_permanent(refused):
                    self._refused = refused
                    done.cancel()
            except LocoError as error:
                self._failing[address] = str(error)
            except trio.TooSlowError:
                self._failing[address] = f"dial: no answer within {ATTEMPT_S:.0f} s"
            else:
                self._found = (peer_id, hello)
                done.cancel()
            await trio.sleep(pause_s)
            pause_s = min(ANSWER_S, 2 * pause_s)

    async def _dial(self, peer_id: PeerId, addresses: Sequence[Address]) -> Hello:
        """Dial a peer. Where p2pd does not try, since it has failed there before, find out why."""
        try:
            return await self.links.dial(peer_id, addresses)
        except StreamLost as lost:
            address = addresses[0]
            is_dialled_by_tcp = "/tcp/" in address and "/p2p-circuit" not in address
            if BACKOFF not in str(lost) or not is_dialled_by_tcp:
                raise
            found = await self.services.network.probe(address)
            if found == peer_id:
                raise
            where = address.partition("/p2p/")[0]
            raise StreamLost(mismatch_sentence(peer_id, found, where)) from lost

    def _leave_out(self, address: str, done: trio.CancelScope) -> None:
        """Note that we ourselves answer there; if we do everywhere, nobody is left to ask."""
        sentence = (
            f"{address} answers with this home's own identity, {self._facts.peer_id};"
            " one identity can run once. Give the address of another peer, or use another --home."
        )
        self._failing[address] = f"refused: {sentence}"
        self._num_own += 1
        if self._num_own == len(self.addresses):
            self._refused = Refused(RefusalReason.DUPLICATE_IDENTITY, sentence)
            done.cancel()

    def _pin(self, address: str, peer_id: PeerId, addresses: Sequence[Address]) -> None:
        """Trust on first use: the peer at HOST:PORT is kept, and has to answer there again.

        Raises:
            StreamLost: another answers.
        """
        if "/p2p/" in address:
            return
        pinned = self.services.pins.get(address)
        if pinned is None:
            self.services.pins.put(address, peer_id)
            multiaddr = f"{addresses[0]}/p2p/{peer_id}"
            self.services.events.emit(
                EventName.IDENTITY_PINNED, address=address, multiaddr=multiaddr
            )
        elif pinned != peer_id:
            sentence = f"{peer_id} answers, where {pinned} did before; {self.services.pins.cure}"
            raise StreamLost(f"handshake: {sentence}")

    async def _report(self) -> None:
        while True:
            for address, why in self._failing.items():
                self._say(address, why)
            await trio.sleep(self.report_every_s)

    def _say(self, address: str, why: str) -> None:
        """Say it in the status; as an event where it is new, or was said long ago."""
        now_s, cure = trio.current_time(), cure_of(why)
        if self._facts.state is PeerState.CONNECTING:
            doing = f"cannot reach {address}: {why}"
            self._facts.now_doing(f"{doing} ({cure})" if cure else doing)
        said, said_s = self._said.get(address, ("", now_s))
        if why == said and now_s - said_s < REPEAT_S:
            return
        self._said[address] = why, now_s
        step, _, detail = why.partition(": ")
        self.services.events.emit(
            EventName.BOOTSTRAP_FAILING,
            address=address,
            step=step,
            detail=detail,
            cure=cure,
        )
