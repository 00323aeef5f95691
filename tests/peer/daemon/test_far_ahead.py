"""One peer that is, or says it is, far ahead: nobody jumps there, or gives its weights up."""

import pytest
import trio
from existing import existing
from msgspec import structs
from streaming_worlds import OPTIONS, assert_equal, contributors, fragment_spec
from swarm_worlds import STEP_S, jumps, simulated, start, toy_spec
from test_admission import BEAT, greet

from peer.daemon import link as link_file
from peer.daemon import links
from peer.daemon import peer as peer_file
from peer.daemon.greeting import BEAT_S
from peer.observe.event_names import EventName
from protocol.limits import MAX_COUNT
from protocol.schedule.rounds import LOST_LAG_ROUNDS
from protocol.wire.content_messages import StateScalars
from simulation.machine import Machine
from simulation.swarm import identity_of, open_swarm
from simulation.trainer import SimulatedSpeed

pytestmark = pytest.mark.slow

SEED = 1
ROUNDS = LOST_LAG_ROUNDS + 10


async def lie(swarm, network, name: str, rounds: int) -> None:
    """Link with a peer as a member of its group, and claim the last round but one."""
    group = existing(swarm[name].facts.held).group.digest
    talk, _ = await greet(swarm, network, name, state="training", group=group)
    step = (rounds - 1) * 20
    claim = structs.replace(
        BEAT, round=rounds - 1, step=step, group=group, steps_per_s=10.0, fraction=0.5
    )
    while True:
        await talk.send(claim)
        await trio.sleep(BEAT_S)


@pytest.mark.parametrize("method", [pytest.param("diloco", marks=pytest.mark.long), "noloco"])
def test_one_beat_that_claims_the_last_round_moves_nobody(tmp_path, method):
    """Without the middle of two others both would jump there, or join again at the liar."""
    spec = fragment_spec(ROUNDS) if method == "diloco" else toy_spec(ROUNDS)

    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, spec, tmp_path, OPTIONS) as swarm:
            await start(swarm, *"ab")
            await swarm.until(lambda: swarm["a"].facts.round == 3)
            liar = identity_of(SEED, "liar").peer_id
            async with swarm.internet.open_network(liar) as network, trio.open_nursery() as them:
                for name in "ab":
                    them.start_soon(lie, swarm, network, name, ROUNDS)
                await swarm.until(lambda: swarm["a"].facts.round == 8)
                assert max(swarm[name].facts.round for name in "ab") <= 9
                them.cancel_scope.cancel()
            if method == "diloco":
                rounds = [e["round"] for e in swarm["b"].events(EventName.ROUND_OPENED)]
                assert set(rounds) >= set(range(3, 8))
            else:
                assert not any(3 <= round_ <= 9 for name in "ab" for round_ in jumps(swarm[name]))
            if method == "diloco":
                await swarm.finished()
                assert_equal(swarm["a"], swarm["b"])

    run()


FAST = Machine(SimulatedSpeed(step_s=STEP_S / 6))
MAJORITY = "abc"


@pytest.mark.long
@pytest.mark.parametrize("method", ["diloco", "noloco"])
def test_an_honest_fast_peer_that_was_cut_off_moves_nobody_when_it_is_back(tmp_path, method):
    """It has trained alone, and truly is where it says: one peer all the same."""
    rounds = 10 * LOST_LAG_ROUNDS
    spec = fragment_spec(rounds) if method == "diloco" else toy_spec(rounds)

    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, spec, tmp_path, OPTIONS) as swarm:
            await start(swarm, *MAJORITY, "d", machine_of={"d": FAST})
            others, fast = [swarm[name] for name in MAJORITY], swarm["d"]
            await swarm.until(lambda: swarm["a"].facts.round == 3)
            swarm.isolate("d")
            far = lambda: max(p.facts.round for p in others) + LOST_LAG_ROUNDS + 5
            await swarm.until(lambda: fast.facts.round >= far())
            seen = {p.name: len(p.events()) for p in others}
            before, ahead = max(p.facts.round for p in others), fast.facts.round
            swarm.internet.heal()
            linked = lambda: all(p.links.num_live == len(MAJORITY) for p in others)
            await swarm.until(linked)
            assert fast.facts.round >= far() - 5, "it is back, and is far ahead still"
            await swarm.until(lambda: min(p.facts.round for p in others) >= before + 10)
            for peer in others:
                assert peer.failure is None
                assert not peer.ended.is_set()
                since = peer.events()[seen[peer.name] :]
                names = {event["event"] for event in since}
                assert not names & {EventName.STATE_RECEIVED, EventName.DAEMON_STARTED}
                if method == "diloco":
                    assert max(contributors(peer, before)) >= len(MAJORITY)
                else:
                    averaged = [e for e in since if e["event"] == EventName.ROUND_AVERAGED]
                    assert len(averaged) >= 5
                    assert fast.peer_id not in {e["partner"] for e in averaged}
                    assert not any(round_ >= before for round_ in jumps(peer))
                opened = [e["round"] for e in since if e["event"] == EventName.ROUND_OPENED]
                assert opened == [*range(opened[0], opened[-1] + 1)]
                assert max(opened) < ahead

    run()


@pytest.mark.parametrize("epoch", [0, MAX_COUNT])
def test_a_place_in_the_data_where_nobody_can_be_ends_no_joiner(tmp_path, monkeypatch, epoch):
    """Of two, the other says of itself and of its state that it stands there."""
    lie = {"epoch": epoch, "position": MAX_COUNT}

    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, toy_spec(30), tmp_path, OPTIONS) as swarm:
            await start(swarm, "a")

            def beat_to(link, facts, *rest):
                beat = link_file.beat_to(link, facts, *rest)
                is_liar = facts.peer_id == swarm["a"].peer_id
                return structs.replace(beat, **lie) if is_liar else beat

            monkeypatch.setattr(links, "beat_to", beat_to)
            monkeypatch.setattr(
                peer_file, "StateScalars", lambda **fields: StateScalars(**fields | lie)
            )
            joiner = swarm.join("b")
            await swarm.until(lambda: joiner.ready.is_set() or joiner.ended.is_set())
            assert joiner.failure is None
            first = joiner.facts.round
            await swarm.until(lambda: joiner.facts.round >= first + 3 or joiner.ended.is_set())
            assert joiner.failure is None
            assert joiner.facts.epoch < 1000

    run()
