"""What ties a peer to its group: records in the directory, partners, corpus, state for joiners.

The directory is how peers of a group find each other that were never told of each other; who is
alive is judged on links alone. So a record may be half a minute old, and a directory that is down
for a while costs nothing but new acquaintances.
"""

import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from peer.averaging.parts import Averaging
from peer.content.pieces import PieceFetcher
from peer.content.state_file import StateManifest, copy_state, seal_state
from peer.facts import Facts, PeerState
from peer.ports import DirectoryUnrecoverable, PeerId, Work
from peer.process.rejoin import JoinAgain, addresses_of
from protocol.content.samples import sample_of
from protocol.errors import RemoteProtocolError
from protocol.gossip.matchmaking import RoundSnapshot
from protocol.membership.records import (
    PeerRecord,
    decode_record,
    encode_record,
    record_key,
    record_keys,
)
from protocol.membership.view import Member, View
from protocol.run.layout import DATA_STAGE, stage_of_part
from protocol.run.run_spec import RunSpec
from protocol.schedule.data_plan import DataPlan
from protocol.wire.content_messages import StateScalars

from .parts import PeerParts
from .ports import Ports
from .provision import Supplies

# --- records in the directory ---------------------------------------------------------------------

PUBLISH_EVERY_S: Final = 30.0
RECORD_LIFETIME_S: Final = 120.0
REFRESH_EVERY_S: Final = 15.0
FIRST_REFRESHES_S: Final = 2.0
"""A newcomer looks around sooner."""
NUM_FIRST_REFRESHES: Final = 3


class Membership:
    """Keeps our record fresh and the roster informed; `run` until cancelled.

    Args:
        name: of our group in the directory (Admission.directory_name).
    """

    def __init__(self, ports: Ports, name: str) -> None:
        self._ports = ports
        self._name = name

    async def run(self) -> None:
        """Publish and look around, each at its own pace."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._repeat, self._publish, PUBLISH_EVERY_S)
            nursery.start_soon(self.look_around)

    async def look_around(self) -> None:
        """Find the others of our group, until cancelled."""
        await self._repeat(self._refresh, REFRESH_EVERY_S)

    async def _repeat(self, job: Callable[[], Awaitable[None]], every_s: float) -> None:
        for turn in itertools.count(1):
            try:
                await job()
            except DirectoryUnrecoverable as error:
                # Join again those who are alive; alone there is nobody to find, and much to lose.
                addresses = addresses_of(self._ports.roster.alive(trio.current_time()))
                if addresses:
                    raise JoinAgain(addresses, str(error)) from error
            await trio.sleep(FIRST_REFRESHES_S if turn <= NUM_FIRST_REFRESHES else every_s)

    async def _publish(self) -> None:
        ports, directory, network = self._ports, self._ports.directory, self._ports.network
        expires_s = directory.swarm_time_s() + RECORD_LIFETIME_S
        addresses = tuple(network.addresses)
        own = PeerRecord(network.peer_id, ports.facts.incarnation, addresses, expires_s)
        key = record_key(self._name, own.peer_id)
        await directory.store(key, own.peer_id, encode_record(own, key, ports.sign), expires_s)

    async def _refresh(self) -> None:
        directory, own_id = self._ports.directory, self._ports.network.peer_id
        for key in record_keys(self._name):
            for peer_id, value in (await directory.get(key)).items():
                with suppress(RemoteProtocolError):
                    record = decode_record(key, peer_id, value)
                    if peer_id != own_id and record.expires_s > directory.swarm_time_s():
                        self._ports.roster.record(trio.current_time(), record)


# --- partners -------------------------------------------------------------------------------------


class LinkedCompany:
    """The other peers of the group, for gossip, from the view and the links.

    Args:
        fragment: the one that partners are looked for; 0 where the whole model is one vector.

    Attributes:
        blame: holds a fault against a peer.
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
        training = self._view.members_training(trio.current_time())
        return [member for member in training if member.progress.state == PeerState.TRAINING]


# --- corpus ---------------------------------------------------------------------------------------

ROUNDS_FIRST: Final = 2
"""Rounds of ours whose blocks are fetched in the order in which they are trained."""
MAX_FIRST_BLOCKS: Final = 1024
"""Beyond so many blocks all pieces of a stratum have begun, and their order means nothing."""


def piece_fetcher(
    ports: Ports, supplies: Supplies, plan: DataPlan, spec: RunSpec, max_bytes: float | None
) -> PieceFetcher | None:
    """Brings the pieces of the corpus that are needed; None where all is here, or none needed.

    Args:
        max_bytes: of the disk that pieces may take; None for no limit.
    """
    store = supplies.store
    if store is None or stage_of_part(supplies.part) not in (None, DATA_STAGE):
        return None  # no other stage reads tokens
    most = math.inf if max_bytes is None else max_bytes // store.manifest.piece_bytes(0)
    first_blocks = ROUNDS_FIRST * spec.sync.round_steps * spec.training.batch_size
    return PieceFetcher(
        store,
        plan,
        ports,
        first_blocks=min(MAX_FIRST_BLOCKS, first_blocks),
        max_pieces=max(1, most),
    )


# --- state for joiners ----------------------------------------------------------------------------

LARGEST_NORM: Final = 1e9
"""Told of a gradient that is longer; its length is a weight beside others'
(peer/state/rebuilt_stage.py)."""


class OuterSource:
    """The outer state as the state service sees it. Implements `StateSource`."""

    def __init__(self, averaging: Averaging, facts: Facts, work: Work) -> None:
        self._averaging = averaging
        self._facts = facts
        self._work = work
        self._written = 0

    @property
    def group(self) -> str:
        return self._facts.group or ""

    @property
    def round(self) -> int:
        return self._averaging.round

    @property
    def step(self) -> int:
        return self._facts.step

    async def sample(self, seed: bytes) -> bytes:
        """The weights as they are between two outer steps."""
        async with self._averaging.lock:
            return sample_of(self._averaging.slow_P, seed).astype("<f4").tobytes()

    async def write(self, directory: Path) -> tuple[Path, StateManifest]:
        """Write the state: copied under the lock of the outer step, so that it is one state.

        Digests and disk are waited for without the lock, so an outer step is held up for no longer
        than the copy takes.
        """
        facts, averaging = self._facts, self._averaging
        async with averaging.lock:
            self._written += 1
            path = directory / f"{self._written}.state"
            scalars = StateScalars(
                group=self.group,
                round=averaging.round,
                step=self.step,
                layout_digest=facts.layout_digest or "",
                epoch=facts.epoch,
                position=facts.position,
                tokens=facts.tokens,
                gradient_norm=float(min(facts.gradient_norm, LARGEST_NORM)),
            )
            vectors = (averaging.slow_P, averaging.momentum_P)
            await self._work.run(copy_state, path, scalars, *vectors)
        return path, await self._work.run(seal_state, path, scalars)
