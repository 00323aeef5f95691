"""One run of the study of streaming DiLoCo.

Judged are the slow weights, as they are after the last step with all that was on its way taken in.
A fragment with an offset was last sent before the last step, so they lack what was trained since.
Beside them stand the fast weights of one replica, and the mean of all replicas' fast weights.
"""

import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch

from bench.report import machine

from .arms import Arm
from .fragment_swarm import FragmentSwarm
from .run import train_arm
from .settings import Setting
from .streaming_arms import StreamingArm
from .world import Judge, World, replicas_of

CLOSING_ROUNDS: Final = 2
"""Closing rounds, measured by themselves: what one does, and whether a second adds to it."""


@dataclass(slots=True)
class StreamingResult:
    """The result of one run; losses in nats per token of the held-out text.

    Attributes:
        loss: of the slow weights; of the only ones where there are no slow ones, the mean over the
            replicas.
        fast_loss: of the first replica's fast weights.
        mean_fast_loss: of the mean of all replicas' fast weights.
        closed_losses: of the slow weights after one, two, ... further rounds of no inner steps.
        curve: step, loss of the slow weights, of the first replica's fast weights.
        fragment_parameters: values of each fragment, padding included.
        sent_megabytes: by one replica in the whole run.
        largest_send_megabytes: by one replica for one fragment.
    """

    arm: dict[str, Any]
    setting: dict[str, Any]
    seed: int
    parameters: int
    loss: float = 0.0
    fast_loss: float = 0.0
    mean_fast_loss: float = 0.0
    closed_losses: list[float] = field(default_factory=list)
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    fragment_parameters: list[int] = field(default_factory=list)
    sent_megabytes: float = 0.0
    largest_send_megabytes: float = 0.0
    seconds: float = 0.0
    machine: dict[str, Any] = field(default_factory=machine)


def setting_of(arm: StreamingArm, setting: Setting) -> Setting:
    """The setting with the arm's replicas, and as many tokens per step as before."""
    replicas = round(setting.replicas * arm.replicas_of)
    tokens = setting.replicas * setting.batch_size
    if tokens % replicas:
        raise ValueError(f"{tokens} sequences per step are not shared by {replicas} replicas")
    return replace(setting, replicas=replicas, batch_size=tokens // replicas)


def train_streaming_arm(world: World, arm: StreamingArm) -> StreamingResult:
    """Run one arm.

    Args:
        world: of the study's setting; the arm's own number of replicas is made here.
    """
    started_s = time.perf_counter()
    setting = setting_of(arm, world.setting)
    parameters = Judge(world).model.layout.parameters
    result = StreamingResult(asdict(arm), asdict(world.setting), world.spec.seed, parameters)
    if arm.group == "all":
        _train_with_fragments(replace(world, setting=setting), arm, result)
    else:
        _train_without(replace(world, setting=setting), arm, result)
    result.seconds = round(time.perf_counter() - started_s, 1)
    return result


def _train_with_fragments(world: World, arm: StreamingArm, result: StreamingResult) -> None:
    setting = world.setting
    replicas, feed, judge = replicas_of(world, setting.replicas), world.feed(), Judge(world)
    inner_steps = arm.inner_steps or setting.inner_steps
    swarm = FragmentSwarm(
        replicas.models, arm.diloco, inner_steps, arm.code, heavy_ball=arm.heavy_ball
    )
    for step in range(1, setting.steps + 1):
        replicas.step(feed.next_blocks(), world.rate(step - 1))
        swarm.after_step(step)
        if step % setting.curve_every == 0:
            slow = judge.loss(swarm.phi_P, setting.curve_blocks)
            fast = judge.loss(replicas.thetas[0], setting.curve_blocks)
            result.curve.append((step, slow, fast))
    swarm.settle()
    result.loss = judge.loss(swarm.phi_P, setting.final_blocks)
    result.fast_loss = judge.loss(replicas.thetas[0], setting.final_blocks)
    mean_P = torch.stack(list(replicas.thetas)).mean(0)
    result.mean_fast_loss = judge.loss(mean_P, setting.final_blocks)
    result.fragment_parameters = [fragment.size for fragment in swarm.fragments]
    result.sent_megabytes = swarm.sent_bytes / 1e6
    result.largest_send_megabytes = swarm.largest_send_bytes / 1e6
    for closing in range(CLOSING_ROUNDS):
        swarm.average_all(setting.steps // inner_steps + 1 + closing)
        result.closed_losses.append(judge.loss(swarm.phi_P, setting.final_blocks))


def _train_without(world: World, arm: StreamingArm, result: StreamingResult) -> None:
    """Averaged gradients, or nothing averaged."""
    found, _ = train_arm(
        world, Arm(arm.name, "gradients" if arm.group == "gradients" else "nobody")
    )
    result.loss, result.fast_loss = found.loss, found.losses[0]
    result.mean_fast_loss, result.curve = found.averaged_loss, found.curve
    result.sent_megabytes = found.bytes_per_parameter * result.parameters / 1e6
    result.largest_send_megabytes = result.sent_megabytes / world.setting.steps
