"""Who may link with us, whose clock is wrong, and what a run may be set to."""

import msgspec
import numpy as np
import pytest
import trio
from existing import existing
from swarm_worlds import (
    assert_trains_on,
    distance,
    outcomes,
    simulated,
    start,
    tally,
    toy_spec,
)

from peer.daemon.greeting import BEAT_S, DUPLICATE_PROBE_S
from peer.facts import PeerState
from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from protocol.errors import Refused
from protocol.membership.group import Group
from protocol.outcomes import RefusalReason
from protocol.run.amendments import AmendedSpec
from protocol.run.sections import PipelineSection
from protocol.wire.messages import Accept, AliveReply, AskAlive, Beat, Hello, Propose
from protocol.wire.versions import GOSSIP, HELLO, SPOKEN
from simulation.machine import Machine
from simulation.swarm import identity_of, open_swarm

GREETING = Hello(
    software="loco-peer test",
    protocols=SPOKEN,
    run_id=None,
    incarnation=1,
    addresses=(),
    swarm_time_s=1_700_000_000.0,
    state="connecting",
    round=0,
    layout_digest=None,
)

BEAT = Beat(
    sequence=1,
    state="training",
    round=0,
    fraction=0.0,
    steps_per_s=1.0,
    epoch=0,
    position=0,
    step=0,
    tokens=0,
    sent_s=0.0,
    echo_s=None,
    echo_hold_s=0.0,
    swarm_time_s=1_700_000_000.0,
)


async def greet(swarm, network, name="a", **changes) -> tuple[Conversation, Hello]:
    """Say hello to a peer by hand. Raises Refused."""
    peer = swarm[name]
    await network.connect(peer.peer_id, peer.network.addresses)
    talk = Conversation(await network.open_stream(peer.peer_id, HELLO))
    await talk.send(msgspec.structs.replace(GREETING, **changes))
    answer, _ = await talk.receive(Hello)
    return talk, answer


@simulated()
async def test_a_hello_that_cannot_be_ours_is_refused_with_its_reason(tmp_path):
    async with open_swarm(1, toy_spec(20), tmp_path) as swarm:
        await start(swarm, "a")
        stranger = identity_of(1, "stranger").peer_id
        async with swarm.internet.open_network(stranger) as network:
            with pytest.raises(Refused, match="run") as other_run:
                await greet(swarm, network, run_id="0" * 32)
            assert other_run.value.reason is RefusalReason.OTHER_RUN
            with pytest.raises(Refused, match="no version of content, gossip") as version:
                await greet(swarm, network, protocols=("hello/1", "gossip/9", "state/1"))
            assert version.value.reason is RefusalReason.VERSION
            _, _, told_here = existing(swarm["a"].facts.unlinked.turned_away)
            assert f"you ({GREETING.software})" in version.value.sentence
            assert f"the other peer ({GREETING.software})" in told_here
            talk, answer = await greet(swarm, network)
            assert answer.run_id == swarm["a"].facts.run_id
            assert answer.group == Group(existing(answer.run_id)).digest
            await talk.aclose()


@simulated()
async def test_a_run_with_stages_refuses_by_name_who_does_not_speak_of_them(tmp_path):
    without = tuple(each for each in SPOKEN if not each.startswith("stage/"))
    async with open_swarm(1, toy_spec(20), tmp_path) as swarm:
        await start(swarm, "a")
        facts, stranger = swarm["a"].facts, identity_of(1, "stranger").peer_id
        async with swarm.internet.open_network(stranger) as network:
            talk, _ = await greet(swarm, network, protocols=without)
            await talk.aclose()
            stages = toy_spec(20).model_copy(update={"pipeline": PipelineSection(stages=2)})
            facts.spec = AmendedSpec(stages, existing(facts.run_id), bytes(32))
            with pytest.raises(Refused, match="we share no version of stage:") as refused:
                await greet(swarm, network, protocols=without)
            assert refused.value.reason is RefusalReason.VERSION


async def answer_to_proposal(swarm, network, name) -> RefusalReason | None:
    """Ask a peer by hand to average with its own step: its refusal, None for a yes."""
    facts, peer = swarm[name].facts, swarm[name]
    await network.connect(peer.peer_id, peer.network.addresses)
    talk = Conversation(await network.open_stream(peer.peer_id, GOSSIP))
    proposal = Propose(
        facts.group, facts.round, facts.step, False, facts.layout_digest, "int8", 1, 1, 1
    )
    await talk.send(proposal)
    try:
        await talk.receive(Accept)
    except Refused as refused:
        return refused.reason
    finally:
        await talk.aclose()
    return None


@simulated()
async def test_who_does_not_train_takes_no_proposal_and_says_so(tmp_path):
    async with open_swarm(1, toy_spec(4), tmp_path) as swarm:
        await start(swarm, "a")
        a, stranger = swarm["a"], identity_of(1, "stranger").peer_id
        async with swarm.internet.open_network(stranger) as network:
            await swarm.until(lambda: a.facts.fraction > 0)
            for state, reason in (
                (PeerState.DOWNLOADING, RefusalReason.NOT_TRAINING),
                (PeerState.CONNECTING, RefusalReason.NOT_TRAINING),
                (PeerState.LEAVING, RefusalReason.LEAVING),
            ):
                a.facts.state = state
                assert await answer_to_proposal(swarm, network, "a") is reason
            a.facts.state = PeerState.TRAINING
            while_training = await answer_to_proposal(swarm, network, "a")
            assert while_training not in (RefusalReason.NOT_TRAINING, RefusalReason.LEAVING)
            await swarm.finished()
            assert_trains_on(a)  # whoever asks, no round is closed for it
            at_the_end = await answer_to_proposal(swarm, network, "a")
            assert at_the_end is RefusalReason.NOT_TRAINING


@simulated()
async def test_a_living_identity_runs_once_and_a_silent_one_is_replaced(tmp_path):
    async with open_swarm(1, toy_spec(60), tmp_path) as swarm:
        await start(swarm, "a", "b")
        b = swarm["b"]
        with pytest.raises(Refused, match="alive elsewhere") as duplicate:
            await greet(swarm, b.network, incarnation=7)
        assert duplicate.value.reason is RefusalReason.DUPLICATE_IDENTITY
        silent = identity_of(1, "silent").peer_id
        async with swarm.internet.open_network(silent) as network:
            await greet(swarm, network, incarnation=1)  # and never beats
            began_s = trio.current_time()
            _, answer = await greet(swarm, network, incarnation=2)
            assert answer.run_id == swarm["a"].facts.run_id
            assert trio.current_time() - began_s <= DUPLICATE_PROBE_S + 0.5


async def beat(talk) -> None:
    """Keep a link alive by hand."""
    while True:
        await talk.send(BEAT)
        await trio.sleep(BEAT_S)


@simulated()
async def test_questions_of_earlier_versions_are_overlooked(tmp_path):
    async with open_swarm(1, toy_spec(60), tmp_path) as swarm:
        await start(swarm, "a")
        asker, other = (identity_of(1, name).peer_id for name in ("asker", "other"))
        async with swarm.internet.open_network(asker) as network, trio.open_nursery() as nursery:
            talk, _ = await greet(swarm, network)
            nursery.start_soon(beat, talk)
            await talk.send(AskAlive(other, 1))
            await talk.send(AliveReply(other, 1, alive=True))
            await trio.sleep(3 * BEAT_S)
            assert existing(swarm["a"].roster.get(asker)).alive
            assert not swarm["a"].events(EventName.PEER_LOST)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("skew_s", [60.0, -60.0])
def test_a_clock_a_minute_off_takes_part(tmp_path, skew_s):
    @simulated()
    async def take_part() -> None:
        async with open_swarm(1, toy_spec(8), tmp_path) as swarm:
            machines = {"b": Machine(clock_skew_s=skew_s)}
            await start(swarm, "a", "b", "c", machine_of=machines)
            apart_s = swarm["b"].directory.swarm_time_s() - swarm["a"].directory.swarm_time_s()
            assert abs(apart_s) <= abs(skew_s) / 2 + 1.0  # it meets the one peer that it has asked
            await swarm.finished()
            assert tally(swarm["b"])["averaged"] > 0
            assert swarm["b"].directory.refused == 0
            assert len(swarm["b"].view.alive(trio.current_time())) == 2

    take_part()


@pytest.mark.parametrize("lie_s", [3 * 3600.0, -3 * 3600.0, 5e11, -5e11])
def test_a_bootstrap_peers_clock_hours_off_is_not_believed(tmp_path, lie_s):
    @simulated()
    async def check() -> None:
        async with open_swarm(1, toy_spec(40), tmp_path) as swarm:
            await start(swarm, "a")
            greeter = swarm["a"].parts.greeter
            told_hello = greeter.hello
            true_s = swarm.directory.true_time_s

            def lie() -> Hello:
                return msgspec.structs.replace(told_hello(), swarm_time_s=true_s() + lie_s)

            greeter.hello = lie  # type: ignore[method-assign]
            joiner = swarm.join("b")
            await swarm.until(
                lambda: (
                    hasattr(joiner, "links") and bool(joiner.events(EventName.BOOTSTRAP_FAILING))
                )
            )
            told = joiner.events(EventName.BOOTSTRAP_FAILING)[0]
            assert told["step"] == "clock"
            assert f"{abs(lie_s) / 60:,.0f} minutes" in told["detail"]
            assert abs(joiner.directory.swarm_time_s() - true_s()) < 1.0
            greeter.hello = told_hello  # type: ignore[method-assign]
            await swarm.until(joiner.ready.is_set)
            assert joiner.failure is None

    check()


@pytest.mark.parametrize("skew_s", [3 * 3600.0, -3 * 3600.0])
def test_whose_clock_is_hours_off_is_told_to_set_it_and_then_takes_part(tmp_path, skew_s):

    @simulated()
    async def check() -> None:
        async with open_swarm(1, toy_spec(40), tmp_path) as swarm:
            await start(swarm, "a")
            joiner = swarm.join("b", Machine(clock_skew_s=skew_s))
            await swarm.until(
                lambda: (
                    hasattr(joiner, "links") and bool(joiner.events(EventName.BOOTSTRAP_FAILING))
                )
            )
            told = joiner.events(EventName.BOOTSTRAP_FAILING)[0]
            where = "behind" if skew_s > 0 else "ahead of"
            assert f"180 minutes {where} this machine's" in told["detail"]
            assert "timedatectl set-ntp true" in told["cure"]
            joiner.directory.clock_skew_s = 0.0
            await swarm.until(joiner.ready.is_set)
            assert joiner.failure is None

    check()


@simulated()
async def test_of_the_clocks_of_several_the_middle_counts_as_soon_as_they_are_met(tmp_path):
    async with open_swarm(1, toy_spec(40), tmp_path) as swarm:
        await start(swarm, "a", "c", "d")
        swarm["a"].directory.clock_skew_s = 240.0
        joiner = swarm.join("b")  # by a alone
        await swarm.until(joiner.ready.is_set)
        await swarm.until(lambda: joiner.links.num_live == 3)
        apart_s = joiner.directory.swarm_time_s() - swarm["c"].directory.swarm_time_s()
        assert abs(apart_s) < 1.0
        assert joiner.directory.refused == 0


# --- what a run may be set to ---------------------------------------------------------------------
@pytest.mark.parametrize(
    "sync",
    [
        {"overlap": False},
        {"gamma": 0.9},
        {"gamma": 0.9, "overlap": False, "codec": "bf16"},
        {"codec": "fp32"},
        {"codec": "bf16"},
        {"final_averaging": False},
        {"validate_every": 3},
    ],
    ids=str,
)
def test_every_way_of_averaging_runs_to_its_end(tmp_path, sync):
    @simulated()
    async def run() -> None:
        spec = toy_spec(6, **sync)
        async with open_swarm(1, spec, tmp_path) as swarm:
            await start(swarm, "a", "b")
            await swarm.finished()
            for name in "ab":
                peer = swarm[name]
                assert peer.facts.state is PeerState.FINISHED
                assert outcomes(peer) == ["averaged"] * (6 + spec.sync.final_averaging)
                assert existing(peer.facts.validation_loss) < 1.5
            assert distance(swarm["a"], swarm["b"]) < 0.3

    run()


@simulated()
async def test_plain_averaging_in_fp32_makes_both_the_same(tmp_path):
    spec = toy_spec(4, alpha=0.0, beta=1.0, codec="fp32", final_averaging=False)
    async with open_swarm(1, spec, tmp_path) as swarm:
        await start(swarm, "a", "b")
        await swarm.finished()
        assert set(tally(swarm["a"], swarm["b"])) == {"averaged"}
        one, other = swarm["a"].slow_weights(), swarm["b"].slow_weights()
        assert (np.abs(one - other) <= np.spacing(np.maximum(np.abs(one), np.abs(other)))).all()
        assert len(swarm["a"].events(EventName.ROUND_AVERAGED)) == 4
