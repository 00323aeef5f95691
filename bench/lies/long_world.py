"""What the runs of a long study share: blocks to train, blocks to measure with, the checkpoint."""

from dataclasses import dataclass, field
from typing import Final

import torch

from bench.quality.pairing import peer_names
from bench.quality.world import World
from peer.rounds.shares import MEMBER_WEIGHT
from protocol.schedule.data_plan import DataPlan

from .arms import PEERS
from .stack import Stack

MEASURED_BLOCKS: Final = 16
"""A peer's own blocks, with which it finds whether something helps."""
CHECKPOINT_BATCH: Final = 32
CHECKPOINT_RATE: Final = 2e-3
CHECKPOINT_WARMUP: Final = 24


@dataclass(slots=True)
class Counts:
    """What honest peers of a run averaged and refused, and what helped.

    Attributes:
        met, refused, gains: of the honest and of liars.
        weight: of liars in all means together.
    """

    met: list[int] = field(default_factory=lambda: [0, 0])
    refused: list[int] = field(default_factory=lambda: [0, 0])
    gains: list[float] = field(default_factory=lambda: [0.0, 0.0])
    measured: list[int] = field(default_factory=lambda: [0, 0])
    weight: float = 0.0
    means: int = 0

    def note(self, weight: float, *, is_liar: bool) -> None:
        """A vector was judged: it counts so much."""
        self.met[is_liar] += 1
        self.refused[is_liar] += weight <= 0
        self.weight += weight * is_liar

    def refuse(self, *, is_liar: bool) -> None:
        """It was believed at first, and is not any more."""
        self.refused[is_liar] += 1

    def gain(self, gain: float, *, is_liar: bool) -> None:
        """What it was found to bring."""
        self.measured[is_liar] += 1
        self.gains[is_liar] += gain

    def told(self) -> dict[str, object]:
        """Shares and means, of the honest and of liars."""
        pairs = zip(self.refused, self.met, strict=True)
        gains = zip(self.gains, self.measured, strict=True)
        return {
            "refused": [round(refused / max(1, met), 4) for refused, met in pairs],
            "gains": [round(gain / max(1, number), 6) for gain, number in gains],
            "liars_weight": round(self.weight / max(1, self.means or sum(self.met)), 4),
        }


class LongWorld:
    """One seed's."""

    def __init__(self, world: World, device: torch.device) -> None:
        setting, self._corpus, self._device = world.setting, world.corpus, device
        self.world, self.seed, self.inner_steps = world, world.spec.seed, setting.inner_steps
        names = peer_names(setting.replicas)
        members = [(name, MEMBER_WEIGHT) for name in names]
        plan = DataPlan(self.seed, world.corpus.num_blocks)
        count = setting.steps * setting.batch_size
        taken = [plan.take(0, 0, count, name, members).blocks for name in names]
        blocks = [torch.from_numpy(world.corpus.blocks(each)).to(torch.uint8) for each in taken]
        shape = (len(names), setting.steps, setting.batch_size, -1)
        self._blocks_NSBT = torch.stack(blocks).view(shape).to(device)
        held_out = world.corpus.validation_blocks(setting.final_blocks)
        self.held_out_BT = torch.from_numpy(held_out).to(device)
        self._own: dict[tuple[int, int], torch.Tensor] = {}

    def blocks(self, step: int) -> torch.Tensor:
        """What each of the peers trains in a step, the first being 0: [N, B, T + 1]."""
        return self._blocks_NSBT[:, step].long()

    def own_blocks(self, moment: int, peer: int) -> torch.Tensor:
        """What a peer measures with at a moment: [B, T + 1], drawn anew."""
        if (moment, peer) not in self._own:
            if len(self._own) > PEERS:
                self._own.clear()
            generator = torch.Generator().manual_seed((self.seed * 100_003 + moment) * 64 + peer)
            count = self._corpus.num_blocks
            drawn = torch.randint(count, (MEASURED_BLOCKS,), generator=generator)
            blocks = torch.from_numpy(self._corpus.blocks(drawn.numpy()))
            self._own[moment, peer] = blocks.to(self._device)
        return self._own[moment, peer]

    def checkpoint(self) -> torch.Tensor:
        """Weights that one has trained, with as many sequences a step as all peers together."""
        world, device = self.world, self._device
        stack = Stack(world.spec, world.vocabulary, 1, device)
        generator = torch.Generator().manual_seed(self.seed)
        for step in range(world.setting.trained_steps):
            drawn = torch.randint(self._corpus.num_blocks, (CHECKPOINT_BATCH,), generator=generator)
            blocks = torch.from_numpy(self._corpus.blocks(drawn.numpy()))
            stack.step(blocks[None], CHECKPOINT_RATE * min(1.0, (step + 1) / CHECKPOINT_WARMUP))
        return stack.theta_RP[0].clone()
