"""The long study of lies does what the daemon does, and what it says of other defences."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bench.hostile_long import report_of
from bench.lies.arms import ARMS, PEERS
from bench.lies.fragments import FragmentSwarm
from bench.lies.long_arms import LongArm, arms_of
from bench.lies.long_fragments import LongFragments
from bench.lies.long_pairs import NAMES, LongPairs
from bench.lies.long_world import LongWorld
from bench.lies.pairs import GossipSwarm
from bench.lies.pieces import Pieces
from bench.lies.settings import LONG, SMOKE_HOSTILE
from bench.lies.stack import Stack, quantised
from peer.codec import get_codec
from peer.network.identity import Identity
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.step import Stepper

SPEC = SMOKE_HOSTILE.spec(0)
CPU = torch.device("cpu")


def test_a_stack_takes_the_trainers_steps():
    tokens = torch.randint(64, (2, 2, 17), generator=torch.Generator().manual_seed(1))
    stack, model = Stack(SPEC, 64, 2, CPU), FlatModel(initial_module(SPEC, 64), CPU)
    stepper = Stepper(model, inner_optimizer(model, SPEC.optimizer, "fp32"), "fp32", 2)
    for _ in range(3):
        stack.step(tokens, 1e-2)
        stepper.step(tokens[0].numpy(), 1e-2)
    torch.testing.assert_close(stack.theta_RP[0], model.theta_P, atol=1e-5, rtol=0)
    found = stack.losses(stack.theta_RP, tokens)
    assert found[0].item() == pytest.approx(model.loss(tokens[0]).item(), abs=1e-4)
    assert found[0] != found[1]


def test_what_codes_say_is_what_the_codec_says():
    values = torch.randn(384, generator=torch.Generator().manual_seed(1))
    pieces = Pieces(get_codec("int8"), [384])
    assert torch.equal(quantised(values), pieces.decoded(pieces.encoded(values)))


def world(rounds: int) -> LongWorld:
    setting = SimpleNamespace(steps=rounds * SPEC.sync.round_steps)
    inside = SimpleNamespace(setting=setting)
    of = SimpleNamespace(seed=0, inner_steps=SPEC.sync.round_steps, world=inside)
    return cast(LongWorld, of)


def trained(thetas: list[torch.Tensor], after_step: Callable[[int], None], rounds: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(1, rounds * SPEC.sync.round_steps + 1):
        for theta_P in thetas:
            theta_P.add_(torch.randn(theta_P.shape[-1:], generator=generator), alpha=1e-3)
        after_step(step)


def models() -> list[FlatModel]:
    made = [FlatModel(initial_module(SPEC, 64), CPU) for _ in range(PEERS)]
    for model in made[1:]:
        model.theta_P.copy_(made[0].theta_P)
    return made


def assert_near(found: torch.Tensor, wanted: torch.Tensor, start_P: torch.Tensor) -> None:
    """But for codes at the edge between two levels, where lengths are summed in another order."""
    apart = torch.linalg.vector_norm(found - wanted)
    assert float(apart) < 0.01 * float(torch.linalg.vector_norm(wanted - start_P))


ATTACKS = ["none-0-now", "collude-5-now", "scale-10-5-now", "inner-2-none"]


def arm_of(way: Any, name: str) -> tuple[LongArm, str]:
    """An arm of the long study, and the name of the same one of the daemon's."""
    attack, liars, defence = name.rsplit("-", 2)
    other = f"{way}-{attack}-{liars if liars != '0' else PEERS}"
    return LongArm(way, attack, int(liars), defence), other + ("-off" if defence == "none" else "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_pairs_are_the_daemons(name):
    arm, other = arm_of("pairs", name)
    made = models()
    swarm = GossipSwarm([model.theta_P for model in made], SPEC, ARMS[other], NAMES)
    trained([model.theta_P for model in made], swarm.after_step, 8)
    stack = Stack(SPEC, 64, PEERS, CPU)
    long = LongPairs(stack, [arm], world(8))
    trained(list(stack.theta_RP), long.after_step, 8)
    assert_near(long.judged(0), torch.stack(swarm.judged()), Stack(SPEC, 64, 1, CPU).theta_RP)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_fragments_are_the_daemons(name):
    arm, other = arm_of("fragments", name)
    made = models()
    identities = [Identity(bytes([n + 1]) * 32) for n in range(PEERS)]
    swarm = FragmentSwarm(made, SPEC, ARMS[other], identities)
    rounds = SPEC.training.total_steps // SPEC.sync.round_steps
    trained([model.theta_P for model in made], swarm.after_step, rounds)
    swarm.settle()
    stack = Stack(SPEC, 64, PEERS, CPU)
    long = LongFragments(stack, [arm], world(rounds))
    trained(list(stack.theta_RP), long.after_step, rounds)
    long.settle()
    assert_near(long.judged(0), swarm.phi_P, Stack(SPEC, 64, 1, CPU).theta_RP)


def test_the_share_that_is_lost_is_of_what_as_many_honest_peers_gain():
    def line(arm: LongArm, loss: float, seed: int) -> dict[str, Any]:
        fields = {key: getattr(arm, key) for key in ("way", "attack", "liars", "defence", "absent")}
        return {
            "name": f"{LONG.name}/{arm.name}-{seed}",
            **fields,
            "seed": seed,
            "start_loss": 2.5,
            "losses": [loss],
            "averaged_loss": loss,
            "refused": [0.0, 0.0],
            "liars_weight": 0.0,
        }

    arms = {arm.name: arm for arm in arms_of("pairs")}
    alone = arms["pairs-none-14-now"]
    lines = [line(alone, 2.0, 0), line(alone, 2.1, 1)]
    lines += [line(arms["pairs-collude-2-now"], loss, seed) for seed, loss in ((0, 2.05), (1, 2.1))]
    lines += [line(arms["pairs-collude-5-now"], 2.6, 0)]
    report = report_of(lines, LONG)
    few, many = report.goals
    assert (round(few.measured, 3), few.met) == (0.05, True)
    assert (round(many.measured, 3), many.met) == (0.1, False)
