"""Owners that lie about averages are caught by audits, blamed and banned; nobody else ever is."""

import numpy as np
import pytest
import torch
import trio
from streaming_worlds import OPTIONS, assert_equal, contributors, fragment_spec
from swarm_worlds import simulated, start

from peer.averaging.diloco.averages import ChunkAverages, FragmentAudits
from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.codec import codes_as_tensor
from peer.observe.event_names import EventName
from protocol.outcomes import AuditOutcome, RefusalReason
from simulation.network import LinkModel
from simulation.swarm import SimulatedPeer, SimulatedSwarm, SwarmOptions, open_swarm

pytestmark = pytest.mark.slow

SEED = 1
ROUNDS = 9
LIES_FROM = 4
"""The first cycle in which the liar lies: by then all usual lengths are known."""
NAMES = "abcde"
HONEST = NAMES[:-1]


class Liar:
    """The last peer signs the opposite of the averages that it owes, from a cycle on."""

    def __init__(self, swarm: SimulatedSwarm, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.told = 0
        self.opens = True
        self.is_caught = False
        average, answer = ChunkAverages._average_chunk, FragmentAudits.answer

        def lie(averages: ChunkAverages, order, chunk, out):
            average(averages, order, chunk, out)
            facts = swarm[name].facts
            if averages._own_id == facts.peer_id and facts.round >= LIES_FROM:
                values = codes_as_tensor(out).view(torch.float32)
                values.neg_()
                self.told += 1

        async def shut(audits: FragmentAudits, talk, asked):
            if audits._network.peer_id == swarm[name].peer_id and not self.opens:
                await talk.refuse(RefusalReason.UNAVAILABLE, "not now")
                return
            await answer(audits, talk, asked)

        monkeypatch.setattr(ChunkAverages, "_average_chunk", lie)
        monkeypatch.setattr(FragmentAudits, "answer", shut)


def convicted(peer: SimulatedPeer) -> list[str]:
    return [event["remote"] for event in peer.events(EventName.PEER_CONVICTED)]


def audits(swarm: SimulatedSwarm, names: str, outcome: AuditOutcome) -> int:
    return sum(swarm[name].facts.audits[outcome] for name in names)


def undone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks that are taken back, from now on."""
    seen, undo = [], OuterFragments.undo

    def noted(outer: OuterFragments, fragment: int, chunk: int) -> None:
        seen.append(chunk)
        undo(outer, fragment, chunk)

    monkeypatch.setattr(OuterFragments, "undo", noted)
    return seen


def test_an_owner_that_lies_is_banned_everywhere_and_its_lies_are_undone(tmp_path, monkeypatch):
    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, fragment_spec(ROUNDS, "fp32"), tmp_path, OPTIONS) as swarm:
            liar, taken_back = Liar(swarm, monkeypatch, "e"), undone(monkeypatch)
            await start(swarm, *NAMES)
            await swarm.until(lambda: all(convicted(swarm[name]) for name in HONEST))
            caught = max(swarm[name].facts.round for name in HONEST)
            await swarm.finished(*HONEST)
            assert liar.told
            assert taken_back
            for name in HONEST:
                assert convicted(swarm[name]) == [swarm["e"].peer_id]
                assert swarm[name].facts.convicted == 1
                assert contributors(swarm[name], after=caught + 2).keys() == {len(HONEST)}
            assert audits(swarm, HONEST, AuditOutcome.LIE) >= 1
            assert audits(swarm, HONEST, AuditOutcome.TRUE) > ROUNDS
            assert_equal(*(swarm[name] for name in HONEST))

    run()


@pytest.mark.long
def test_an_owner_that_lies_and_does_not_open_moves_nothing_and_is_not_banned(
    tmp_path, monkeypatch
):
    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, fragment_spec(ROUNDS, "fp32"), tmp_path, OPTIONS) as swarm:
            liar, taken_back = Liar(swarm, monkeypatch, "e"), undone(monkeypatch)
            liar.opens = False
            await start(swarm, *NAMES)
            await swarm.finished()
            assert liar.told
            assert not any(convicted(peer) for peer in swarm.peers.values())
            assert audits(swarm, HONEST, AuditOutcome.LIE) == 0
            doubts = audits(swarm, HONEST, AuditOutcome.UNOPENED)
            assert doubts >= len(HONEST)
            assert len(taken_back) >= len(HONEST)

    run()


@pytest.mark.long
def test_who_comes_later_is_told_of_the_lie(tmp_path, monkeypatch):
    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, fragment_spec(ROUNDS, "fp32"), tmp_path, OPTIONS) as swarm:
            Liar(swarm, monkeypatch, "e")
            await start(swarm, *NAMES)
            await swarm.until(lambda: all(convicted(swarm[name]) for name in HONEST))
            swarm.join("f", through=["a"])
            await swarm.finished(*HONEST, "f")
            assert convicted(swarm["f"]) == [swarm["e"].peer_id]

    run()


@pytest.mark.long
def test_averages_from_which_values_are_left_out_are_audited_too(tmp_path):
    names = "abcdef"

    @simulated(1)
    async def run():
        spec = fragment_spec(12, robust="trim")
        async with open_swarm(1, spec, tmp_path, OPTIONS) as swarm:
            await start(swarm, *names)
            await swarm.finished()
            assert_equal(*(swarm[name] for name in names))
            assert contributors(swarm["a"], after=6).keys() == {6}
            assert audits(swarm, names, AuditOutcome.TRUE) > 20
            assert audits(swarm, names, AuditOutcome.LIE) == 0

    run()


@pytest.mark.long
@pytest.mark.parametrize(("seed", "codec"), [(1, "int8"), (2, "int4")])
def test_nobody_is_convicted_where_all_are_honest_however_they_come_and_go(tmp_path, seed, codec):
    @simulated(seed)
    async def run():
        link = LinkModel(latency_s=0.05, bandwidth_bytes_per_s=2e6)
        options = SwarmOptions(padded_parameters=OPTIONS.padded_parameters, link=link)
        async with open_swarm(seed, fragment_spec(20, codec), tmp_path, options) as swarm:
            await start(swarm, *"abcd")
            rng = np.random.default_rng(seed)
            await swarm.until(lambda: swarm["a"].facts.round == 4)
            swarm.join("e", through=["a"])
            await trio.sleep(float(rng.uniform(0, 4)))
            swarm.kill("d")
            await swarm.until(lambda: swarm["a"].facts.round == 10)
            swarm.isolate("c")
            await trio.sleep(float(rng.uniform(2, 8)))
            swarm.internet.heal()
            swarm.join("f", through=["b"])
            await trio.sleep(float(rng.uniform(0, 4)))
            await swarm.finished("a", "b", "c", "e", "f")
            names = "abcef"
            assert not any(convicted(peer) for peer in swarm.peers.values())
            assert audits(swarm, names, AuditOutcome.LIE) == 0
            assert audits(swarm, names, AuditOutcome.TRUE) > 50
            assert not any(swarm[name].facts.faults for name in names)
            assert_equal(*(swarm[name] for name in names))

    run()
