"""A whole swarm in one process, in virtual time, from a seed.

The daemon's own code (peer/daemon/peer.py and all below it) runs on simulated ports: streams with
latency and bandwidth, a directory, toy models, work that takes no thread. Faults come from outside:
kill a peer, cut it off, put its machine to sleep, slow it down, set its clock wrong, hide peers
from each other.

    def body():
        async with open_swarm(seed, spec, folder) as swarm:
            swarm.found("a")
            swarm.join("b")
            await swarm.finished()
    run_in_virtual_time(seed, body)

Promise: the same seed, spec and calls make the same event log, byte for byte (`event_log`), on the
same machine with the same versions.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from peer.daemon.assembly import Assembly
from peer.daemon.entry import Entry
from peer.daemon.links import SILENCE_S
from peer.network.identity import SEED_BYTES, Identity
from peer.network.simulated import SimulatedInternet
from peer.network.simulated_directory import SimulatedDhtWorld
from peer.network.simulated_stream import LinkModel
from peer.observe.status import PeerState
from peer.ports import PeerId
from peer.ports.simulated import SimulatedEntropy
from peer.training.toy import ToyProblem
from protocol.membership.view import Roster
from protocol.run.run_spec import RunSpec

from .holes import HoledRoster
from .machine import DEFAULT_PARAMETERS, Machine, SimulatedProvision
from .peer import Place, SimulatedPeer

POLL_S: Final = 0.1
"""How often `until` looks, in virtual time."""
DEFAULT_MACHINE: Final = Machine()
DEFAULT_LINK: Final = LinkModel(latency_s=0.02, jitter_s=0.005)


@dataclass(frozen=True, slots=True)
class SwarmOptions:
    """The world of a simulated swarm.

    Attributes:
        link: model of every link, unless `link_of` is given.
        hidden_fraction: part of the others that each peer never sees train.
        hidden_records_fraction: part of the directory's writers that each reader does not see.
        padded_parameters: of the part of the model that a peer holds, unless that is one of
            `parts`.
        parts: padded parameters of parts of the model, by name (protocol/membership/group.py).
    """

    link: LinkModel = DEFAULT_LINK
    link_of: Callable[[PeerId, PeerId], LinkModel] | None = None
    hidden_fraction: float = 0.0
    hidden_records_fraction: float = 0.0
    padded_parameters: int = DEFAULT_PARAMETERS
    parts: Mapping[str, int] = field(default_factory=dict)
    problem: ToyProblem = field(default_factory=ToyProblem)


DEFAULT_OPTIONS: Final = SwarmOptions()


class SimulatedSwarm:
    """Peers, the world between them, and the means to harm them. Made by `open_swarm`."""

    def __init__(
        self,
        seed: int,
        spec: RunSpec,
        folder: Path,
        options: SwarmOptions,
        nursery: trio.Nursery,
    ) -> None:
        self._seed = seed
        self._spec = spec
        self._folder = folder
        self._options = options
        self._nursery = nursery
        self._lines: list[bytes] = []
        self._incarnations: dict[str, int] = {}
        self.internet = SimulatedInternet(seed, link=options.link, link_of=options.link_of)
        self.directory = SimulatedDhtWorld(seed, hidden_fraction=options.hidden_records_fraction)
        self.peers: dict[str, SimulatedPeer] = {}

    def __getitem__(self, name: str) -> SimulatedPeer:
        return self.peers[name]

    # --- peers ------------------------------------------------------------------------------------
    def found(
        self, name: str, machine: Machine = DEFAULT_MACHINE, *, exit_when_done: bool = False
    ) -> SimulatedPeer:
        """Start the founder."""
        spec = self._spec
        return self._start(name, machine, lambda a: a.founding(spec), exit_when_done=exit_when_done)

    def join(
        self,
        name: str,
        machine: Machine = DEFAULT_MACHINE,
        *,
        through: Sequence[str] = (),
        exit_when_done: bool = False,
    ) -> SimulatedPeer:
        """Start a peer that joins through the named peers (the founder, if none is named)."""
        through = through or [next(iter(self.peers))]
        bootstrap = [address for each in through for address in self._addresses(each)]
        return self._start(
            name, machine, lambda a: a.joining(bootstrap), exit_when_done=exit_when_done
        )

    def resume(
        self, name: str, *, exit_when_done: bool = False, alone: bool = False
    ) -> SimulatedPeer:
        """Start a peer again whose daemon has ended, in the home that it had."""
        before = self.peers[name]
        signed = before.signed
        assert before.ended.is_set(), "an identity lives once"
        assert signed is not None
        return self._start(
            name,
            before.machine,
            lambda a: a.returning(signed, (), alone=alone),
            exit_when_done=exit_when_done,
        )

    def _addresses(self, name: str) -> Sequence[str]:
        return self.peers[name].network.addresses

    def _start(
        self,
        name: str,
        machine: Machine,
        entry_of: Callable[[Assembly], Entry],
        *,
        exit_when_done: bool,
    ) -> SimulatedPeer:
        number = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        peer = SimulatedPeer(name, identity_of(self._seed, name), number, machine)
        self.peers[name] = peer
        self._nursery.start_soon(self._run, peer, entry_of, exit_when_done)
        return peer

    async def _run(
        self,
        peer: SimulatedPeer,
        entry_of: Callable[[Assembly], Entry],
        exit_when_done: bool,
    ) -> None:
        def write_line(line: bytes) -> None:
            peer.lines.append(line)
            self._lines.append(line)

        machine, options = peer.machine, self._options
        folder = self._folder / peer.name
        folder.mkdir(parents=True, exist_ok=True)
        provision = SimulatedProvision(
            peer.peer_id,
            folder,
            machine,
            options.problem,
            options.parts.get(machine.part, options.padded_parameters),
            peer.gate,
        )
        with peer.scope:
            async with self.internet.open_network(peer.peer_id) as network:
                directory = self.directory.directory(peer.peer_id, machine.clock_skew_s)
                place = Place(network, directory, self._roster(peer.peer_id), folder, write_line)
                await peer.run(place, provision, entry_of, exit_when_done=exit_when_done)
        peer.ended.set()

    def _roster(self, peer_id: PeerId) -> Roster:
        if not self._options.hidden_fraction:
            return Roster(SILENCE_S)
        return HoledRoster(SILENCE_S, self._seed, peer_id, self._options.hidden_fraction)

    # --- harm -------------------------------------------------------------------------------------
    def kill(self, name: str) -> None:
        """End a peer at once, as kill -9 of all its processes does."""
        peer = self.peers[name]
        self.internet.kill(peer.peer_id)
        peer.scope.cancel()

    def isolate(self, name: str) -> None:
        """Cut a peer off from all others that are there, until `internet.heal`."""
        own = self.peers[name].peer_id
        others = [peer.peer_id for peer in self.peers.values() if peer.peer_id != own]
        self.internet.partition([own], others)

    def freeze(self, name: str) -> None:
        """Put a machine to sleep: nothing comes from it, and its trainer stands still."""
        self.peers[name].gate.close()
        self.isolate(name)

    def thaw(self, name: str) -> None:
        """Wake it up again; heals all that is cut."""
        self.internet.heal()
        self.peers[name].gate.open()

    # --- watching ---------------------------------------------------------------------------------
    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, looking every POLL_S."""
        while not condition():  # noqa: ASYNC110 - looking costs nothing in virtual time
            await trio.sleep(POLL_S)

    async def finished(self, *names: str) -> None:
        """Wait until these peers (all, if none is named) have finished the run or ended."""
        watched = [self.peers[name] for name in names or self.peers]

        def is_over(peer: SimulatedPeer) -> bool:
            return peer.ended.is_set() or (
                peer.ready.is_set() and peer.facts.state is PeerState.FINISHED
            )

        await self.until(lambda: all(map(is_over, watched)))

    def event_log(self) -> bytes:
        """What all peers have logged, in the order in which it happened."""
        return b"\n".join(self._lines)


def identity_of(seed: int, name: str) -> Identity:
    """The identity of the peer called `name` in the world of this seed."""
    number = int.from_bytes(name.encode(), "big")
    return Identity(SimulatedEntropy(number * 1_000_003 + seed).token_bytes(SEED_BYTES))


@asynccontextmanager
async def open_swarm(
    seed: int, spec: RunSpec, folder: Path, options: SwarmOptions = DEFAULT_OPTIONS
) -> AsyncIterator[SimulatedSwarm]:
    """A world without peers; those started in it end with the context.

    Args:
        seed: of the world's randomness. The scheduler's is that of `run_in_virtual_time`.
        spec: of the run that `found` founds.
        folder: for state files.
    """
    async with trio.open_nursery() as nursery:
        yield SimulatedSwarm(seed, spec, folder, options, nursery)
        nursery.cancel_scope.cancel()
