"""Machines whose clocks are wrong by a minute take part like any other."""

import time
from pathlib import Path

import pytest
import trio
from raw_client import raw_client
from swarm import Peer, Swarm, all_averaging, ending

from peer.network.directory import open_directory
from peer.observe.event_names import EventName
from protocol.membership.group import Group
from protocol.membership.records import decode_record_at, place_of, record_key

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.e2e]

SKEW_S = 60.0
LEFT_S = 3.0
"""What may be left of the skew: beyond this the hash table refuses a node."""
START_S = 60.0
"""A peer's first event comes within this time of its start, on a busy machine too."""
FOUND_S = 60.0
RECORD_S = 120.0
"""Lifetime of a record in the directory."""

SITE = """
import time

_right = time.time
time.time = lambda: _right() + {skew_s}
"""
"""The machine's clock is wrong."""


def follows_the_swarms_time(peer: Peer, skew_s: float) -> None:
    started = peer.events()[0]
    began_off_s = started["time"] - peer.process_started_s
    assert began_off_s == pytest.approx(skew_s + START_S / 2, abs=START_S / 2)
    new = peer.wait_event(EventName.ROUND_CLOSED, after=len(peer.events()))
    assert new["time"] - time.time() == pytest.approx(0, abs=LEFT_S)


async def test_clocks_a_minute_fast_and_slow(
    swarm: Swarm, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (member, *_) = swarm.at_least(1)
    environments = [
        swarm.with_site(tmp_path / f"{skew_s}", SITE.format(skew_s=skew_s))
        for skew_s in (SKEW_S, -SKEW_S)
    ]
    with (
        ending(swarm.join(member, environment=environments[0])) as fast,
        ending(swarm.join(member, environment=environments[1])) as slow,
    ):
        all_averaging([fast, slow], 2)
        for peer, skew_s in ((fast, SKEW_S), (slow, -SKEW_S)):
            follows_the_swarms_time(peer, skew_s)
        await in_the_directory(member, [fast, slow], tmp_path_factory.mktemp("raw"))


async def in_the_directory(member: Peer, peers: list[Peer], folder: Path) -> None:
    """Their records are found through another peer, and expire at the right time."""
    group = Group(member.status()["run_id"]).digest
    async with raw_client(folder, member.address) as (network, _):
        directory = await open_directory(network)
        await directory.add_peers([member.address])
        for peer in peers:
            key, found = record_key(group, peer.peer_id), None
            with trio.fail_after(FOUND_S):
                while found is None:
                    found = (await directory.get(key)).get(peer.peer_id)
            record = decode_record_at(place_of(key), peer.peer_id, found)
            assert 0 < record.expires_s - time.time() < RECORD_S + LEFT_S
