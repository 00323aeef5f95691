"""What fragments cost on the links between peers: at most how much at once, and how little waiting.

Both promises are about links, and hold in virtual time, so both are exact.
"""

from collections import Counter
from typing import Any

import pytest
import trio
from fragment_tap import Tap, watch
from streaming_worlds import OPTIONS, assert_equal, fragment_spec, returned
from swarm_worlds import simulated, start, toy_spec

from peer.codec import get_codec
from peer.network.pacing import BandwidthLimits
from protocol.wire.fragment_messages import Contribution, Result
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import SimulatedSwarm, SwarmOptions, open_swarm
from simulation.trainer import SimulatedSpeed

pytestmark = pytest.mark.slow

SEED = 1
PARAMETERS = 7 * 32768
ALL_THERE = range(3, 7)
"""Cycles without a join."""


def event_bytes(
    tap: Tap, kind: type[Contribution | Result], end: str
) -> Counter[tuple[str, int, int]]:
    """Codes that each peer sent or received, by peer, fragment and cycle."""
    found: Counter[tuple[str, int, int]] = Counter()
    for post in tap.messages(kind):
        if post.message.cycle in ALL_THERE:
            found[getattr(post, end), post.message.fragment, post.message.cycle] += post.bytes_
    return found


@pytest.mark.long
@simulated(SEED)
async def test_one_send_puts_at_most_a_fragment_on_a_link_in_each_direction(tmp_path, monkeypatch):
    """A send is two trips: contributions to owners, then results to all.

    In each of them a peer sends, and receives, (N - 1) / N of the fragment's codes, and so less
    than 1.1 times those of the largest fragment. Both trips together are 2 (N - 1) / N in each
    direction; they follow each other, so that is no peak.
    """
    names = "abcd"
    share = (len(names) - 1) / len(names)
    options = SwarmOptions(padded_parameters=PARAMETERS)
    async with open_swarm(SEED, fragment_spec(6), tmp_path, options) as swarm:
        tap = watch(swarm, monkeypatch)
        await start(swarm, *names)
        await swarm.finished()
        fragments = tap.outer("a").fragments
        codec = get_codec("int8")
        codes = [codec.code_bytes(fragment.size) for fragment in fragments]
        for end in ("sender", "receiver"):
            trips = [event_bytes(tap, kind, end) for kind in (Contribution, Result)]
            for trip in trips:
                assert 0.5 * max(codes) < max(trip.values()) <= 1.1 * max(codes)
            both = trips[0] + trips[1]
            assert max(both.values()) <= 1.1 * 2 * share * max(codes)
            for fragment, size in enumerate(codes):
                event = [sum(both[name, fragment, cycle] for name in names) for cycle in ALL_THERE]
                assert event == [round(2 * share * size) * len(names)] * len(ALL_THERE)


# --- standing still -------------------------------------------------------------------------------
async def stalled_share(swarm: SimulatedSwarm, names: str, rounds: tuple[int, int]) -> float:
    """Of the time of these rounds, that in which a trainer stood still; of the one worst off."""
    first, last = rounds
    await swarm.until(lambda: all(swarm[name].facts.round >= first for name in names))
    began_s = trio.current_time()
    before_s = {name: swarm[name].facts.stalled_s for name in names}
    await swarm.until(lambda: all(swarm[name].facts.round >= last for name in names))
    took_s = trio.current_time() - began_s
    return max(swarm[name].facts.stalled_s - before_s[name] for name in names) / took_s


PLAIN = {"fragments": "whole", "overlap_steps": 0, "merge": 0.0}
STREAMING = {"overlap_steps": 5}
WARM_UP, LAST = 4, 14


def shaped(swarm: SimulatedSwarm, link: LinkModel) -> None:
    """From now on every link is like this one."""
    ids = [peer.peer_id for peer in swarm.peers.values()]
    for source in ids:
        for destination in ids:
            if source != destination:
                swarm.internet.link(source, destination).model = link


@pytest.mark.long
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_streaming_hardly_stands_still_on_links_on_which_plain_diloco_does(tmp_path, names):
    """On them a fragment and its average come and go within tau steps, the whole model does not."""

    async def share(folder: str, diloco: dict[str, Any]) -> float:
        spec = fragment_spec(LAST + 2, **diloco)
        options = SwarmOptions(padded_parameters=PARAMETERS)
        async with open_swarm(SEED, spec, tmp_path / folder, options) as swarm:
            await start(swarm, *names)
            await swarm.until(lambda: swarm["a"].facts.round == 2)
            # Both trips of the whole model, each (N - 1) / N of it over as many links: 0.6 s.
            bytes_per_s = 2 * get_codec("int8").code_bytes(PARAMETERS) / len(names) / 0.6
            shaped(swarm, LinkModel(0.03, 0.005, bytes_per_s))
            return await stalled_share(swarm, names, (WARM_UP, LAST))

    @simulated(SEED)
    async def run():
        assert await share("plain", PLAIN) >= 0.1
        assert await share("streaming", STREAMING) < 0.01

    run()


@simulated(SEED)
@pytest.mark.long
async def test_links_that_become_slower_are_waited_for_again(tmp_path):
    """What took milliseconds takes 3 s, longer than any wait so far had been; the round takes 20 s.

    Whoever waits learns from what comes too late; so after some rounds all are averaged again.
    """
    machine = Machine(SimulatedSpeed(step_s=1.0))
    spec = fragment_spec(26, overlap_steps=5)
    async with open_swarm(SEED, spec, tmp_path, OPTIONS) as swarm:
        await start(swarm, *"ab", machine_of=dict.fromkeys("ab", machine))
        await swarm.until(lambda: swarm["a"].facts.round == 5)
        shaped(swarm, LinkModel(0.03, bandwidth_bytes_per_s=1e4))
        await swarm.finished()
        for name in "ab":
            learnt = returned(swarm[name], after=18)
            ends = [(e["contributors"], e["missing"]) for e in learnt]
            # Audits travel too, so one that comes just too late is left out now and then.
            assert ends.count((2, 0)) >= 0.95 * len(ends)
        assert_equal(swarm["a"], swarm["b"])


@simulated(SEED)
@pytest.mark.long
async def test_the_last_sends_come_all_at_once_and_are_given_their_time(tmp_path):
    """A line that carries one fragment in time, and not all of them."""
    thin = Machine(limits=BandwidthLimits(0.3, None))
    options = SwarmOptions(padded_parameters=12 * 16384)
    spec = toy_spec(6, 100, method="diloco", diloco={"blocks_per_fragment": 2, "overlap_steps": 20})
    async with open_swarm(SEED, spec, tmp_path, options) as swarm:
        await start(swarm, *"abc", machine_of={"c": thin})
        await swarm.finished()
        for name in "abc":
            ends = [(e["contributors"], e["missing"]) for e in returned(swarm[name], after=5)]
            assert ends == [(3, 0)] * 4
        assert_equal(*(swarm[name] for name in "abc"))
