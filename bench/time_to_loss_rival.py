"""One host of bench/time_to_loss.py that trains without loco-peer, over torch's gloo.

    alone      plain training; nothing is sent
    ddp        DistributedDataParallel: gradients are summed in fp32 while the backward pass runs
    ddp-bf16   the same, gradients travel in bf16
    diloco     DiLoCo that waits: H steps, a sum of fp32 deltas, an outer step of Nesterov

Model, inner optimizer and the order of the data are loco-peer's own, so what differs is what is
sent, and when. DDP takes `accumulate` batches a step. What is left to `auto` is chosen before the
clock begins, from a few steps and sums whose learning rate is 0: as many batches as take the
processor as long as their sum takes the line.
"""

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import trio
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from peer.rounds.shares import MEMBER_WEIGHT
from peer.training.corpus.blocks import Blocks, open_file
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.schedule import learning_rate
from protocol.run.run_spec import RunSpec
from protocol.schedule.data_plan import DataPlan

from .children import Answer, answer_parent
from .exchange_speed_gloo import INTERFACE, PORT
from .time_to_loss_arms import Task, most_batches, warmup_of

PROBES: Final = 5
SUMS: Final = 3
OUTER_RATE: Final = 0.7
OUTER_MOMENTUM: Final = 0.9
"""Both as in DiLoCo's paper (arXiv 2311.08105)."""


class Host:
    """One replica, and its line to the others."""

    def __init__(self, task: Task, rank: int) -> None:
        self._task, self._rank = task, rank
        spec = RunSpec.model_validate(task.spec)
        self._spec, self._section = spec, spec.optimizer
        self._corpus = open_file(
            Path(task.corpus), spec.model.context_length, spec.data.validation_blocks
        )
        module = initial_module(spec, task.vocabulary)
        self._model = FlatModel(module, torch.device("cpu"))
        self._optimizer = inner_optimizer(self._model, spec.optimizer, "fp32")
        self._forward: Any = module
        self._module = module
        self._blocks = self._own_blocks()
        self._accumulate = 1
        self._chosen: Answer = {}
        self._samples: list[Answer] = []
        self._steps = self._sums = 0
        self._began_s = self._summing_s = 0.0

    # --- before the clock begins ------------------------------------------------------------------
    async def prepare(self, question: Answer) -> Answer:
        """Join the others, and choose what is left open: one word of rank 0's for all."""
        if self._task.arm != "alone":
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{question['address']}:{PORT}",
                rank=self._rank,
                world_size=self._task.hosts,
            )
        if self._task.arm.startswith("ddp"):
            self._forward = DistributedDataParallel(self._module, broadcast_buffers=False)
            if self._task.arm == "ddp-bf16":
                self._forward.register_comm_hook(None, sum_in_bf16)
        step_s = statistics.median(self._seconds_of(self._compute) for _ in range(PROBES))
        sum_s = 0.0
        if self._task.arm != "alone":
            sum_s = statistics.median(self._seconds_of(self._sum_noise) for _ in range(SUMS))
        told = torch.tensor([step_s, sum_s])
        if self._task.arm != "alone":
            dist.broadcast(told, 0)
        self._choose(*told.tolist())
        self._train_step(0.0)  # buckets are made anew after the first
        self._optimizer.reset()
        self._steps = 0
        if self._task.arm != "alone":
            dist.barrier()
        return self._chosen

    def _choose(self, step_s: float, sum_s: float) -> None:
        task = self._task
        each_s = step_s
        if task.arm.startswith("ddp"):
            self._accumulate = task.accumulate or most_batches(step_s, sum_s)
            each_s = self._accumulate * step_s + sum_s
        elif task.arm == "diloco":
            each_s = step_s + sum_s / task.inner_steps
        warmup = warmup_of(task.seconds / each_s)
        self._section = self._section.model_copy(update={"warmup_steps": warmup})
        self._chosen = {
            "accumulate": self._accumulate,
            "warmup_steps": warmup,
            "step_s": step_s,
            "sum_s": sum_s,
        }

    def _seconds_of(self, what: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        what()
        return time.perf_counter() - began_s

    def _compute(self) -> None:
        self._backward(self._module, 1)
        self._optimizer.step(0.0)

    def _sum_noise(self) -> None:
        noise = torch.randn_like(self._model.theta_P)
        dist.all_reduce(noise.bfloat16() if self._task.arm == "ddp-bf16" else noise)

    # --- training ---------------------------------------------------------------------------------
    async def train(self, _: Answer) -> Answer:
        """Begin, and answer at once: whoever waits for another that has ended waits for ever."""
        self._began_s = time.perf_counter()
        threading.Thread(target=self._run, daemon=True).start()
        return {}

    async def report(self, _: Answer) -> Answer:
        """What was done so far."""
        return {
            "samples": self._samples,
            "steps": self._steps,
            "sums": self._sums,
            "summing_s": self._summing_s,
        }

    def _run(self) -> None:
        torch.set_num_threads(1)  # which is each thread's own
        steps = self._rounds() if self._task.arm == "diloco" else self._plain()
        sample = 0
        for _ in steps:
            passed_s = time.perf_counter() - self._began_s
            if passed_s >= (sample + 1) * self._task.sample_s:
                sample = int(passed_s // self._task.sample_s)
                self._keep(sample, passed_s)
            if passed_s >= self._task.seconds:
                return

    def _plain(self) -> Iterator[None]:
        while True:
            self._train_step(self._rate())
            yield

    def _rounds(self) -> Iterator[None]:
        slow_P = self._slow_P = self._model.theta_P.clone()
        momentum_P = torch.zeros_like(slow_P)
        while True:
            for _ in range(self._task.inner_steps):
                self._train_step(self._rate())
                yield
            delta_P = slow_P - self._model.theta_P
            self._summing_s += self._seconds_of(partial(dist.all_reduce, delta_P))
            outer_step(slow_P, momentum_P, delta_P / self._task.hosts)
            self._model.theta_P.copy_(slow_P)
            self._sums += 1

    def _train_step(self, rate: float) -> None:
        for left in reversed(range(self._accumulate)):
            if left and self._forward is not self._module:
                with self._forward.no_sync():
                    self._backward(self._forward, self._accumulate)
            else:
                self._backward(self._forward, self._accumulate)
        self._optimizer.step(rate)
        self._steps += 1

    def _backward(self, forward: Any, parts: int) -> None:
        tokens_BT = torch.from_numpy(next(self._blocks))
        logits = forward(input_ids=tokens_BT[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
        (loss / parts).backward()

    def _rate(self) -> float:
        return learning_rate(self._section, self._steps, self._spec.training.total_steps)

    def _own_blocks(self) -> Iterator[Blocks]:
        """The places of the data plan that are this host's."""
        plan = DataPlan(self._spec.seed, self._corpus.num_blocks)
        members = [(str(rank), MEMBER_WEIGHT) for rank in range(self._task.hosts)]
        epoch = position = 0
        while True:
            taken = plan.take(
                epoch, position, self._spec.training.batch_size, str(self._rank), members
            )
            epoch, position = taken.epoch, taken.position
            yield self._corpus.blocks(taken.blocks)

    def _keep(self, number: int, passed_s: float) -> None:
        """Write our weights down; DDP's are the same everywhere."""
        if self._task.arm.startswith("ddp") and self._rank:
            return
        kept, told = {"replica": self._model.theta_P}, []
        if self._task.arm == "diloco" and self._rank == 0:
            kept["outer"] = self._slow_P
        for kind, weights_P in kept.items():
            path = Path(self._task.folder) / f"{number:03d}-{kind}-{self._rank}.npy"
            np.save(path, weights_P.numpy())
            told.append({"s": passed_s, "number": number, "kind": kind, "path": str(path)})
        self._samples = [*self._samples, *told]  # another thread reads them


def outer_step(slow_P: torch.Tensor, momentum_P: torch.Tensor, delta_P: torch.Tensor) -> None:
    """SGD with Nesterov's momentum; how far hosts have moved is its gradient, turned round."""
    momentum_P.mul_(OUTER_MOMENTUM).add_(delta_P)
    slow_P.sub_(delta_P + OUTER_MOMENTUM * momentum_P, alpha=OUTER_RATE)


def sum_in_bf16(
    _: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """torch's own hook refuses gloo, which can sum bf16 all the same."""
    whole = bucket.buffer()
    half = whole.bfloat16().div_(dist.get_world_size())
    summed = dist.all_reduce(half, async_op=True).get_future()
    copied: torch.futures.Future[torch.Tensor] = summed.then(lambda _: whole.copy_(half))
    return copied


async def main(task_path: str, rank: int) -> None:
    """Be one host."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    host = Host(Task.read(Path(task_path)), rank)
    await answer_parent({"prepare": host.prepare, "train": host.train, "report": host.report})


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]))
    os._exit(0)  # a sum may wait for others that have ended
