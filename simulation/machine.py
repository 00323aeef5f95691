"""The machine of a simulated peer: a toy model instead of torch, a small file instead of a corpus.

As in a real run, the founder freezes the model's shape in the run spec, and joiners fetch the
corpus as a blob by digest. Of a run in parts the founder freezes its own part; the world has the
shapes of the others.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import blake3
import numpy as np
import trio

from peer.content.fetching import BlobSource
from peer.daemon.beginning import Beginning, Fresh
from peer.daemon.expert_beginning import FreshOrFetched
from peer.daemon.fetched import FromPeers
from peer.daemon.provision import ChoosePart, Supplies, with_frozen_experts
from peer.facts import PartShape
from peer.network.pacing import NO_LIMITS, BandwidthLimits
from peer.rounds.domains import HeldOutBlocks
from peer.runtime import PeerId
from peer.training.messages import Failed, TrainerCommand, TrainerEvent
from peer.training.ports import StartTrainer, Trainer
from protocol.admission.statements import Token
from protocol.content.manifest import blob_name
from protocol.content.samples import Float32Vector
from protocol.errors import InvalidRunSpec
from protocol.membership.group import WHOLE_MODEL
from protocol.run.layout import Layout, part_of_expert
from protocol.run.run_spec import FrozenSection, RunSpec
from simulation.trainer import SimulatedSpeed, ToyProblem, simulated_starter

FIRST_WEIGHTS_SCALE: Final = 3.0
"""Distance of the first weights from the optimum, per value."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A simulated machine.

    Attributes:
        work_s: virtual duration of each piece of blocking work.
        clock_skew_s: how far its wall clock is ahead.
        overlap_steps: tau of its peer; None is the run's.
        unusable: why nothing can be trained on it.
        part: of the model (protocol/membership/group.py).
        expert: that its peer trains whatever happens, by name, where the run has any.
        misfits: why it cannot train others, by number.
        begins_group: its peer is the first that holds this part, and makes its first weights.
        token: an invitation.
    """

    speed: SimulatedSpeed = field(default_factory=SimulatedSpeed)
    work_s: float = 0.0
    clock_skew_s: float = 0.0
    limits: BandwidthLimits = NO_LIMITS
    overlap_steps: int | None = None
    unusable: str | None = None
    part: str = WHOLE_MODEL
    expert: str | None = None
    misfits: Mapping[int, str] = field(default_factory=dict)
    begins_group: bool = False
    token: Token | None = None
    checkpoint_every_s: float | None = None
    exit_when_done: bool = False
    follows: bool = False


class Gate:
    """Lets a trainer's events through, or holds them up: a machine that sleeps.

    `slept_s` does not count a sleep that still lasts.
    """

    def __init__(self) -> None:
        self._open = trio.Event()
        self._open.set()
        self._closed_at_s = 0.0
        self.slept_s = 0.0

    def close(self) -> None:
        if self._open.is_set():
            self._open = trio.Event()
            self._closed_at_s = trio.current_time()

    def open(self) -> None:
        if not self._open.is_set():
            self.slept_s += trio.current_time() - self._closed_at_s
            self._open.set()

    async def wait(self) -> None:
        while not self._open.is_set():
            await self._open.wait()


class _GatedTrainer:
    """A trainer on a machine that may sleep, or be unusable. Implements `Trainer`."""

    boundaries = None

    def __init__(self, trainer: Trainer, gate: Gate, unusable: str | None) -> None:
        self._trainer = trainer
        self._gate = gate
        self._unusable = unusable

    async def send(self, command: TrainerCommand) -> None:
        await self._gate.wait()
        await self._trainer.send(command)

    async def receive(self) -> TrainerEvent:
        event = await self._trainer.receive()
        await self._gate.wait()
        return event if self._unusable is None else Failed("unusable", self._unusable)

    def codes(self, region: int) -> memoryview:
        return self._trainer.codes(region)


@dataclass(eq=False)
class SimulatedProvision:
    """Implements `peer.daemon.provision.Provision`, with toy models in virtual time."""

    _peer_id: PeerId
    _corpus: Path
    _machine: Machine
    _problem: ToyProblem
    _layout: Layout
    _gate: Gate
    slow_P: Float32Vector | None = None

    async def found(self, spec: RunSpec, expert: int | None) -> tuple[RunSpec, Supplies]:
        await trio.lowlevel.checkpoint()
        corpus = blake3.blake3(str(spec.seed).encode()).digest(length=8192)
        data = spec.data.model_copy(update={"manifest": blob_name(corpus)})
        frozen = FrozenSection(
            config="{}",
            layout_digest=self._layout.digest,
            parameters=self._layout.padded_parameters,
            padded_parameters=self._layout.padded_parameters,
        )
        spec = spec.model_copy(update={"data": data, "frozen": frozen})
        if expert is not None:
            spec = with_frozen_experts(spec, [spec] * len(spec.experts))
            return spec, self._supplies_of_expert(spec, expert, corpus, _fresh(spec))
        return spec, self._supplies(spec, corpus, _fresh(spec))

    def misfits(self, spec: RunSpec) -> Mapping[int, str]:
        return self._machine.misfits

    async def obtain(self, spec: RunSpec, source: BlobSource, choose_part: ChoosePart) -> Supplies:
        """Fetch the corpus, unless it is here. Raises InvalidRunSpec, or as `blob`."""
        if spec.data.manifest is None:
            raise InvalidRunSpec("the run spec does not name its corpus by digest")
        corpus = self._corpus.read_bytes() if self._corpus.exists() else b""
        if blob_name(corpus) != spec.data.manifest:
            corpus = await source.blob(spec.data.manifest)
        if spec.experts:
            number, seeded = (await choose_part()).number, spec.begins_with_seed
            first = FreshOrFetched(
                _fresh(spec), seeded=seeded(number), then=trio.lowlevel.checkpoint
            )
            return self._supplies_of_expert(spec, number, corpus, first)
        beginning = _fresh(spec) if self._machine.begins_group else FromPeers()

        async def remake() -> Beginning:
            await trio.lowlevel.checkpoint()
            return _fresh(spec)

        return replace(self._supplies(spec, corpus, beginning), remake=remake)

    def _supplies_of_expert(
        self, spec: RunSpec, number: int, corpus: bytes, beginning: Beginning
    ) -> Supplies:
        own = self._supplies(spec.of_expert(number), corpus, beginning)
        held_out = [
            HeldOutBlocks(of, each.name, blob_name(each.name.encode()), np.zeros((1, 9), np.uint8))
            for of, each in enumerate(spec.experts)
        ]
        return replace(
            own, part=part_of_expert(number), held_out=lambda: held_out, vocabulary_size=256
        )

    def _supplies(self, spec: RunSpec, corpus: bytes, beginning: Beginning) -> Supplies:
        self._corpus.write_bytes(corpus)
        start = simulated_starter(
            spec.with_overlap(self._machine.overlap_steps),
            self._peer_id,
            self._machine.speed,
            self._problem,
            lambda: self._gate.slept_s,
        )

        @contextlib.asynccontextmanager
        async def started(
            slow_P: Float32Vector, micro_batch_cap: int | None
        ) -> AsyncIterator[Trainer]:
            async with start(slow_P, micro_batch_cap) as trainer:
                yield _GatedTrainer(trainer, self._gate, self._machine.unusable)

        @contextlib.contextmanager
        def memory(padded_parameters: int) -> Iterator[tuple[Float32Vector, StartTrainer]]:
            self.slow_P = np.zeros(padded_parameters, np.float32)
            yield self.slow_P, started

        return Supplies(
            memory,
            {blob_name(corpus): self._corpus},
            self._problem.num_blocks,
            shape=PartShape(self._layout.digest, self._layout.padded_parameters),
            beginning=beginning,
            part=self._machine.part,
            piece_blocks=self._problem.piece_blocks,
        )


def _fresh(spec: RunSpec) -> Fresh:
    async def initialise(slow_P: Float32Vector) -> None:
        await trio.lowlevel.checkpoint()
        noise = np.random.default_rng([spec.seed, 1])
        drawn = noise.standard_normal(slow_P.size, dtype=np.float32)
        slow_P[:] = np.float32(FIRST_WEIGHTS_SCALE) * drawn

    return Fresh(initialise)
