"""Peers of a pipeline in virtual time: real exchanges over simulated links, trainers that pretend.

A pretended trainer takes time for its work and adds one to each byte of a boundary that passes, so
that what comes back tells through how many stages it has gone.
"""

import math
from collections import Counter, deque
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from trio.lowlevel import ParkingLot

from peer.codec import get_codec
from peer.facts import Facts, PeerState
from peer.rounds.services import Services
from peer.rounds.way import TrainerLine
from peer.stages.peers import StagePeers
from peer.stages.roles import exchange_of
from peer.training.shared import RING_PER_SLOT, SLOTS, BoundaryRing, code_memory
from protocol.address.peer_id import peer_id_from_public_key
from protocol.membership.group import Group
from protocol.membership.view import Progress, Roster
from protocol.microbatch import trainer_messages as told
from protocol.routing.routers import plan_of
from protocol.run.amendments import AmendedSpec
from protocol.run.layout import part_of_stage
from protocol.run.run_spec import RunSpec
from protocol.wire.stage_messages import Direction
from simulation.network import LinkModel, SimulatedInternet
from simulation.work import SimulatedWork

RUN_ID = "ab" * 16
SLOT_BYTES = 1024
CODEC = get_codec("fp32")
LINK = LinkModel(latency_s=0.05, bandwidth_bytes_per_s=1e6)
FORWARD_S, BACKWARD_S = 0.1, 0.2


class UnmeasuredRing(BoundaryRing):
    """Boundaries of which nobody asks how large they are."""

    def size(self, _number):
        return 0.0


class PretendedTrainer:
    """The trainer of a stage; a data peer's runs so many iterations of so many microbatches.

    Attributes:
        ring: the kind of its ring.
        fresh: what a microbatch begins as.
        passed: boundaries that a relay has worked on, by direction.
    """

    ring: type[BoundaryRing] = UnmeasuredRing
    fresh = bytes(SLOT_BYTES)

    def __init__(self, stage, iterations=0, microbatches=0):
        values = CODEC.num_values(SLOT_BYTES)
        self.boundaries = self.ring(code_memory(), CODEC, values, RING_PER_SLOT * SLOTS)
        self.stage = stage
        self.iterations = iterations
        self.microbatches = microbatches
        self.held = set()
        self.made = {}
        self.most_held = 0
        self.passed = Counter[Direction]()
        self.came_back = []
        self.dropped = []
        self.steps = []
        self.done = trio.Event()
        self._free = deque(self.boundaries.outbound)
        self._released = trio.Event()
        self.commands, self._commands = trio.open_memory_channel(math.inf)

    async def send(self, command):
        if isinstance(command, told.Freed):
            self._free.append(command.slot)
            self._released.set()
        else:
            await self.commands.send(command)

    async def run(self, exchange):
        self.exchange = exchange
        await (self._run_data_peer() if self.iterations else self._run_relay())

    async def _run_relay(self):
        added = 0
        async for command in self._commands:
            match command:
                case told.Filled(direction, number, slot, loss, adds):
                    added += await self._pass(direction, number, slot, loss) and adds
                case told.Resend(number) if number in self.held:
                    await self._produce(Direction.FORWARD, number, self.made[number], None)
                case told.Drop(number):
                    self.held.discard(number)
                case told.Finish():
                    assert not self.held
                    self.steps.append(added)
                    added = 0
                    await self.exchange.took(told.Stepped(self.steps[-1]))

    async def _pass(self, direction, number, slot, loss):
        boundary = self.changed(bytes(self.boundaries.slot(slot)), direction)
        await self.exchange.took(told.Freed(slot))
        await trio.sleep(BACKWARD_S if direction == Direction.BACKWARD else FORWARD_S)
        self.passed[direction] += 1
        if direction == Direction.SCORE:
            await self._produce(direction, number, boundary, loss)
            return False
        if direction == Direction.FORWARD:
            assert number not in self.held
            self.held.add(number)
            self.made[number] = boundary
            self.most_held = max(self.most_held, len(self.held))
        else:
            self.held.remove(number)
        await self._produce(direction, number, boundary, loss)
        if direction == Direction.BACKWARD:
            await self.exchange.took(told.GradientAdded(number))
        return direction == Direction.BACKWARD

    def changed(self, boundary, _direction):
        """What a relay makes of a boundary."""
        return bytes(value + 1 for value in boundary)

    def read(self, boundary):
        """What a data peer reads in the gradient of a microbatch."""
        return set(boundary)

    async def _run_data_peer(self):
        for iteration in range(self.iterations):
            numbers = [iteration * 100 + i for i in range(self.microbatches)]
            await self.exchange.took(told.Begun(len(numbers)))
            away = set(numbers)
            for number in numbers:
                await self._produce(Direction.FORWARD, number, self.fresh, None)
            while away:
                command = await self._commands.receive()
                if isinstance(command, told.Drop):
                    away.discard(command.number)
                    self.dropped.append(command.number)
                elif isinstance(command, told.Resend):
                    await self._produce(Direction.FORWARD, command.number, self.fresh, None)
                elif command.number in away:
                    await self._come_back(command, away)
            await self.exchange.took(told.Stepped(len(numbers)))
        self.done.set()

    async def _come_back(self, command, away):
        boundary = bytes(self.boundaries.slot(command.slot))
        await self.exchange.took(told.Freed(command.slot))
        if command.direction == Direction.FORWARD:
            await self._produce(Direction.BACKWARD, command.number, boundary, 2.5)
            return
        away.discard(command.number)
        self.came_back.append(self.read(boundary))
        await self.exchange.took(told.GradientAdded(command.number))

    async def _produce(self, direction, number, boundary, loss):
        while not self._free:
            self._released = trio.Event()
            await self._released.wait()
        slot = self._free.popleft()
        self.boundaries.slot(slot)[:] = boundary
        await self.exchange.took(told.Filled(direction, number, slot, loss))


class StagePeer:
    """One peer of the world."""

    def __init__(self, peer_id, stage, network, trainer, world, sign):
        self.peer_id = peer_id
        self.stage = stage
        self.network = network
        self.trainer = trainer
        self.facts = Facts(peer_id, 1, run_id=RUN_ID, state=PeerState.TRAINING)
        self.roster = Roster(math.inf)
        self.heard = ParkingLot()
        self.told = []
        pipeline = {"stages": world.stages, "visited": world.visited, "routing": world.routing}
        spec = RunSpec.model_validate(
            {"pipeline": pipeline, "training": {"batch_size": world.microbatches}}
        )
        peers = StagePeers(self.roster, RUN_ID, world.stages)
        services = Services(
            network=network,
            roster=self.roster,
            facts=self.facts,
            events=self,
            heard=self.heard,
            sign=sign,
            work=SimulatedWork(0.0),
        )
        self.exchange = exchange_of(AmendedSpec(spec), stage, peers, services, world.plan)

    def emit(self, name, /, **fields):
        self.told.append((name, fields))

    async def run(self):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.exchange.serve)
            await trio.sleep(0.01)
            self.exchange.began(TrainerLine(self.trainer, nursery))
            nursery.start_soon(self.trainer.run, self.exchange)


class StageWorld:
    """A pipeline: so many peers of each stage. Peers of stage 0 hold the data.

    `link_of` says what lies between two peers, each given as (stage, place in its stage),
    `trainer_of` which trainer the peer at (stage, place) has, and `plan` makes the plans.
    """

    def __init__(
        self,
        sizes,
        iterations=3,
        microbatches=4,
        routing="planned",
        link_of=None,
        visited=None,
        trainer_of=None,
        plan=plan_of,
    ):
        self.trainer_of = trainer_of or (lambda stage, i: PretendedTrainer)
        self.routing = routing
        self.plan = plan
        self.link_of = link_of or (lambda a, b: LINK)
        self.stages = len(sizes)
        self.visited = visited or self.stages
        self.sizes = sizes
        self.iterations = iterations
        self.microbatches = microbatches
        self.places = {}
        self.internet = SimulatedInternet(1, link_of=self.link)
        self.peers = []
        self.scopes = {}

    def link(self, one, other):
        known = one in self.places and other in self.places
        return self.link_of(self.places[one], self.places[other]) if known else LINK

    @asynccontextmanager
    async def running(self):
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            for stage, size in enumerate(self.sizes):
                for i in range(size):
                    await self._add(stack, stage, i)
            for peer in self.peers:
                self._introduce(peer)
                nursery.start_soon(self._live, peer)
            yield self
            nursery.cancel_scope.cancel()

    async def _add(self, stack, stage, i):
        key = Ed25519PrivateKey.from_private_bytes(bytes([10 * stage + i]) * 32)
        peer_id = peer_id_from_public_key(key.public_key().public_bytes_raw())
        self.places[peer_id] = (stage, i)
        network = await stack.enter_async_context(self.internet.open_network(peer_id))
        work = (self.iterations, self.microbatches) if stage == 0 else (0, 0)
        trainer = self.trainer_of(stage, i)(stage, *work)
        self.peers.append(StagePeer(peer_id, stage, network, trainer, self, key.sign))

    def _introduce(self, peer):
        for other in self.peers:
            if other is not peer:
                group = Group(RUN_ID, part_of_stage(other.stage)).digest
                progress = Progress("training", group=group)
                rtt_s = 2 * self.link(peer.peer_id, other.peer_id).latency_s
                peer.roster.heard(0.0, other.peer_id, 1, progress=progress, rtt_s=rtt_s)

    async def _live(self, peer):
        for other in self.peers:
            if other is not peer:
                await peer.network.connect(other.peer_id, other.network.addresses)
        with trio.CancelScope() as self.scopes[peer.peer_id]:
            await peer.run()

    def change(self, one, other, **changes):
        """Make a link another one, which both ends measure."""
        for a, b in ((one, other), (other, one)):
            link = self.internet.link(a.peer_id, b.peer_id)
            link.model = replace(link.model, **changes)
            rtt_s = 2 * link.model.latency_s
            a.roster.heard(trio.current_time(), b.peer_id, 1, rtt_s=rtt_s)

    def of_stage(self, stage):
        return [peer for peer in self.peers if peer.stage == stage]

    async def wait_done(self):
        for peer in self.of_stage(0):
            await peer.trainer.done.wait()

    def kill(self, peer):
        """Off the network at once; the others notice."""
        self.scopes[peer.peer_id].cancel()
        self.internet.kill(peer.peer_id)
        for other in self.peers:
            other.roster.gone(peer.peer_id, 1)
