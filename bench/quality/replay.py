"""Replicas trained by a program of pairings (pairings.py), one process, the project's outer step.

Each replica trains its rounds at its own nominal steps, whose learning rate the schedule gives. At
the close of a round its weights are coded (snapshot); a merge takes the outer step with the codes
of both sides and moves the fast weights as the trainer does: theta += phi' - decoded. So partners'
snapshots may be of different ages, and a replica may have trained any number of steps meanwhile, as
in the swarm that the program was written by.

At the run's last nominal step a replica stops. What was not merged by then is dropped, in all arms
alike, and at the end phi is the mean of all fast weights, as the final averaging makes it.
"""

import time
from collections import deque
from dataclasses import asdict, dataclass

import torch

from peer.averaging.gossip.outer_step import outer_step
from peer.codec import get_codec
from peer.rounds.shares import MEMBER_WEIGHT

from .arms import Arm
from .measures import mean, replica_deviation
from .pairings import Pairings, Part, TrainedRound
from .run import Result
from .runs import told
from .world import Judge, World, replicas_of


@dataclass(slots=True)
class _Snapshot:
    codes: torch.Tensor
    decoded_P: torch.Tensor


class _Replica:
    """Where one replica stands in its program: the next round to train, steps done of it."""

    def __init__(self, rounds: deque[TrainedRound]) -> None:
        self.rounds = rounds
        self.number = 0
        self.steps = 0
        self.begin_step = 0.0
        self.snapshots: dict[int, _Snapshot] = {}

    @property
    def nominal(self) -> float:
        """The nominal step at which its next own step begins."""
        current = self.rounds[0]
        part = self.steps / max(1, current.own_steps)
        return self.begin_step + (current.end_step - self.begin_step) * part

    def close(self, snapshot: _Snapshot) -> None:
        """Its round is trained."""
        self.snapshots[self.number] = snapshot
        self.snapshots.pop(self.number - 2, None)  # merged long since
        self.begin_step = self.rounds.popleft().end_step
        self.number, self.steps = self.number + 1, 0


class Replay:
    """One run by a program; `train` once, then look at `result` and `thetas`."""

    def __init__(self, world: World, arm: Arm, pairings: Pairings) -> None:
        count = len(pairings.rounds)
        self._world, self._arm, self._pairings = world, arm, pairings
        self._codec = get_codec(arm.code)
        self._weights = replicas_of(world, count)
        self._replicas = [_Replica(deque(rounds)) for rounds in pairings.rounds]
        self._phis = [theta_P.clone() for theta_P in self._weights.thetas]
        self._deltas = [torch.zeros_like(phi_P) for phi_P in self._phis]
        self._feed = world.feed([MEMBER_WEIGHT] * count)
        self._judge = Judge(world)
        parameters = self._judge.model.layout.parameters
        self.result = Result(told(arm), asdict(world.setting), world.spec.seed, parameters)

    @property
    def thetas(self) -> list[torch.Tensor]:
        """The fast weights of each replica, fp32 [P]."""
        return [theta_P.detach() for theta_P in self._weights.thetas]

    def train(self) -> None:
        """Train and merge in the program's order, then judge."""
        started_s = time.perf_counter()
        total = self._world.setting.steps
        for merge in self._pairings.merges:
            reached = [self._reach(part) for part in merge]
            if all(reached):
                self._merge(merge)
        for peer, replica in enumerate(self._replicas):
            while replica.nominal < total:
                self._step(peer)
        self._finish()
        self.result.seconds = time.perf_counter() - started_s

    def _reach(self, part: Part) -> bool:
        """Train to where this part is merged; whether the run is not over before."""
        replica, total = self._replicas[part.peer], self._world.setting.steps
        while (replica.number, replica.steps) < (part.round + 1, part.late_steps):
            if replica.nominal >= total:
                return False
            self._step(part.peer)
        return part.round in replica.snapshots

    def _step(self, peer: int) -> None:
        replica = self._replicas[peer]
        rate = self._world.rate(int(replica.nominal))
        self._weights.step(self._feed.next_blocks([peer]), rate, [peer])
        self.result.tokens += self._world.spec.tokens_per_step
        replica.steps += 1
        if replica.steps >= replica.rounds[0].own_steps:
            replica.close(self._snapshot(peer))

    def _snapshot(self, peer: int) -> _Snapshot:
        theta_P = self._weights.thetas[peer].detach()
        size = self._codec.code_bytes(theta_P.numel())
        codes = torch.empty(size, dtype=torch.uint8, device=theta_P.device)
        self._codec.encode(theta_P, codes)
        decoded_P = torch.empty_like(theta_P)
        self._codec.decode(codes, decoded_P)
        return _Snapshot(codes, decoded_P)

    def _merge(self, merge: tuple[Part, ...]) -> None:
        snapshots = [self._replicas[part.peer].snapshots[part.round] for part in merge]
        for own, part in enumerate(merge):
            ordered = [snapshots[own], *snapshots]
            del ordered[own + 1]
            codes = [each.codes for each in ordered]
            phi_P, delta_P = self._phis[part.peer], self._deltas[part.peer]
            outer_step(phi_P, delta_P, codes, self._codec, self._arm.factors)
            with torch.no_grad():
                self._weights.thetas[part.peer].add_(phi_P - snapshots[own].decoded_P)

    def _finish(self) -> None:
        thetas = self.thetas
        losses, averaged = self._judge.losses(thetas, self._world.setting.final_blocks)
        apart = replica_deviation(thetas, self.result.parameters)
        self.result.losses, self.result.averaged_loss = losses, averaged
        self.result.curve = [(self._world.setting.steps, mean(losses), averaged)]
        self.result.deviations = [(self._world.setting.steps, 0.0, apart, apart)]


def train_by(world: World, arm: Arm, pairings: Pairings) -> Result:
    """Run one arm by a program."""
    replay = Replay(world, arm, pairings)
    replay.train()
    return replay.result
