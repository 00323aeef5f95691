"""The other peers of our group: found by their records in the directory, met for gossip.

Peers of a group that were never told of each other meet through the directory; who is alive is
judged on links alone. So a record may be half a minute old, and a directory that is down for a
while costs nothing but new acquaintances.
"""

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from peer.runtime import PeerId
from protocol.gossip.matchmaking import RoundSnapshot
from protocol.membership.records import (
    PeerRecord,
    encode_record,
    place_of,
    record_key,
    record_keys,
    valid_record_at,
)
from protocol.membership.view import Member, View

from .parts import PeerParts
from .services import DaemonServices

PUBLISH_EVERY_S: Final = 30.0
"""A record lives four times as long: three that are lost in a row cost nothing."""
FIRST_REFRESHES_S: Final = 2.0
NUM_FIRST_REFRESHES: Final = 3


class Membership:
    """Keeps our record fresh and the roster informed; `run` until cancelled.

    Args:
        name: of our group in the directory (Admission.directory_name).
    """

    def __init__(self, services: DaemonServices, name: str) -> None:
        self._services = services
        self._name = name

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._repeat, self._publish, PUBLISH_EVERY_S)
            nursery.start_soon(self.look_around)

    async def look_around(self) -> None:
        await self._repeat(self._refresh, PUBLISH_EVERY_S / 2)

    async def _repeat(self, job: Callable[[], Awaitable[None]], every_s: float) -> None:
        for turn in itertools.count(1):
            await job()
            await trio.sleep(FIRST_REFRESHES_S if turn <= NUM_FIRST_REFRESHES else every_s)

    async def _publish(self) -> None:
        services = self._services
        directory, network = services.directory, services.network
        expires_s = directory.swarm_time_s() + 4 * PUBLISH_EVERY_S
        addresses = tuple(network.addresses)
        own = PeerRecord(network.peer_id, services.facts.incarnation, addresses, expires_s)
        key = record_key(self._name, own.peer_id)
        await directory.store(key, encode_record(own, key, services.sign))

    async def _refresh(self) -> None:
        directory, own_id = self._services.directory, self._services.network.peer_id
        for key in record_keys(self._name):
            for peer_id, value in (await directory.get(key)).items():
                record = valid_record_at(place_of(key), peer_id, value)
                if record is None or peer_id == own_id:
                    continue
                if record.expires_s > directory.swarm_time_s():
                    self._services.roster.record(record)


class LinkedCandidates:
    """The other peers of the group, for gossip, from the view and the links.

    Args:
        fragment: the one that partners are looked for; 0 where the whole model is one vector.
    """

    def __init__(self, parts: PeerParts, view: View, fragment: int) -> None:
        self._view = view
        self._facts = parts.facts
        self._heard, self._tell = parts.heard, parts.links.tell
        self._fragment = fragment
        self.blame = parts.reputation.blame

    def free(self) -> Sequence[tuple[PeerId, RoundSnapshot]]:
        return [
            (member.peer_id, RoundSnapshot(*found, member.progress.ended))
            for member in self._training()
            if (found := member.progress.free.get(self._fragment)) is not None
        ]

    def present(self, *, ended: bool) -> Sequence[PeerId]:
        return [m.peer_id for m in self._training() if m.progress.ended == ended]

    def announce(self, snapshot: RoundSnapshot | None) -> None:
        free = self._facts.free
        if free.get(self._fragment) == snapshot:
            return
        if snapshot is None:
            del free[self._fragment]
        else:
            free[self._fragment] = snapshot
        self._tell.unpark_all()

    async def changed(self) -> None:
        await self._heard.park()

    def _training(self) -> Sequence[Member]:
        return self._view.members_training(trio.current_time())
