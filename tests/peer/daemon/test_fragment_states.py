"""Crashed, spoilt, parted or joining: all come to one state, and nothing false gets into it."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import trio
from fragment_tap import Tap, healing_bytes, watch
from streaming_worlds import (
    OPTIONS,
    PLAIN_MEAN,
    assert_equal,
    contributors,
    fragment_spec,
    longest_round_s,
    returned,
    spoil,
)
from swarm_worlds import STEP_S, simulated, start

from peer.observe.event_names import EventName
from peer.training.messages import Ready, RoundClosed, TrainerProgress
from peer.training.schedule import learning_rate
from protocol.run.sections import OptimizerSection
from protocol.wire.fragment_messages import ChunkStateReply, Contribution, Result, Stamp
from simulation.swarm import open_swarm

pytestmark = pytest.mark.slow

SEED = 1
HEALS_AT_ONCE = 3
"""A seed for which a spoilt chunk is asked for, and comes, between two steps of the others."""
LEAVER_OWNS_NOTHING = 6
"""A seed for which a peer that leaves owns no chunk at that moment: what it owns is lost once."""
FRAGMENTS = range(4)
GARBAGE = 1e6
SPOILT_FRAGMENT, SPOILT_CHUNK, SPOILT_PLACE = 1, 0, 14100
"""The place is in the first layer, which begins where a seventh of the model ends."""
REASONABLE = 100.0
"""No weight of these toy models comes near it by itself."""


State = tuple[int, int]
"""Of a chunk: steps, and the weight in them."""


def first_cycle_of_all(tap: Tap, fragment: int, names: str, after_s: float) -> int:
    """The first cycle of a fragment that these peers have all sent since then."""
    sent = Counter(s.cycle for s in tap.sends if s.fragment == fragment and s.at_s > after_s)
    return min(cycle for cycle, count in sent.items() if count == len(names))


# --- who comes back -------------------------------------------------------------------------------
@pytest.mark.long
@simulated(SEED)
async def test_after_the_next_sync_a_crashed_replica_has_weights_and_momentum_of_the_others(
    tmp_path, monkeypatch
):
    """Bit for bit, at the next send of each fragment: a stamp is a digest of both."""
    async with open_swarm(SEED, fragment_spec(14), tmp_path, OPTIONS) as swarm:
        tap = watch(swarm, monkeypatch)
        await start(swarm, *"abc")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.kill("c")
        await swarm.until(lambda: swarm["a"].facts.round == 6)
        swarm.join("c", through=["b"])
        came_s = trio.current_time()
        await swarm.finished()
        for fragment in FRAGMENTS:
            cycle = first_cycle_of_all(tap, fragment, "abc", came_s)
            assert cycle <= 10
            following = tap.sent(fragment, cycle + 1)
            assert following["a"].stamps == following["b"].stamps == following["c"].stamps
            states = [tap.state(name, fragment) for name in "abc"]
            assert states[0] == states[1] == states[2]
            assert any(
                np.frombuffer(both, np.float32)[len(both) // 8 :].any() for both in states[2]
            )


@simulated(SEED)
async def test_after_a_comeback_the_learning_rate_rises_to_the_schedules_and_the_swarms(
    tmp_path, monkeypatch
):
    """It is at the swarm's place in the schedule, and warms up over its own first steps."""
    optimizer = OptimizerSection(warmup_steps=30, schedule="cosine")
    spec = fragment_spec(12).model_copy(update={"optimizer": optimizer})
    async with open_swarm(SEED, spec, tmp_path, OPTIONS) as swarm:
        tap = watch(swarm, monkeypatch)
        await start(swarm, *"ab")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.kill("b")
        await swarm.until(lambda: swarm["a"].facts.round == 6)
        swarm.join("b", through=["a"])
        came_s = trio.current_time()
        await swarm.finished()
        rates: dict[str, dict[float, float]] = {"a": {}, "b": {}}
        own_steps: Counter[str] = Counter()  # of this life's rounds that are over
        shares = []  # of the schedule's rate, as b comes back
        for name, at_s, event in tap.told:
            if isinstance(event, Ready):
                own_steps[name] = 0
            if isinstance(event, RoundClosed):
                own_steps[name] += event.steps
            if isinstance(event, TrainerProgress) and at_s > came_s:
                opened = swarm[name].events(EventName.ROUND_OPENED)
                (quota,) = {e["quota"] for e in opened if e["round"] == event.round}
                step = 20 * event.round + 20 / quota * (event.steps - 1)
                own = own_steps[name] + event.steps - 1
                rates[name][step] = event.learning_rate
                assert event.learning_rate == learning_rate(optimizer, step, 12 * 20, own)
                if name == "b":
                    shares.append(event.learning_rate / learning_rate(optimizer, step, 12 * 20))
        assert shares == sorted(shares)
        assert shares[0] < 0.5
        equal = rates["a"].items() & rates["b"].items()
        assert len(equal) >= 3
        assert len({rate for _, rate in equal}) == len(equal)


@pytest.mark.long
@pytest.mark.parametrize("steps", [0, 2, 45])
def test_a_third_replica_that_joins_after_some_steps_ends_with_the_same_fragments(
    tmp_path, monkeypatch, steps
):
    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, fragment_spec(10), tmp_path, OPTIONS) as swarm:
            tap = watch(swarm, monkeypatch)
            await start(swarm, *"ab")
            began_s = trio.current_time()
            await swarm.until(lambda: trio.current_time() >= began_s + 0.1 * steps)
            swarm.join("c", through=["b"])
            await swarm.finished()
            for fragment in FRAGMENTS:
                states = [tap.state(name, fragment) for name in "abc"]
                assert states[0] == states[1] == states[2]
            assert contributors(swarm["a"], after=6).keys() == {3}

    run()


# --- whose memory is spoilt -----------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_garbage_of_one_peer_reaches_nobody_and_it_alone_fetches_that_chunk(
    tmp_path, monkeypatch, victim
):
    """What the majority's bytes become is the mean of the majority; of the other chunks, of all."""

    @simulated(HEALS_AT_ONCE)
    async def run():
        spec = fragment_spec(10, "fp32", **PLAIN_MEAN)
        async with open_swarm(HEALS_AT_ONCE, spec, tmp_path, OPTIONS) as swarm:
            tap = watch(swarm, monkeypatch)
            await start(swarm, *"abc")
            await swarm.until(lambda: swarm["a"].facts.round == 5)
            await swarm.until(lambda: len(tap.sent(SPOILT_FRAGMENT, 5)) == 3)
            await trio.sleep(0.5)
            before = {name: swarm[name].facts.healed for name in "abc"}
            bytes_before = healing_bytes(tap)
            spoil(swarm[victim], GARBAGE, SPOILT_PLACE)
            await swarm.until(lambda: len(returned(swarm["a"], after=6)) > 0)
            healthy = "abc".replace(victim, "")
            sent = tap.sent(SPOILT_FRAGMENT, 6)
            mean = [
                np.mean(
                    [
                        tap.values(sent[name])[chunk]
                        for name in (healthy if chunk == SPOILT_CHUNK else "abc")
                    ],
                    axis=0,
                )
                for chunk in range(3)
            ]
            for chunk, phi in enumerate(sent[healthy[0]].phi):
                after = tap.phi(healthy[0], SPOILT_FRAGMENT)[chunk]
                np.testing.assert_allclose(after, phi - mean[chunk], atol=1e-5)
            await swarm.finished()
            assert_equal(*(swarm[name] for name in "abc"))
            assert np.abs(swarm["a"].slow_weights()).max() < REASONABLE
            healed = {name: swarm[name].facts.healed - before[name] for name in "abc"}
            assert healed == {name: int(name == victim) for name in "abc"}
            chunk_bytes = 8 * tap.outer(victim).chunk_values(SPOILT_FRAGMENT, SPOILT_CHUNK)
            assert healing_bytes(tap) - bytes_before == chunk_bytes

    run()


@pytest.mark.parametrize("victim", ["a", pytest.param("b", marks=pytest.mark.long)])
def test_of_two_peers_garbage_of_one_does_not_reach_the_other(tmp_path, victim):
    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, fragment_spec(10), tmp_path, OPTIONS) as swarm:
            await start(swarm, *"ab")
            await swarm.until(lambda: swarm["a"].facts.round == 5)
            spoil(swarm[victim], GARBAGE, SPOILT_PLACE)
            await swarm.finished()
            assert_equal(swarm["a"], swarm["b"])
            assert np.abs(swarm["a"].slow_weights()).max() < REASONABLE

    run()


@pytest.mark.long
@simulated(SEED)
async def test_while_a_peer_heals_it_contributes_nothing(tmp_path, monkeypatch):
    """Nothing but a word; of the other fragments it contributes as ever, and nobody waits for it.

    A chunk is 5 s on its way, longer than two rounds: what comes meanwhile goes on top of it.
    """
    async with open_swarm(SEED, fragment_spec(14), tmp_path, OPTIONS) as swarm:
        tap = watch(swarm, monkeypatch)
        tap.delay_s = lambda message: 5.0 if isinstance(message, ChunkStateReply) else 0.0
        await start(swarm, *"abc")
        await swarm.until(lambda: swarm["a"].facts.round == 5)
        spoil(swarm["c"], GARBAGE, SPOILT_PLACE)
        healed = swarm["c"].facts.healed
        await swarm.until(lambda: swarm["c"].facts.diverged > healed)
        began_s = trio.current_time()
        await swarm.until(lambda: swarm["c"].facts.healed > healed)
        ended_s = trio.current_time()
        await swarm.finished()
        said = [
            (post.message.fragment == SPOILT_FRAGMENT, post.message.weight, post.bytes_ > 0)
            for post in tap.messages(Contribution)
            if post.sender == "c" and began_s < post.at_s < ended_s - 0.5
        ]
        assert set(said) == {(True, 0, False), (False, 1, True)}
        assert_equal(*(swarm[name] for name in "abc"))
        assert np.abs(swarm["a"].slow_weights()).max() < REASONABLE
        assert contributors(swarm["a"], after=11).keys() == {3}
        assert max(longest_round_s(swarm[name]) for name in "abc") < 2 * 20 * STEP_S


@pytest.mark.long
@simulated(SEED)
async def test_only_the_spoilt_chunk_crosses_the_wire(tmp_path, monkeypatch):
    async with open_swarm(SEED, fragment_spec(9), tmp_path, OPTIONS) as swarm:
        tap = watch(swarm, monkeypatch)
        await start(swarm, *"abc")
        await swarm.until(lambda: swarm["a"].facts.round == 6)
        spoilt_s = trio.current_time()
        spoil(swarm["c"], GARBAGE, SPOILT_PLACE)
        await swarm.finished()
    states = [post for post in tap.messages(ChunkStateReply) if post.at_s > spoilt_s]
    assert {(post.receiver, post.message.fragment) for post in states} == {("c", SPOILT_FRAGMENT)}
    chunk_bytes = (
        8 * (2 * OPTIONS.padded_parameters // 7) // 3
    )  # phi and v of a third of two layers
    assert all(0.95 * chunk_bytes < post.bytes_ < 1.05 * chunk_bytes for post in states)
    # Twice where a step of the others has overtaken it: then the next one is asked.
    assert 1 <= len(states) <= 2


# --- who was parted -------------------------------------------------------------------------------
def history(tap: Tap, fragment: int, chunk: int, state: State = (0, 0)) -> list[tuple[int, int]]:
    """Cycle and weight of the results for a chunk that build on a state, one on the other."""
    on_base = defaultdict(list)
    for post in tap.messages(Result, fragment=fragment):
        of_chunk = post.message.chunk(chunk)
        if of_chunk is not None:
            step = (of_chunk.rank.weight, -post.message.cycle)
            on_base[of_chunk.steps, of_chunk.weight].append(step)
    steps = []
    while state in on_base:
        weight, cycle = max(on_base[state])
        steps.append((-cycle, weight))
        state = state[0] + 1, state[1] + weight
    return steps


def after(tap: Tap, fragment: int, chunk: int, state: State) -> State:
    """Steps and weight after all of these."""
    steps = history(tap, fragment, chunk, state)
    return state[0] + len(steps), state[1] + sum(weight for _, weight in steps)


@pytest.mark.long
@pytest.mark.parametrize(
    "halves",
    [
        ("abc", "de"),
        ("ab", "cde"),
        ("ab", "cd"),
    ],
)
def test_after_a_partition_the_history_that_is_ahead_wins_and_no_step_counts_twice(
    tmp_path, monkeypatch, halves
):
    """Ahead is who has taken more steps, then who has more weight in them; chunk by chunk."""

    @simulated(SEED)
    async def run():
        names = "".join(halves)
        async with open_swarm(SEED, fragment_spec(14), tmp_path, OPTIONS) as swarm:
            tap = watch(swarm, monkeypatch)
            await start(swarm, *names)
            await swarm.until(lambda: swarm["a"].facts.round == 4)
            ids = [[swarm[name].peer_id for name in half] for half in halves]
            swarm.internet.partition(*ids)
            await swarm.until(lambda: swarm["a"].facts.round == 9)
            parted = {(n, f): tap.stamps(n, f) for n in names for f in FRAGMENTS}
            assert parted["a", 1] != parted[names[-1], 1]
            swarm.internet.heal()
            await swarm.finished()
            assert_equal(*(swarm[name] for name in names))
            for fragment in FRAGMENTS:
                ledger = tap.ledger("a", fragment)
                for chunk, stamp in enumerate(ledger.stamps):
                    ends = set()
                    for half in halves:
                        then = parted[half[0], fragment][chunk]
                        ends.add(after(tap, fragment, chunk, (then.steps, then.weight)))
                    assert max(ends) == (stamp.steps, stamp.weight)
                    assert stamp.steps <= ledger.cycle(chunk) + 1
            for name, fragment in itertools.product(names, FRAGMENTS):
                assert goes_ahead(
                    [s.stamps for s in tap.sends if (s.peer, s.fragment) == (name, fragment)]
                )
            assert contributors(swarm["a"], after=12).keys() == {len(names)}

    run()


def goes_ahead(sent: Sequence[tuple[Stamp, ...]]) -> bool:
    """Whether no chunk was ever exchanged for one that was behind it."""
    return not any(
        old.is_ahead_of(new)
        for before, now in itertools.pairwise(sent)
        for old, new in zip(before, now, strict=True)
    )


# --- weights --------------------------------------------------------------------------------------
@pytest.mark.long
@simulated(LEAVER_OWNS_NOTHING)
async def test_every_peer_sees_the_number_of_contributors_change_once_around_a_join_and_a_leave(
    tmp_path, monkeypatch
):
    """And the weight that each chunk's stamp has gathered is the sum over its results."""
    async with open_swarm(LEAVER_OWNS_NOTHING, fragment_spec(16), tmp_path, OPTIONS) as swarm:
        tap = watch(swarm, monkeypatch)
        await start(swarm, *"ab")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.join("c", through=["a"])
        await swarm.until(lambda: swarm["a"].facts.round == 9)
        swarm["c"].peer.request_stop()
        await swarm.finished("a", "b")
        sizes = defaultdict(set)
        for fragment in FRAGMENTS:
            for chunk, stamp in enumerate(tap.stamps("b", fragment)):
                steps = history(tap, fragment, chunk)
                assert stamp.weight == sum(weight for _, weight in steps)
                for cycle, weight in steps:
                    sizes[cycle, fragment].add(weight)
        assert all(len(found) == 1 for found in sizes.values())
        assert changes([size for _, (size,) in sorted(sizes.items())]) == [1, 2, 3, 2]
        for name in "ab":
            ends = [end["contributors"] for end in returned(swarm[name], after=1)]
            assert changes(ends) == [2, 3, 2]
        assert returned(swarm["c"])[-1]["contributors"] == 3


def changes(values: Sequence[int]) -> list[int]:
    """Without what repeats the value before it."""
    return [value for value, _ in itertools.groupby(values)]
