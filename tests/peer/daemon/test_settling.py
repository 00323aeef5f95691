"""The last receipt is lost, or the partner falls silent: how an exchange ends then."""

from pathlib import Path

import pytest
import trio
from gossip_tap import Tap, install
from swarm_worlds import distance, outcomes, simulated, start, tally, toy_spec

from peer.averaging.gossip.exchange_session import GOSSIP_STALL_S
from peer.observe.event_names import EventName
from protocol.wire.messages import Received, Vector
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import DEFAULT_OPTIONS, SimulatedSwarm, SwarmOptions, open_swarm
from simulation.trainer import SimulatedSpeed

pytestmark = pytest.mark.slow
ROUNDS = 5
SLOW = Machine(SimulatedSpeed(step_s=4.0))
"""Rounds of 40 s: an exchange that stalls ends within the round."""
VECTORS = SwarmOptions(padded_parameters=96 * 1024, link=LinkModel(0.02, bandwidth_bytes_per_s=2e6))


async def two_peers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, on_message, options=DEFAULT_OPTIONS, speaker="b"
) -> SimulatedSwarm:
    """Run `a` and `b` to the end; `on_message` hears what the speaker says from round 1 on."""
    tap = Tap(lambda: swarm[speaker])
    install(tap, monkeypatch)
    async with open_swarm(1, toy_spec(ROUNDS, 10), folder, options) as swarm:
        tap.on_message = lambda stream, message: on_message(swarm, stream, message)
        await start(swarm, "a", "b", machine_of={"a": SLOW, "b": SLOW})
        await swarm.until(lambda: outcomes(swarm["a"]) == outcomes(swarm["b"]) == ["averaged"])
        tap.armed = True
        await swarm.finished()
    return swarm


def once(kind, harm):
    """Do harm at the first message of this kind."""
    struck: list[object] = []

    def on_message(swarm, stream, message):
        if isinstance(message, kind) and not struck:
            struck.append(message)
            return harm(swarm, stream)
        return None

    return on_message


@simulated()
async def test_a_receipt_lost_with_its_stream_costs_one_skip_which_heals(tmp_path, monkeypatch):
    lose = once(Received, lambda _swarm, stream: stream.lose("cut by the test"))
    swarm = await two_peers(tmp_path, monkeypatch, lose)
    a, b = swarm["a"], swarm["b"]
    assert tally(a, b) == {"averaged": 2 * (ROUNDS + 1) - 2, "unsettled": 2}
    assert distance(a, b) < 2e-3


@simulated()
async def test_a_receipt_that_is_late_settles_the_exchange(tmp_path, monkeypatch):
    def cut_for_a_while(swarm, _stream):
        swarm.isolate("b")

        async def heal():
            await trio.sleep(5.0)
            swarm.internet.heal()

        trio.lowlevel.spawn_system_task(heal)

    swarm = await two_peers(tmp_path, monkeypatch, once(Received, cut_for_a_while))
    assert tally(swarm["a"], swarm["b"]) == {"averaged": 2 * (ROUNDS + 1)}


@simulated()
async def test_who_gets_no_receipt_is_unsettled_and_the_difference_heals(tmp_path, monkeypatch):
    def lose_what_a_says(swarm, _stream):
        async def cut_and_heal():
            await trio.sleep(0.03)  # its vector is through by then, the receipt of b is not
            swarm.internet.link(swarm["a"].peer_id, swarm["b"].peer_id).cut()
            await swarm.until(lambda: len(outcomes(swarm["b"])) > 1)
            swarm.internet.heal()

        trio.lowlevel.spawn_system_task(cut_and_heal)
        return True  # the receipt of a is lost

    lose = once(Received, lose_what_a_says)
    swarm = await two_peers(tmp_path, monkeypatch, lose, speaker="a")
    a, b = swarm["a"], swarm["b"]
    assert outcomes(a)[1] == "averaged"
    assert outcomes(b)[1] == "unsettled"
    # The links were silent for as long, so one round more may pass before they are up again.
    assert outcomes(a)[3:] == outcomes(b)[3:] == ["averaged"] * (ROUNDS + 1 - 3)
    assert distance(a, b) < 2e-3
    assert b.timings[1].exchange_s < 45.0 + 1.0


# Before the vector is there, a stall is noticed. A receipt may be behind all that the network
# holds, so for want of it only the network's own silence ends the wait.
@pytest.mark.parametrize(
    ("kind", "bound_s", "rounds_lost"), [(Vector, GOSSIP_STALL_S, 1), (Received, 45.0, 3)]
)
def test_a_partner_that_stalls_costs_one_skip_within_the_bound(
    tmp_path, monkeypatch, kind, bound_s, rounds_lost
):
    @simulated()
    async def stall() -> None:
        def fall_silent(swarm, _stream):
            swarm.isolate("b")

            async def heal():
                await swarm.until(lambda: len(outcomes(swarm["a"])) >= 2)
                swarm.internet.heal()

            trio.lowlevel.spawn_system_task(heal)

        swarm = await two_peers(tmp_path, monkeypatch, once(kind, fall_silent), VECTORS)
        a, b = swarm["a"], swarm["b"]
        for peer in (a, b):
            reason = outcomes(peer, after=0)[0]
            assert reason in {"partner_stalled", "deadline", "unsettled", "partner_lost"}
            assert peer.timings[1].exchange_s <= bound_s + 1.0
            later = peer.events(EventName.ROUND_AVERAGED)
            last = list(range(1 + rounds_lost, ROUNDS + 1))
            assert [event["round"] for event in later][-len(last) :] == last
            assert all(timing.train_s < 60.0 for timing in peer.timings)
        assert distance(a, b) < 2e-3

    stall()
