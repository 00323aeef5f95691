"""What every directory does, simulated and real."""

import pytest
import trio.testing
from directory_worlds import SimulatedWorld, eventually, real_world

from protocol.membership.records import decode_record_at, place_of, record_keys

KEY, OTHER_KEY = record_keys("run")[:2]


@pytest.fixture(
    params=["simulated", pytest.param("real", marks=[pytest.mark.slow, pytest.mark.e2e])]
)
def kind(request):
    return request.param


@pytest.fixture
def clock(kind):
    return trio.testing.MockClock(autojump_threshold=0) if kind == "simulated" else None


@pytest.fixture
async def world(kind, clock, tmp_path_factory):
    if kind == "simulated":
        yield SimulatedWorld()
    else:
        async with real_world(tmp_path_factory) as real:
            yield real


async def test_what_one_stores_another_finds(clock, world):
    first, second = await world.peer(1), await world.peer(2)
    value = await first.announce(KEY)
    assert await second.directory.get(KEY) == {first.peer_id: value}
    assert await first.directory.get(KEY) == {first.peer_id: value}
    assert decode_record_at(place_of(KEY), first.peer_id, value).incarnation == 1


async def test_nothing_is_found_under_an_unused_key(clock, world):
    first, _ = await world.peer(1), await world.peer(2)
    await first.announce(KEY)
    assert await first.directory.get(OTHER_KEY) == {}


async def test_a_peer_alone_finds_itself(clock, world):
    alone = await world.peer(1)
    value = await alone.announce(KEY)
    assert await alone.directory.get(KEY) == {alone.peer_id: value}


async def test_several_writers_share_a_key(clock, world):
    peers = [await world.peer(n) for n in (1, 2, 3)]
    values = {peer.peer_id: await peer.announce(KEY) for peer in peers}
    for peer in peers:
        assert await peer.directory.get(KEY) == values


async def test_a_record_is_gone_after_its_expiry(clock, world):
    first, second = await world.peer(1), await world.peer(2)
    await first.announce(KEY, lifetime_s=1.0)
    assert await second.directory.get(KEY)

    async def is_gone():
        return not await second.directory.get(KEY)

    await eventually(is_gone)


async def test_a_newer_record_replaces_an_older_one_and_never_the_other_way(clock, world):
    first, second = await world.peer(1), await world.peer(2)
    await first.announce(KEY, lifetime_s=30.0, incarnation=1)
    newer = await first.announce(KEY, lifetime_s=60.0, incarnation=2)
    assert await second.directory.get(KEY) == {first.peer_id: newer}
    await first.announce(KEY, lifetime_s=20.0, incarnation=1)
    assert await second.directory.get(KEY) == {first.peer_id: newer}


async def test_forged_records_reach_nobody(clock, world):
    honest, liar = await world.peer(1), await world.peer(2)
    value = await honest.announce(KEY)
    expires_s = liar.directory.swarm_time_s() + 90
    own = liar.value(KEY, expires_s)
    for forged in (
        value,  # another's record as one's own
        own[:-1] + bytes([own[-1] ^ 1]),
        liar.value(OTHER_KEY, expires_s),
        b"",
        b"\xc1" * 10,
        own + bytes(200),
    ):
        await liar.directory.store(KEY, forged)
        assert await honest.directory.get(KEY) == {honest.peer_id: value}
        assert await liar.directory.get(KEY) == {honest.peer_id: value}


@pytest.mark.parametrize("skew_s", [60.0, -60.0])
async def test_a_clock_that_is_a_minute_off_works_once_corrected(clock, world, skew_s):
    right, wrong = await world.peer(1), await world.peer(2, clock_skew_s=skew_s)
    value = await right.announce(KEY, lifetime_s=30.0)
    assert wrong.directory.swarm_time_s() - right.directory.swarm_time_s() == pytest.approx(
        skew_s, abs=0.5
    )
    if skew_s > 0:
        assert await wrong.directory.get(KEY) == {}  # taken for expired
    wrong.directory.correct_clock(-skew_s)
    assert wrong.directory.swarm_time_s() == pytest.approx(right.directory.swarm_time_s(), abs=0.5)
    theirs = await wrong.announce(KEY, lifetime_s=30.0)
    both = {right.peer_id: value, wrong.peer_id: theirs}
    assert await right.directory.get(KEY) == both
    assert await wrong.directory.get(KEY) == both
