"""Whoever fails, stalls or sends what it should not: the others' averages are exact and in time."""

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from fragment_tap import Send, Tap, brings, contributes, watch
from msgspec.structs import replace
from streaming_worlds import (
    DEADLINE_S,
    OPTIONS,
    PLAIN_MEAN,
    assert_equal,
    contributors,
    fragment_spec,
    has_returned,
    returned,
    returned_in,
)
from swarm_worlds import STEP_S, simulated, start

from peer.averaging.diloco.fragment_exchange import TICK_S, FragmentExchange
from peer.averaging.diloco.fragment_messages import signed_with
from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from protocol.diloco.collecting import MAX_COLLECT_S, MIN_COLLECT_S
from protocol.outcomes import RefusalReason
from protocol.schedule.deadline import ObservedDeadline
from protocol.wire.fields import Message
from protocol.wire.fragment_messages import Contribution, FragmentSettled
from protocol.wire.versions import FRAGMENT
from simulation.network import LinkModel
from simulation.swarm import SimulatedPeer, SwarmOptions, identity_of, open_swarm

MIN_RETURN_S, MAX_RETURN_S = 2 * MIN_COLLECT_S, 2 * MAX_COLLECT_S
"""How long a machine waits for its results."""

pytestmark = pytest.mark.slow

SEED, CYCLE, VICTIM = 1, 5, 1
"""What is harmed: this cycle of this fragment."""
IDS = {name: identity_of(SEED, name).peer_id for name in "abcde"}
STALL_COST_S = {"trainer": DEADLINE_S, "machine": DEADLINE_S + MIN_RETURN_S}
"""One deadline of an owner that waits for a contribution; with a machine also one of a peer that
waits for an owner. The two are of different fragments, so they may follow each other. Both together
are below the stalls, and as long for a long one as for a short one."""


def mean_of(tap: Tap, fragment: int, cycle: int, names: str) -> list[npt.NDArray[Any]]:
    """By chunk, the mean of what these peers sent."""
    sent = tap.sent(fragment, cycle)
    chunks = zip(*(tap.values(sent[name]) for name in names), strict=True)
    return [np.mean(each, axis=0) for each in chunks]


def deadline_after_trips_s(peer: SimulatedPeer) -> float:
    """How long it waits in the harmed cycle for owners, after the trips before, which all ended."""
    patience = ObservedDeadline(floor_s=MIN_RETURN_S, ceiling_s=MAX_RETURN_S)
    for end in returned(peer):
        if end["round"] < CYCLE:
            assert end["missing"] == 0
            patience.observe(end["seconds"])
    return patience.current_s


def assert_as_far_or_further(send: Send, earlier: Send) -> None:
    """The same state of every chunk, but where it has gone on to the next step already."""
    for chunk, (stamp, before) in enumerate(zip(send.stamps, earlier.stamps, strict=True)):
        assert stamp.steps >= before.steps
        if stamp.steps == before.steps:
            np.testing.assert_array_equal(send.phi[chunk], earlier.phi[chunk])


@simulated(SEED)
async def test_of_five_peers_one_fails_before_and_one_in_mid_send(tmp_path, monkeypatch):
    """What the other three end with is the mean of whoever had sent, for most values."""

    def link_of(source: str, destination: str) -> LinkModel:
        slow = source == IDS["e"] and destination != IDS["a"]
        return LinkModel(bandwidth_bytes_per_s=5e4 if slow else 12.5e6)

    options = SwarmOptions(padded_parameters=OPTIONS.padded_parameters, link_of=link_of)
    spec = fragment_spec(8, "fp32", fragments="whole", **PLAIN_MEAN)
    async with open_swarm(SEED, spec, tmp_path, options) as swarm, trio.open_nursery() as nursery:
        tap = watch(swarm, monkeypatch)
        sending = set()

        async def kill() -> None:
            await trio.sleep(0.01)  # `a` has all that `e` sends it by now, the others some of it
            swarm.kill("d")
            swarm.kill("e")

        def strike(sender: str, _receiver: str, message: Message) -> bool:
            if not contributes(message, 0, CYCLE):
                return False
            if sender not in sending:
                sending.add(sender)
                if len(sending) == len("abcde"):
                    nursery.start_soon(kill)
            return sender == "d"

        await start(swarm, *"abcde")
        tap.loses = strike
        await swarm.until(lambda: set("abc") <= tap.sent(0, CYCLE + 1).keys())
        before = tap.sent(0, CYCLE)["a"].phi
        # Of who sends the next one first: the others may have taken over of it by then.
        first, *others = sorted(tap.sent(0, CYCLE + 1).values(), key=lambda send: send.at_s)
        after = first.phi
        for other in others:
            assert_as_far_or_further(other, first)
        right = equal = 0
        for chunk, means in enumerate(
            zip(mean_of(tap, 0, CYCLE, "abc"), mean_of(tap, 0, CYCLE, "abce"), strict=True)
        ):
            stepped = [np.allclose(after[chunk], before[chunk] - x, atol=1e-5) for x in means]
            right += any(stepped) * after[chunk].size
            equal += np.array_equal(after[chunk], before[chunk]) * after[chunk].size
        assert right >= 0.5 * OPTIONS.padded_parameters
        assert right + equal == OPTIONS.padded_parameters
        for name in "abc":
            trip = returned_in(swarm[name], 0, CYCLE)
            assert trip["seconds"] <= deadline_after_trips_s(swarm[name]) + TICK_S
        await swarm.finished(*"abc")
        assert_equal(*(swarm[name] for name in "abc"))
        nursery.cancel_scope.cancel()


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "stall_s"),
    [
        ("trainer", 4.0),
        ("machine", 9.0),
        ("trainer", 6.0),
        ("machine", 4.0),
    ],
)
def test_a_peer_that_stalls_costs_one_deadline_and_is_not_waited_for_again(tmp_path, what, stall_s):
    """One deadline of each wait that it takes part in; not more of them for a longer stall.

    A trainer that stalls for more than a round is one that the others are ahead of: they train on,
    and each of their steps counts for less of the run (protocol/schedule/rounds.py, 3).
    """

    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, fragment_spec(20), tmp_path, OPTIONS) as swarm:
            await start(swarm, *"abc")
            await swarm.until(lambda: swarm["a"].facts.round == 6)
            before = {name: swarm[name].facts.step for name in "ab"}
            swarm.freeze("c") if what == "machine" else swarm["c"].gate.close()
            await trio.sleep(stall_s)
            for name in "ab":
                # Of steps that were not trained: a wait that has not ended counts too.
                cost_s = stall_s - STEP_S * (swarm[name].facts.step - before[name])
                print(what, stall_s, name, cost_s)
                assert cost_s <= STALL_COST_S[what] + 2 * STEP_S  # one is under way at either look
            swarm.thaw("c")
            await swarm.finished()
            assert_equal(*(swarm[name] for name in "abc"))
            assert contributors(swarm["a"], after=17).keys() == {3}

    run()


# --- contributions that must not be merged --------------------------------------------------------
async def send_forged(tap: Tap, like: Contribution, cycle: int, size: int) -> None:
    """`c` sends `a` hundreds, under the stamps of a contribution that it has made."""
    codes = np.full(size // 4, 100.0, np.float32).tobytes()
    swarm, outer = tap.swarm, tap.outer("c")
    chunks = [stamp.chunk for stamp in like.stamps]
    parts = outer.split_codes(like.fragment, chunks, memoryview(codes))
    message = signed_with(replace(like, cycle=cycle), parts, outer, identity_of(SEED, "c").sign)
    stream = await swarm["c"].network.open_stream(swarm["a"].peer_id, FRAGMENT)
    async with Conversation(stream) as talk:
        await talk.send(message, codes)
        await trio.sleep(1.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ahead", "reason"),
    [
        (0, RefusalReason.TWICE),
        (2, RefusalReason.BEHIND),
        (900, RefusalReason.BEHIND),
    ],
)
def test_a_contribution_that_comes_twice_or_jumps_is_refused_and_not_merged(
    tmp_path, monkeypatch, ahead, reason
):
    """The collection is still open, for `b` is far away from `a`."""

    def link_of(source: str, destination: str) -> LinkModel:
        return LinkModel(0.5 if (source, destination) == (IDS["b"], IDS["a"]) else 0.02)

    options = SwarmOptions(padded_parameters=OPTIONS.padded_parameters, link_of=link_of)

    @simulated(SEED)
    async def run():
        spec = fragment_spec(10, "fp32", **PLAIN_MEAN)
        async with (
            open_swarm(SEED, spec, tmp_path, options) as swarm,
            trio.open_nursery() as nursery,
        ):
            tap = watch(swarm, monkeypatch)
            sent: list[Contribution] = []
            before = Counter[RefusalReason]()

            def forge(sender: str, receiver: str, message: Message) -> bool:
                ours = (sender, receiver) == ("c", "a") and contributes(message, VICTIM, CYCLE)
                if ours and isinstance(message, Contribution) and message.weight and not sent:
                    sent.append(message)
                    before.update(swarm["a"].facts.refused)
                    size = 4 * sum(
                        tap.outer("c").chunk_values(VICTIM, each.chunk) for each in message.stamps
                    )
                    nursery.start_soon(send_forged, tap, message, CYCLE + ahead, size)
                return False

            await start(swarm, *"abc")
            tap.loses = forge
            await swarm.until(lambda: has_returned(swarm["a"], VICTIM, CYCLE))
            assert sent
            assert swarm["a"].facts.refused - before == {reason: 1}
            for old, new, mean in zip(
                tap.sent(VICTIM, CYCLE)["a"].phi,
                tap.phi("a", VICTIM),
                mean_of(tap, VICTIM, CYCLE, "abc"),
                strict=True,
            ):
                np.testing.assert_allclose(new, old - mean, atol=1e-5)
            await swarm.finished()
            assert_equal(*(swarm[name] for name in "abc"))
            ends = returned(swarm["a"], after=CYCLE)
            assert {(end["contributors"], end["missing"]) for end in ends} == {(3, 0)}

    run()


@pytest.mark.long
@simulated(SEED)
async def test_a_peer_may_jump_rounds_and_is_averaged_with_at_once(tmp_path):
    async with open_swarm(SEED, fragment_spec(16), tmp_path, OPTIONS) as swarm:
        await start(swarm, *"abc")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm["c"].gate.close()
        await swarm.until(lambda: swarm["a"].facts.round == 9)
        swarm["c"].gate.open()
        await swarm.finished()
        rounds = [event["round"] for event in swarm["c"].events(EventName.ROUND_OPENED)]
        assert max(np.diff(rounds)) > 2
        assert contributors(swarm["a"], after=11).keys() == {3}
        assert_equal(*(swarm[name] for name in "abc"))


# --- results that do not come ---------------------------------------------------------------------
@simulated(SEED)
async def test_a_result_that_one_side_lacks_leaves_its_chunks_as_they_were_until_healed(
    tmp_path, monkeypatch
):
    async with open_swarm(SEED, fragment_spec(8), tmp_path, OPTIONS) as swarm:
        tap = watch(swarm, monkeypatch)
        seen: dict[str, Any] = {}

        def lose(sender: str, receiver: str, message: Message) -> bool:
            settled = isinstance(message, FragmentSettled) and (message.fragment, message.cycle)
            if (sender, settled) == ("b", (VICTIM, CYCLE)):
                seen["phi"] = tap.phi("b", VICTIM)
                seen["others"] = [tap.stamps(name, other) for other in (0, 2, 3) for name in "ab"]
            return (sender, not seen) == ("a", True) and brings(message, VICTIM, CYCLE)

        await start(swarm, *"ab")
        tap.loses = lose
        await swarm.until(lambda: "phi" in seen)
        before, after = tap.sent(VICTIM, CYCLE)["b"].phi, seen["phi"]
        kept = [np.array_equal(*both) for both in zip(before, after, strict=True)]
        assert kept.count(True) == returned_in(swarm["b"], VICTIM, CYCLE)["missing"] > 0
        assert kept.count(False) > 0
        assert seen["others"][::2] == seen["others"][1::2]
        await swarm.until(lambda: len(tap.sent(VICTIM, CYCLE + 1)) == 2)
        healed = tap.sent(VICTIM, CYCLE + 1)
        assert healed["a"].stamps == healed["b"].stamps
        assert [stamp.steps for stamp in healed["b"].stamps] == [CYCLE + 1] * 3
        await swarm.finished()
        assert_equal(swarm["a"], swarm["b"])


@simulated(SEED)
async def test_an_owner_killed_between_send_and_return_leaves_its_chunks_as_they_were(
    tmp_path, monkeypatch
):
    async with open_swarm(SEED, fragment_spec(8), tmp_path, OPTIONS) as swarm:
        tap = watch(swarm, monkeypatch)

        def kill(sender: str, _receiver: str, message: Message) -> bool:
            if sender == "c" and brings(message, VICTIM, CYCLE):
                swarm.kill("c")
                return True
            return False

        await start(swarm, *"abc")
        tap.loses = kill
        for name in "ab":
            await swarm.until(partial(has_returned, swarm[name], VICTIM, CYCLE))
        for name in "ab":
            before = tap.sent(VICTIM, CYCLE)[name].phi
            both = zip(before, tap.phi(name, VICTIM), strict=True)
            assert sorted(np.array_equal(*each) for each in both) == [False, False, True]
            end = returned_in(swarm[name], VICTIM, CYCLE)
            assert (end["missing"], end["contributors"]) == (1, 3)
        await swarm.finished(*"ab")
        assert_equal(swarm["a"], swarm["b"])


def known_to(exchange: FragmentExchange) -> set[str]:
    """Every peer of which it keeps anything."""
    core, peers = exchange._core, exchange._core._peers
    settled = {peer_id for _, peer_id in peers._settled}
    passed = {peer_id for machine in core._machines for peer_id in machine._passed}
    kept = core._acquainted | peers._brought_nothing | peers.late
    return {*kept, *settled, *passed, *exchange._outbox._queues}


@pytest.mark.long
@simulated(SEED)
async def test_of_a_peer_that_is_gone_nothing_is_kept(tmp_path, monkeypatch):
    async with open_swarm(SEED, fragment_spec(20), tmp_path, OPTIONS) as swarm:
        tap = watch(swarm, monkeypatch)
        await start(swarm, *"abc")
        await swarm.until(lambda: swarm["a"].facts.round == CYCLE)
        swarm.freeze("c")
        # Which of the two owns chunks of the fragments that are sent meanwhile is the run id's.
        peers = [tap.exchanges[name]._core._peers for name in "ab"]
        await swarm.until(lambda: any(IDS["c"] in each.late for each in peers))
        swarm.kill("c")
        await swarm.until(lambda: has_returned(swarm["a"], VICTIM, 15))
        for name in "ab":
            assert known_to(tap.exchanges[name]) == {IDS["a"], IDS["b"]}
