"""A peer that joins replicas which average in pairs: what its first 100 steps make of its start.

Four replicas train until a fifth joins. It begins with their state in one of several ways
(`Start`), at the same moment, of the same replicas, on the same data; then all five train on
together. What is measured is the held-out loss of the joiner's own weights, as it trains, and that
of the others.

A state's chunks are a MiB, a small part of the models that runs are about; here the vector is cut
into CHUNKS, as a model of 8 million parameters is.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
import torch

from bench.report import machine
from peer.averaging.gossip.outer_step import NolocoFactors, outer_step
from peer.codec import BLOCK, get_codec
from peer.rounds.shares import MEMBER_WEIGHT
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import flat_adamw
from peer.training.schedule import learning_rate
from peer.training.step import Stepper

from .exchange import exchange_of
from .measures import mean
from .pairing import groups_of_round
from .settings import SHORT, SMOKE, Setting
from .world import Judge, World

OTHERS: Final = 4
CHUNKS: Final = 64
FACTORS: Final = NolocoFactors(0.3, 0.7, 0.7)
Moments = Literal["none", "int8", "fp32"]


@dataclass(frozen=True, slots=True)
class JoinSetting:
    """The sizes of the study.

    Attributes:
        base: model, data, batch, rounds and the schedule of the rate.
        joins_at: step at which the fifth joins.
        watched: steps that are then trained; whole rounds.
        blocks: held-out sequences behind each loss.
    """

    base: Setting
    joins_at: int
    watched: int
    blocks: int


JOIN_SHORT: Final = JoinSetting(replace(SHORT, name="join-short"), 104, 104, 32)
JOIN_SMOKE: Final = JoinSetting(replace(SMOKE, name="join-smoke"), 8, 8, 2)


@dataclass(frozen=True, slots=True)
class Start:
    """How the joiner begins.

    Attributes:
        name: of the arm.
        sources: replicas that chunks come from, each drawn for itself; 0 is the mean of all.
        moments: of AdamW, as the first source has them, and how they travel.
        ramp: the rate rises over the joiner's own first steps, as it does in the trainer.
    """

    name: str
    sources: int = 1
    moments: Moments = "none"
    ramp: bool = True


STARTS: Final = {
    start.name: start
    for start in (
        Start("whole"),
        Start("mixed-2", sources=2),
        Start("mixed-4", sources=4),
        Start("mean", sources=0),
        Start("no-ramp", ramp=False),
        Start("int8-moments", moments="int8", ramp=False),
        Start("fp32-moments", moments="fp32", ramp=False),
    )
}
"""Where the state comes from, with an empty optimizer and a ramp, as a joiner has them; then what
its optimizer has, with one state whole."""


@dataclass(slots=True)
class JoinResult:
    """The result of one start.

    Attributes:
        first: loss of the joiner's first weights.
        curve: steps since it joined, loss of its fast weights.
        slow: loss of its slow weights at the end.
        others: mean loss of the others' slow weights at the end.
        bytes_per_parameter: that the joiner fetched.
    """

    arm: dict[str, Any]
    setting: dict[str, Any]
    seed: int
    first: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    slow: float = 0.0
    others: float = 0.0
    bytes_per_parameter: float = 0.0
    seconds: float = 0.0
    machine: dict[str, Any] = field(default_factory=machine)

    @property
    def loss(self) -> float:
        """Mean over the watched steps: what the joiner lost by its start."""
        return mean([loss for _, loss in self.curve])


class _Replica:
    """Weights, outer state and optimizer of one."""

    def __init__(self, world: World) -> None:
        self.model = FlatModel(initial_module(world.spec, world.vocabulary), world.device)
        self.adamw = flat_adamw(self.model, world.spec.optimizer)
        self.stepper = Stepper(self.model, self.adamw, world.precision, world.setting.batch_size)
        self.phi_P = self.model.theta_P.clone()
        self.delta_P = torch.zeros_like(self.phi_P)

    def kept(self) -> "_Kept":
        moments = {name: moment.clone() for name, moment in self.adamw.moments().items()}
        theta_P, phi_P, delta_P = self.model.theta_P, self.phi_P, self.delta_P
        steps = self.adamw.num_steps
        return _Kept(theta_P.clone(), phi_P.clone(), delta_P.clone(), moments, steps)

    def take(self, kept: "_Kept") -> None:
        self.model.theta_P.copy_(kept.theta_P)
        self.phi_P.copy_(kept.phi_P)
        self.delta_P.copy_(kept.delta_P)
        self.adamw.reset()

        def fill(name: str, moment: torch.Tensor) -> None:
            moment.copy_(kept.moments[name])

        if kept.moments:
            self.adamw.take_over(kept.steps, fill)


@dataclass(slots=True)
class _Kept:
    theta_P: torch.Tensor
    phi_P: torch.Tensor
    delta_P: torch.Tensor
    moments: dict[str, torch.Tensor]
    steps: int


class JoinStudy:
    """The four of one seed, up to the moment at which the fifth joins, and what follows."""

    def __init__(self, world: World, setting: JoinSetting) -> None:
        self._world, self._setting = world, setting
        self._inner_steps = setting.base.inner_steps
        self._replicas = [_Replica(world) for _ in range(OTHERS + 1)]
        self._exchange = exchange_of("int8")
        self._judge = Judge(world)
        self._feed = world.feed([MEMBER_WEIGHT] * (OTHERS + 1))
        others = list(range(OTHERS))
        for step in range(setting.joins_at):
            self._step(others, step)
        self._kept = [replica.kept() for replica in self._replicas[:OTHERS]]
        blocks = (self._feed.next_blocks() for _ in range(setting.watched))
        self._blocks = list(blocks)  # the same for every start

    def run(self, start: Start) -> JoinResult:
        """Let the fifth join in this way, and train on."""
        begun_s, setting = time.perf_counter(), self._setting
        result = JoinResult(asdict(start), asdict(setting.base), self._world.spec.seed)
        for replica, kept in zip(self._replicas, self._kept, strict=False):
            replica.take(kept)
        joiner, everybody = self._replicas[OTHERS], list(range(OTHERS + 1))
        joiner.take(self._begin_with(start))
        result.bytes_per_parameter = 8.0 + _moment_bytes(start.moments)
        result.first = self._loss(joiner.phi_P)
        for done in range(setting.watched):
            self._step(everybody, setting.joins_at + done, done if start.ramp else None)
            if (done + 1) % self._inner_steps == 0:
                result.curve.append((done + 1, self._loss(joiner.model.theta_P)))
        result.slow = self._loss(joiner.phi_P)
        result.others = mean([self._loss(other.phi_P) for other in self._replicas[:OTHERS]])
        result.seconds = round(time.perf_counter() - begun_s, 1)
        return result

    def _loss(self, vector_P: torch.Tensor) -> float:
        return self._judge.loss(vector_P, self._setting.blocks)

    def _begin_with(self, start: Start) -> _Kept:
        """What the joiner takes; its fast weights are its slow ones, as after any fetch."""
        phi_P, delta_P = (self._vector(start, name) for name in ("phi_P", "delta_P"))
        source = self._kept[0]
        moments = dict(carried(source.moments, start.moments))
        return _Kept(phi_P.clone(), phi_P, delta_P, moments, source.steps)

    def _vector(self, start: Start, name: str) -> torch.Tensor:
        vectors = torch.stack([getattr(kept, name) for kept in self._kept])
        if start.sources == 0:
            return vectors.mean(0)
        blocks = vectors.shape[1] // BLOCK
        draw = np.random.default_rng(self._world.spec.seed).integers(start.sources, size=CHUNKS)
        of_block = torch.from_numpy(draw[np.arange(blocks) * CHUNKS // blocks])
        cut = vectors.view(len(vectors), blocks, BLOCK)
        return cut[of_block, torch.arange(blocks)].reshape(-1).clone()

    def _step(self, active: list[int], step: int, own_steps: int | None = None) -> None:
        """One inner step of these, and the averages of a round that ends with it."""
        spec, total = self._world.spec, self._setting.base.steps
        watched = step - self._setting.joins_at
        blocks_ABT = self._feed.next_blocks(active) if watched < 0 else self._blocks[watched]
        for index, blocks_BT in zip(active, blocks_ABT, strict=True):
            own = {"own_steps": own_steps} if index == OTHERS and own_steps is not None else {}
            rate = learning_rate(spec.optimizer, step, total, **own)
            self._replicas[index].stepper.step(blocks_BT, rate)
        if (step + 1) % self._inner_steps == 0:
            self._average(active, step // self._inner_steps)

    def _average(self, active: list[int], round_: int) -> None:
        run_id = f"joining-{self._world.spec.seed}"
        groups = groups_of_round("pairs", run_id, round_, len(active))
        replicas = [self._replicas[index] for index in active]
        shared = self._exchange.share([each.model.theta_P for each in replicas], groups)
        for group in groups:
            for own in group:
                members = (own, *(each for each in group if each != own))
                codes = [shared.codes[each] for each in members]
                replica = replicas[own]
                outer_step(replica.phi_P, replica.delta_P, codes, shared.codec, FACTORS)
                replica.model.theta_P.add_(replica.phi_P - shared.decoded[own])


def carried(moments: dict[str, torch.Tensor], how: Moments) -> Iterator[tuple[str, torch.Tensor]]:
    """The moments as they arrive.

    Of the second the root travels: its range is smaller. What is rounded to zero comes as half a
    step, for an update is divided by it.
    """
    if how == "none":
        return
    for name, moment in moments.items():
        if how == "fp32":
            yield name, moment.clone()
        elif name.startswith("exp_avg_sq"):
            yield name, _through_int8(moment.sqrt(), at_least_half_a_step=True).square()
        else:
            yield name, _through_int8(moment)


def _through_int8(values: torch.Tensor, *, at_least_half_a_step: bool = False) -> torch.Tensor:
    codec, size = get_codec("int8"), values.numel()
    flat_P = torch.zeros(-(-size // BLOCK) * BLOCK)
    flat_P[:size] = values.reshape(-1)
    codes = torch.empty(codec.code_bytes(flat_P.numel()), dtype=torch.uint8)
    codec.encode(flat_P, codes)
    read_P = torch.empty_like(flat_P)
    codec.decode(codes, read_P)
    if at_least_half_a_step:
        steps = flat_P.view(-1, BLOCK).amax(1, keepdim=True) / 127
        read_P = torch.maximum(read_P.view(-1, BLOCK), steps / 2).reshape(-1)
    return read_P[:size].reshape(values.shape)


def _moment_bytes(how: Moments) -> float:
    """Bytes per parameter that the moments add."""
    return {"none": 0.0, "int8": 2 * (1 + 2 / BLOCK), "fp32": 8.0}[how]
