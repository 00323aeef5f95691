"""One run: the replicas of one arm train together, with the project's outer step.

At the close of a round each replica's weights are coded and exchanged (snapshot). Training goes on
for the arm's delay; then comes the outer step, and theta takes over the move of the slow weights as
the trainer does (peer/training/fragments.py): theta += phi' - decoded. After the last step nothing
is delayed.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from bench.report import machine
from peer.averaging.gossip.outer_step import outer_step

from .arms import Arm
from .exchange import CodecExchange, Shared, exchange_of
from .fragment_pairs import FragmentPairs
from .halfway import Halfway, Stand
from .measures import mean, replica_deviation
from .moments import average_first_moments
from .pairing import groups_of_round
from .runs import told
from .store import read_back
from .world import Judge, World, replicas_of


@dataclass(slots=True)
class Result:
    """The result of one run.

    Attributes:
        losses: of each replica's slow weights, nats per token of the held-out text.
        averaged_loss: of the mean of all slow weights.
        curve: step, mean loss of the replicas, loss of their mean.
        deviations: of each round: step, learning rate, replica deviation of the slow weights and of
            the fast ones before averaging.
        bytes_per_parameter: sent by a node on average, in the whole run.
        resent_share: blocks sent again, of all.
        tokens: trained by all together; 0 in lines that do not say.
    """

    arm: dict[str, Any]
    setting: dict[str, Any]
    seed: int
    parameters: int
    losses: list[float] = field(default_factory=list)
    averaged_loss: float = 0.0
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    deviations: list[tuple[int, float, float, float]] = field(default_factory=list)
    bytes_per_parameter: float = 0.0
    resent_share: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    machine: dict[str, Any] = field(default_factory=machine)

    @property
    def loss(self) -> float:
        """Mean over the replicas."""
        return mean(self.losses)


@dataclass(slots=True)
class _Pending:
    """A round whose outer step is to come.

    Attributes:
        shared: the weights.
        slow: slow weights of that time, where gamma differs from beta.
    """

    shared: Shared
    slow: Shared | None
    groups: list[tuple[int, ...]]


class _Run:
    def __init__(self, world: World, arm: Arm, start_P: torch.Tensor | None) -> None:
        world = replace(world, spec=arm.spec(world.spec))
        self._world, self._arm = world, arm
        setting = world.setting
        self._count = 1 if arm.group == "gradients" else setting.replicas
        self._replicas = replicas_of(world, self._count)
        if start_P is not None:
            for theta_P in self._replicas.thetas:
                theta_P.copy_(start_P)
        self._phis = [theta_P.clone() for theta_P in self._replicas.thetas]
        self._deltas = [torch.zeros_like(phi_P) for phi_P in self._phis]
        self._inner_steps = arm.inner_steps(setting.inner_steps)
        self._exchange = exchange_of(arm.code)
        self._pending: _Pending | None = None
        self._judge = Judge(world)
        parameters = self._judge.model.layout.parameters
        self.result = Result(told(arm), asdict(setting), world.spec.seed, parameters)
        self._at_once_P = self._taken_over_at_once()
        self._sent_bytes, self._resent_blocks = 0.0, 0
        self._fragments = self._new_fragments() if arm.blocks_per_fragment else None
        self._feed = world.feed()
        self._done = 0

    def _taken_over_at_once(self) -> torch.Tensor | None:
        """1 where averages do not come late, 0 elsewhere; None where all come alike."""
        spans = self._arm.additions.waited_for(self._judge.model.layout)
        if not spans:
            return None
        at_once_P = torch.zeros_like(self._phis[0])
        for start, stop in spans:
            at_once_P[start:stop] = 1
        return at_once_P

    def _new_fragments(self) -> FragmentPairs:
        arm, world = self._arm, self._world
        return FragmentPairs(
            self._replicas.models,
            self._phis,
            self._deltas,
            blocks_per_fragment=arm.blocks_per_fragment,
            inner_steps=self._inner_steps,
            code=arm.code,
            factors=arm.factors,
            delay=arm.delay_steps(world.setting.inner_steps),
            run_id=f"quality-{world.spec.seed}",
        )

    def train(self, halfway: Halfway | None = None) -> None:
        """Train all steps and rounds, then take the last figures.

        Args:
            halfway: keeps the run at each point of the curve, and has it go on from there.
        """
        started_s = time.perf_counter()
        setting, inner_steps = self._world.setting, self._inner_steps
        steps = setting.steps
        if steps % inner_steps:
            raise ValueError(f"{steps} steps are no whole rounds of {inner_steps}")
        stand = None if halfway is None else halfway.load()
        if stand is not None and self._is_of_this_run(stand):
            self._go_on(stand)
        earlier_s, is_to_keep = self.result.seconds, False
        for done in range(self._done + 1, steps + 1):
            self._train_step(done, steps)
            is_to_keep |= done % setting.curve_every == 0
            if halfway is not None and is_to_keep and self._is_between_rounds and done < steps:
                self._done = done
                self.result.seconds = earlier_s + time.perf_counter() - started_s
                halfway.save(self._stand())
                is_to_keep = False
        self._finish()
        self.result.seconds = round(earlier_s + time.perf_counter() - started_s, 1)

    def _train_step(self, done: int, steps: int) -> None:
        """One inner step, the `done`th of the run, and what is due after it."""
        arm, setting, inner_steps = self._arm, self._world.setting, self._inner_steps
        delay = arm.delay_steps(setting.inner_steps)
        rate = self._rate(done - 1)
        batches = arm.additions.batches_at((done - 1) / steps)
        self._inner_step((done - 1) % inner_steps, rate, batches)
        if self._pending and done % inner_steps == delay:
            self._apply(done)
        if self._fragments:
            self._stream(self._fragments, done, is_last=done == steps)
        elif self._averages_weights and done % inner_steps == 0:
            self._close(done // inner_steps - 1)
            if not delay or done == steps:
                self._apply(done)
        if done % setting.curve_every == 0:
            self._note_curve(done)

    @property
    def _is_between_rounds(self) -> bool:
        """Whether all that the run holds is in its vectors."""
        remembers = self._fragments or not isinstance(self._exchange, CodecExchange)
        return not remembers and self._pending is None

    def _is_of_this_run(self, stand: Stand) -> bool:
        kept = stand.told["result"]
        return all(
            kept[part] == read_back(getattr(self.result, part)) for part in ("arm", "setting")
        )

    def _stand(self) -> Stand:
        tensors = dict(self._vectors())
        optimizers = self._replicas.optimizers
        for index, optimizer in enumerate(optimizers):
            tensors |= {f"moment.{index}.{name}": m for name, m in optimizer.moments().items()}
        told = {
            "done": self._done,
            "result": asdict(self.result),
            "sent_bytes": self._sent_bytes,
            "stands": self._feed.stands,
            "optimizer_steps": [optimizer.num_steps for optimizer in optimizers],
        }
        return Stand(told, tensors)

    def _vectors(self) -> Iterator[tuple[str, torch.Tensor]]:
        kinds = {"thetas": self._replicas.thetas, "phis": self._phis, "deltas": self._deltas}
        for kind, vectors in kinds.items():
            for index, vector_P in enumerate(vectors):
                yield f"{kind}.{index}", vector_P

    def _go_on(self, stand: Stand) -> None:
        told, tensors = stand.told, stand.tensors
        for name, vector_P in self._vectors():
            vector_P.copy_(tensors[name])
        for index, optimizer in enumerate(self._replicas.optimizers):

            def fill(name: str, moment: torch.Tensor, prefix: str = f"moment.{index}.") -> None:
                moment.copy_(tensors[prefix + name])

            optimizer.take_over(told["optimizer_steps"][index], fill)
        self.result = Result(**told["result"])
        self._done, self._sent_bytes = told["done"], told["sent_bytes"]
        self._feed.stands.update({name: tuple(at) for name, at in told["stands"].items()})

    def _stream(self, fragments: FragmentPairs, step: int, *, is_last: bool) -> None:
        """Send and take in fragments; after the last step, what was trained since goes out too."""
        if is_last:
            fragments.flush(step)
        else:
            fragments.after_step(step)
        if step % self._inner_steps == 0:
            fast = replica_deviation(list(self._replicas.thetas), self.result.parameters)
            slow = replica_deviation(self._phis, self.result.parameters)
            self.result.deviations.append((step, self._rate(step - 1), slow, fast))
        self._sent_bytes = fragments.sent_bytes

    @property
    def _averages_weights(self) -> bool:
        return self._arm.group in ("pairs", "all")

    def _rate(self, step: int) -> float:
        return self._arm.rate_of * self._world.rate(step)

    def _inner_step(self, place: int, rate: float, batches: int) -> None:
        if place % batches:
            return  # the step before was this one, too
        blocks_NBT = np.concatenate([self._feed.next_blocks() for _ in range(batches)], axis=1)
        rate *= math.sqrt(batches)
        self.result.tokens += blocks_NBT.shape[0] * self._world.spec.tokens_per_step * batches
        if self._arm.group == "gradients":
            # The mean of the replicas' gradients is the gradient of all their blocks.
            self._replicas.step(blocks_NBT.reshape(1, -1, blocks_NBT.shape[-1]), rate)
            self._sent_bytes += self._ring_bytes()
        else:
            self._replicas.step(blocks_NBT, rate)

    def _ring_bytes(self) -> float:
        """Bytes of all nodes for one all-reduce of fp32 gradients."""
        return 4.0 * self._phis[0].numel() * 2 * (self._world.setting.replicas - 1)

    def _close(self, round_: int) -> None:
        run_id = f"quality-{self._world.spec.seed}"
        partners = self._arm.partners
        groups = groups_of_round(self._arm.group, run_id, round_, self._count, partners)
        shared = self._exchange.share(self._replicas.thetas, groups)
        slow = (
            self._exchange.share(self._phis, groups)
            if self._arm.factors_at(self._round).pulls
            else None
        )
        self._pending = _Pending(shared, slow, groups)
        if self._at_once_P is not None:
            self._take_over_at_once(self._pending, self._at_once_P)

    def _take_over_at_once(self, pending: _Pending, at_once_P: torch.Tensor) -> None:
        """Have the fast weights take over the part of an outer step that is waited for."""
        phis = [phi_P.clone() for phi_P in self._phis]
        deltas = [delta_P.clone() for delta_P in self._deltas]
        for group in pending.groups:
            self._outer_steps(group, pending, phis, deltas)
        for theta_P, phi_P, decoded_P in zip(
            self._replicas.thetas, phis, pending.shared.decoded, strict=True
        ):
            theta_P.add_((phi_P - decoded_P).mul_(at_once_P))

    def _apply(self, step: int) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        shared = pending.shared
        for group in pending.groups:
            self._outer_steps(group, pending, self._phis, self._deltas)
        if self._arm.additions.averages_moments(self._round):
            self._sent_bytes += average_first_moments(self._replicas.optimizers, pending.groups)
        fast = replica_deviation(shared.decoded, self.result.parameters)
        slow = replica_deviation(self._phis, self.result.parameters)
        self.result.deviations.append((step, self._rate(step - 1), slow, fast))
        for theta_P, phi_P, decoded_P in zip(
            self._replicas.thetas, self._phis, shared.decoded, strict=True
        ):
            move_P = phi_P - decoded_P
            if self._at_once_P is not None:
                move_P.mul_(1 - self._at_once_P)  # the rest was taken over at the close
            theta_P.add_(move_P)
        self._sent_bytes += shared.sent_bytes + (pending.slow.sent_bytes if pending.slow else 0.0)
        self._resent_blocks += shared.resent_blocks

    def _outer_steps(
        self,
        group: tuple[int, ...],
        pending: _Pending,
        phis: Sequence[torch.Tensor],
        deltas: Sequence[torch.Tensor],
    ) -> None:
        shared, slow = pending.shared, pending.slow
        for own in group:
            members = [own, *(member for member in group if member != own)]
            codes = [shared.codes[member] for member in members]
            phi_codes = [slow.codes[member] for member in members] if slow else []
            phi_P, delta_P = phis[own], deltas[own]
            if self._arm.additions.restarts(self._round):
                delta_P.zero_()
            factors = self._arm.factors_at(self._round)
            outer_step(phi_P, delta_P, codes, shared.codec, factors, phi_codes)

    @property
    def _round(self) -> int:
        """The round whose outer step is next."""
        return len(self.result.deviations)

    def _slow(self) -> list[torch.Tensor]:
        """The weights that are judged; the fast ones, where there are no slow ones."""
        return self._phis if self._averages_weights else list(self._replicas.thetas)

    def _note_curve(self, step: int) -> None:
        losses, averaged = self._judge.losses(self._slow(), self._world.setting.curve_blocks)
        self.result.curve.append((step, mean(losses), averaged))
        if self._arm.group == "nobody":
            apart = replica_deviation(self._slow(), self.result.parameters)
            self.result.deviations.append((step, self._rate(step - 1), apart, apart))

    def _finish(self) -> None:
        result, setting = self.result, self._world.setting
        losses, averaged = self._judge.losses(self._slow(), setting.final_blocks)
        result.losses, result.averaged_loss = losses, averaged
        values = self._phis[0].numel() * setting.replicas
        result.bytes_per_parameter = self._sent_bytes / values
        blocks = values / 128 * max(1, len(result.deviations))
        result.resent_share = self._resent_blocks / blocks

    def averaged(self) -> torch.Tensor:
        """The mean of all slow weights."""
        return torch.stack(self._slow()).mean(0)


def train_arm(
    world: World,
    arm: Arm,
    start_P: torch.Tensor | None = None,
    halfway: Halfway | None = None,
) -> tuple[Result, torch.Tensor]:
    """Run one arm. Returns what it found, and the mean of the slow weights [P].

    Args:
        start_P: weights that all replicas start from; else those of the seed.
        halfway: where the run is kept while it lasts.
    """
    run = _Run(world, arm, start_P)
    run.train(halfway)
    return run.result, run.averaged()
