"""A look at the network from here, as a stranger: who answers, what they see, how fast they send.

For `loco-peer doctor` where no daemon runs. It has an identity of its own for a minute, listens
where the peer would, says hello, asks for a dial-back, takes a piece of the corpus, and goes. Its
hello says that it is still starting, so nobody keeps it as a member.

Where a run does not take everybody, the home's own identity asks (`Visitor`): a stranger would be
turned away, or would use up a place of an invitation that the peer needs afterwards.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import trio

from peer.content.fetching import ContentClient, fetch_from
from peer.network.conversation import Conversation
from peer.network.identity import load_or_create
from peer.network.libp2p import open_libp2p_network
from peer.network.relay import reserve
from peer.runtime import Address, Network, PeerId
from peer.state.home import Home
from peer.state.kept_files import AdmissionFile
from protocol.address.multiaddr import split_peer_id
from protocol.admission.statements import Token
from protocol.content.manifest import CorpusManifest, parse_manifest
from protocol.errors import LocoError, Refused, RemoteProtocolError, StreamLost
from protocol.limits import ANSWER_S
from protocol.membership.dial_back import DialBacks, NatKind, Reach, host_and_port
from protocol.wire.messages import Hello, Leaving, PeerList, Whereabouts
from protocol.wire.versions import HELLO, SPOKEN

from .bootstrap import ATTEMPT_S, resolve_bootstrap
from .link import FROM_LINK
from .outside import ask_seen, say_where, to_try

FETCH_S: Final = 30.0
"""For a piece that measures a line; as long again for what is asked before it."""
MIN_MEASURED_BYTES: Final = 256 * 1024
"""A smaller piece takes as long as a round trip, and tells nothing of the line."""
OTHERS: Final = 2
"""Peers beside the bootstrap ones that are met too."""


@dataclass(frozen=True, slots=True)
class LineRate:
    """How fast a peer sends; `at_most`, if the piece did not come whole."""

    bytes_per_s: float
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class Met:
    """One peer that was tried.

    Attributes:
        failure: why it could not be met.
        refused: it answers, and does not let us in.
        ahead_s: how far its clock is ahead of ours, half a round trip off at most.
        relays: whether it would relay for us.
        rate: at which it has sent us a piece of the corpus; None where it has none that tells.
    """

    address: str
    failure: str | None = None
    peer_id: PeerId | None = None
    software: str = ""
    ahead_s: float = 0.0
    round_trip_s: float = 0.0
    relays: bool | None = None
    rate: LineRate | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Visitor:
    """The peer that asks; `pass_shown` is of its invitation."""

    identity_path: Path
    incarnation: int = 1
    pass_shown: bytes = b""


def visitor_of(home: Home, invite: Token | None) -> Visitor:
    """The peer of a home that is locked; counts as a start of it.

    Args:
        invite: in place of what the home has kept.

    Raises:
        LocoError: its identity or its counter of starts cannot be used.
    """
    own = load_or_create(home.identity_path)
    shown = AdmissionFile(home.admission_path).read().own_pass
    if invite is not None:
        shown = invite.pass_for(own.peer_id).sealed
    return Visitor(home.identity_path, home.next_incarnation(), shown)


@dataclass(frozen=True, slots=True)
class Examination:
    port: int
    met: tuple[Met, ...]
    reach: Reach
    nat: NatKind
    working: tuple[Address, ...]
    observed: tuple[str, ...]


async def examine(
    bootstrap: Sequence[str],
    listen: Address,
    folder: Path,
    wall_time_s: float,
    visitor: Visitor | None = None,
) -> Examination:
    """Meet the bootstrap peers, and some whom they name.

    Args:
        folder: for sockets, and for an identity that is not kept.
        wall_time_s: Unix time of this machine, now.
        visitor: None is a stranger.

    Raises:
        LocoError: p2pd does not start, or the port is taken.
    """
    clock_s = wall_time_s - trio.current_time()
    visitor = visitor or Visitor(folder / "doctor.key")
    load_or_create(visitor.identity_path)
    async with open_libp2p_network(
        visitor.identity_path, listen=[listen], runtime_dir=folder
    ) as network:
        return await Doctor(network, clock_s, visitor).examine(bootstrap)


class Doctor:
    """Looks at the swarm through a network of its own.

    Args:
        clock_s: Unix time of this machine where trio's clock stands at zero.
    """

    def __init__(self, network: Network, clock_s: float, visitor: Visitor) -> None:
        self._network = network
        self._clock_s = clock_s
        self._visitor = visitor
        self._answers = DialBacks()
        self._named: dict[PeerId, tuple[Address, ...]] = {}

    async def examine(self, bootstrap: Sequence[str]) -> Examination:
        met = [await self._meet(text) for text in bootstrap]
        known = {each.peer_id for each in met} | {self._network.peer_id}
        others = [peer for peer in self._named if peer not in known][:OTHERS]
        met += [await self._meet(peer[-8:], (peer, self._named[peer])) for peer in others]
        now_s = trio.current_time()
        own = [each for each in map(host_and_port, self._own()) if each is not None]
        return Examination(
            port=own[0][1],
            met=tuple(met),
            reach=self._answers.reach(now_s),
            nat=self._answers.nat_kind(now_s, [host for host, _ in own]),
            working=tuple(self._answers.working(now_s)),
            observed=tuple(self._answers.observed_hosts(now_s)),
        )

    async def _meet(self, text: str, found: tuple[PeerId, Sequence[Address]] | None = None) -> Met:
        try:
            with trio.fail_after(ATTEMPT_S):
                peer_id, addresses = found or await resolve_bootstrap(text)
                met = await self._greet(peer_id, addresses, text)
        except Refused as refused:
            return Met(text, failure=refused.sentence, refused=True)
        except (LocoError, trio.TooSlowError) as error:
            return Met(text, failure=str(error) or f"no answer in {ATTEMPT_S:.0f} s")
        await ask_seen(
            self._answers,
            peer_id,
            lambda: to_try(self._answers, self._own(), self._own()),
            lambda peer, tried: say_where(self._network, peer, Whereabouts(1, (), tuple(tried))),
        )
        return replace(
            met,
            relays=await self._would_relay(peer_id),
            rate=await rate_of(self._network, peer_id),
        )

    async def _greet(self, peer_id: PeerId, addresses: Sequence[Address], text: str) -> Met:
        """Say hello, read the list of others, and take leave, so that nobody waits for us."""
        await self._network.connect(peer_id, addresses)
        async with Conversation(await self._network.open_stream(peer_id, HELLO)) as talk:
            asked_s = trio.current_time()
            await talk.send(
                Hello(
                    software="loco-peer doctor",
                    protocols=SPOKEN,
                    run_id=None,
                    incarnation=self._visitor.incarnation,
                    addresses=(),
                    swarm_time_s=self._clock_s + asked_s,
                    state="starting",
                    round=0,
                    layout_digest=None,
                    pass_shown=self._visitor.pass_shown,
                )
            )
            theirs, _ = await talk.receive(Hello, timeout_s=ATTEMPT_S)
            round_trip_s = trio.current_time() - asked_s
            with trio.move_on_after(2.0):
                while not isinstance(said := (await talk.receive(*FROM_LINK))[0], PeerList):
                    pass
                self._named |= {entry.peer_id: entry.addresses for entry in said.peers}
            await talk.send(Leaving())
        now_s = self._clock_s + trio.current_time() - round_trip_s / 2
        return Met(
            text,
            peer_id=peer_id,
            software=theirs.software,
            ahead_s=theirs.swarm_time_s - now_s,
            round_trip_s=round_trip_s,
        )

    def _own(self) -> list[Address]:
        return [split_peer_id(address)[0] for address in self._network.addresses]

    async def _would_relay(self, peer_id: PeerId) -> bool:
        with suppress(LocoError):
            await reserve(self._network, peer_id)
            return True
        return False


async def rate_of(network: Network, peer_id: PeerId) -> LineRate | None:
    """How fast a peer sends a piece of the corpus; None where it has none that tells."""
    try:
        with trio.fail_after(2 * FETCH_S):
            async with fetch_from(network, peer_id) as client:
                for model in (await client.spec(None)).spec().models:  # it has texts of one alone
                    with suppress(Refused):
                        manifest = await _corpus(client, model.data.manifest)
                        _, here = await client.holdings(manifest, 0)
                        if here is not None and here.any():
                            return await _timed_rate(client, manifest, int(np.argmax(here)))
    except (LocoError, trio.TooSlowError):
        pass
    return None


async def _timed_rate(
    client: ContentClient, manifest: CorpusManifest, piece: int
) -> LineRate | None:
    size = manifest.piece_bytes(piece)
    if size < MIN_MEASURED_BYTES:
        return None
    began_s, whole = trio.current_time(), False
    with suppress(StreamLost), trio.move_on_after(FETCH_S):
        await client.piece(manifest, piece)
        whole = True
    took_s = max(1e-6, trio.current_time() - began_s)
    # A stream that ends sooner says nothing of its line: perhaps the peer went.
    return LineRate(size / took_s, at_most=not whole) if whole or took_s >= ANSWER_S else None


async def _corpus(client: ContentClient, digest: str | None) -> CorpusManifest:
    """A corpus that the run spec names. Raises LocoError."""
    if digest is None:
        raise RemoteProtocolError("its run spec does not name a corpus by digest")
    try:
        return parse_manifest(await client.blob(digest))
    except ValueError as error:
        raise RemoteProtocolError(f"what it sends is no corpus: {error}") from error
