"""Outer gradients of a real run: what replicas of DiLoCo would send, round by round.

All replicas begin a round with the slow weights phi, train H steps each on blocks of their own, and
would send Delta = theta - phi. The run itself averages in fp32 (group of all, the outer step of the
`diloco` arm), so every code is judged on the same vectors.
"""

from collections.abc import Iterator

import torch

from peer.averaging.gossip.outer_step import outer_step
from peer.codec import get_codec

from .arms import ARMS
from .world import World, replicas_of


def outer_gradients(world: World) -> Iterator[torch.Tensor]:
    """Delta of each round, fp32 [M, P] on the CPU."""
    setting = world.setting
    replicas = replicas_of(world, setting.replicas)
    feed, fp32 = world.feed(), get_codec("fp32")
    phi_P = replicas.thetas[0].clone()
    momentum_P = torch.zeros_like(phi_P)
    for step in range(setting.steps):
        replicas.step(feed.next_blocks(), world.rate(step))
        if (step + 1) % setting.inner_steps:
            continue
        yield torch.stack([theta_P - phi_P for theta_P in replicas.thetas]).cpu()
        codes = [theta_P.detach().clone().view(torch.uint8) for theta_P in replicas.thetas]
        outer_step(phi_P, momentum_P, codes, fp32, ARMS["diloco"].factors)
        for theta_P in replicas.thetas:
            theta_P.copy_(phi_P)
