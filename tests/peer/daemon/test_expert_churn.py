"""A swarm with experts whose peers come and go: each expert gets its share of the compute."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import trio
from expert_worlds import STEPS, run_of
from swarm_worlds import simulated

from peer.observe.event_names import EventName
from peer.process.rejoin import JoinAgain
from simulation.machine import Machine
from simulation.swarm import SimulatedPeer, SimulatedSwarm, open_swarm
from simulation.trainer import SimulatedSpeed

pytestmark = [pytest.mark.slow, pytest.mark.long]

PEERS: Final = 8
STEP_S: Final = 2.0
"""Of a machine of middle speed."""
LASTS_S: Final = 240.0
DEATHS: Final = 2
"""Peers that go without a word; as many come."""
PARTS: Final = {"general": 3, "a": 1, "b": 2}
WITHIN: Final = 0.05


def budgets() -> dict[str, int]:
    """Rounds that the peers can train in the time, by expert."""
    rounds = PEERS * LASTS_S / STEP_S / STEPS
    return {name: round(rounds * part / sum(PARTS.values())) for name, part in PARTS.items()}


class Crowd:
    """Peers that come, die, and go over to other experts, as daemons do by themselves.

    Attributes:
        lives: each start of each peer.
    """

    def __init__(self, swarm: SimulatedSwarm, draws: random.Random) -> None:
        self._swarm = swarm
        self._draws = draws
        self.lives: list[SimulatedPeer] = []
        self.died = 0

    def comes(self) -> SimulatedPeer:
        speed = SimulatedSpeed(STEP_S / self._draws.lognormvariate(0.0, 0.5))
        machine = Machine(speed=speed, checkpoint_every_s=60.0)
        name = f"p{len(self._swarm.peers)}"
        if self._swarm.peers:
            peer = self._swarm.join(name, machine, through=[self._draws.choice(self.alive()).name])
        else:
            peer = self._swarm.found(name, machine)
        self.lives.append(peer)
        return peer

    def alive(self) -> list[SimulatedPeer]:
        return [peer for peer in self._swarm.peers.values() if not peer.ended.is_set()]

    def go_over(self) -> None:
        for name, peer in list(self._swarm.peers.items()):
            if peer.ended.is_set() and isinstance(peer.failure, JoinAgain):
                self.lives.append(self._swarm.resume(name))

    def dies(self) -> None:
        ready = [peer for peer in self.alive() if peer.ready.is_set()]
        self._swarm.kill(self._draws.choice(ready).name)
        self.died += 1

    def is_trained(self) -> bool:
        there = [peer for peer in self.alive() if peer.ready.is_set()]
        return any(
            all(each.step == each.total_steps for each in peer.status().experts) for peer in there
        )


def tokens(lives: list[SimulatedPeer]) -> Iterator[tuple[str, int]]:
    for peer in lives:
        for event in peer.events(EventName.ROUND_CLOSED):
            yield peer.facts.expert or "", event["tokens"]


async def computed(seed: int, folder: Path) -> tuple[Counter[str], Crowd]:
    """Tokens that were trained of each expert."""
    draws = random.Random(seed)
    async with open_swarm(seed, run_of(budgets()), folder) as swarm:
        crowd = Crowd(swarm, draws)
        await swarm.until(crowd.comes().ready.is_set)
        for _ in range(PEERS - 1):
            crowd.comes()
            await trio.sleep(draws.uniform(1.0, 3.0))
        deaths = sorted(LASTS_S * draws.uniform(0.2, 0.8) for _ in range(DEATHS))
        while not crowd.is_trained():
            await trio.sleep(1.0)
            crowd.go_over()
            if deaths and trio.current_time() >= deaths[0]:
                deaths.pop(0)
                crowd.dies()
                crowd.comes()
        spent = Counter[str]()
        for expert, count in tokens(crowd.lives):
            spent[expert] += count
        return spent, crowd


@pytest.mark.parametrize("seed", [1])
def test_each_expert_gets_its_share_of_the_compute_whoever_comes_and_goes(
    tmp_path: Path, seed: int
) -> None:
    @simulated(seed, limit_s=3 * LASTS_S)
    async def run() -> None:
        spent, crowd = await computed(seed, tmp_path)
        assert crowd.died == DEATHS
        rounds, total = budgets(), sum(spent.values())
        got = {name: spent[name] / total for name in rounds}
        due = {name: count / sum(rounds.values()) for name, count in rounds.items()}
        assert got == pytest.approx(due, rel=WITHIN)

    run()
