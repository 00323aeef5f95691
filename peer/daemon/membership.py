"""Our record in the directory, and what others' records tell.

The directory is how peers of a group find each other that were never told of each other; who is
alive is judged on links alone. So a record may be half a minute old, and a directory that is down
for a while costs nothing but new acquaintances.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from peer.ports import Directory, DirectoryUnrecoverable, Network
from peer.process.rejoin import JoinAgain, addresses_of
from protocol.errors import RemoteProtocolError
from protocol.membership.records import (
    PeerRecord,
    Sign,
    decode_record,
    encode_record,
    record_key,
    record_keys,
)
from protocol.membership.view import Roster

PUBLISH_EVERY_S: Final = 30.0
RECORD_LIFETIME_S: Final = 120.0
REFRESH_EVERY_S: Final = 15.0
FIRST_REFRESHES_S: Final = 2.0
"""A newcomer looks around sooner."""
NUM_FIRST_REFRESHES: Final = 3


class Membership:
    """Keeps our record fresh and the roster informed; `run` until cancelled.

    Args:
        name: of our group in the directory (Door.directory_name).
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        *,
        network: Network,
        directory: Directory,
        roster: Roster,
        sign: Sign,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._network = network
        self._directory = directory
        self._roster = roster
        self._sign = sign

    async def run(self) -> None:
        """Publish and look around, each at its own pace."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._repeat, self._publish, PUBLISH_EVERY_S)
            nursery.start_soon(self.look_around)

    async def look_around(self) -> None:
        """Find the others of our group, until cancelled."""
        await self._repeat(self._refresh, REFRESH_EVERY_S)

    async def _repeat(self, job: Callable[[], Awaitable[None]], every_s: float) -> None:
        turn = 0
        while True:
            try:
                await job()
            except DirectoryUnrecoverable as error:
                self._give_up(error)
            turn += 1
            await trio.sleep(FIRST_REFRESHES_S if turn <= NUM_FIRST_REFRESHES else every_s)

    def _give_up(self, error: DirectoryUnrecoverable) -> None:
        """Join again those who are alive; alone, there is nobody to find and a state to lose."""
        addresses = addresses_of(self._roster.alive(trio.current_time()))
        if addresses:
            raise JoinAgain(addresses, str(error)) from error

    async def _publish(self) -> None:
        expires_s = self._directory.swarm_time_s() + RECORD_LIFETIME_S
        own = PeerRecord(
            self._network.peer_id, self._incarnation, tuple(self._network.addresses), expires_s
        )
        key = record_key(self._name, own.peer_id)
        await self._directory.store(
            key, own.peer_id, encode_record(own, key, self._sign), expires_s
        )

    async def _refresh(self) -> None:
        for key in record_keys(self._name):
            for peer_id, value in (await self._directory.get(key)).items():
                if peer_id != self._network.peer_id:
                    self._take(key, peer_id, value)

    def _take(self, key: bytes, peer_id: str, value: bytes) -> None:
        try:
            record = decode_record(key, peer_id, value)
        except RemoteProtocolError:
            return
        if record.expires_s > self._directory.swarm_time_s():
            self._roster.record(trio.current_time(), record)
