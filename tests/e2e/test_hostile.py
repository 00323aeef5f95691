"""A stranger with an identity of its own throws bytes at a live peer: only its own streams end."""

import itertools
from pathlib import Path

import pytest
import trio
from missiles import DIGEST, hello, missiles
from raw_client import ANSWER_S, cut_short, raw_client, throw
from swarm import Peer, Swarm, all_averaging, ending, nothing_broke

from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from protocol.errors import Refused
from protocol.limits import INBOUND_STREAMS, MAX_COUNT
from protocol.membership.group import Group
from protocol.outcomes import RefusalReason
from protocol.wire.fields import MAX_SECONDS
from protocol.wire.messages import Beat, Hello, PeerEntry, PeerList
from protocol.wire.versions import CONTENT, GOSSIP, HELLO

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

LIES_S = 60.0
NUM_BEATS = 3
"""Messages after which a peer has read what it was told."""
NUM_ROUNDS = 3
"""Rounds that a peer opens while it is lied to."""


def beat(sequence: int, group: str, step: int, steps_per_s: float) -> Beat:
    return Beat(
        sequence=sequence,
        state="training",
        round=step,
        fraction=0.5,
        steps_per_s=steps_per_s,
        epoch=MAX_COUNT,
        position=MAX_COUNT,
        step=step,
        tokens=0,
        sent_s=0.0,
        echo_s=None,
        echo_hold_s=0.0,
        swarm_time_s=0.0,
        group=group,
    )


def unharmed(peers: list[Peer], seen: dict[Peer, int], stranger: str) -> None:
    """Nobody lost a link, a trainer or a process, and all average on."""
    all_averaging(peers)
    nothing_broke(peers, seen, stranger)


async def test_garbage_on_every_protocol_harms_nobody(
    swarm: Swarm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    peers = swarm.at_least(2)
    seen = {peer: len(peer.events()) for peer in peers}
    folder = Path(tmp_path_factory.mktemp("raw"))
    async with raw_client(folder, peers[0].address) as (network, peer_id):
        for protocol in (HELLO, GOSSIP, CONTENT):
            async with trio.open_nursery() as nursery:
                for data in missiles().values():
                    nursery.start_soon(throw, network, peer_id, protocol, data)
                    nursery.start_soon(cut_short, network, peer_id, protocol, data)
        stranger = network.peer_id
    await trio.to_thread.run_sync(unharmed, peers, seen, stranger)


@pytest.mark.long
async def test_too_many_silent_streams_of_a_stranger_shut_out_only_the_stranger(
    swarm: Swarm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    peers = swarm.at_least(2)
    seen = {peer: len(peer.events()) for peer in peers}
    folder = Path(tmp_path_factory.mktemp("raw"))
    async with raw_client(folder, peers[0].address) as (network, peer_id):
        streams = [
            await network.open_stream(peer_id, CONTENT) for _ in range(2 * INBOUND_STREAMS.per_peer)
        ]
        await trio.to_thread.run_sync(unharmed, peers, seen, network.peer_id)
        with ending(swarm.join(peers[1])) as joiner:
            await trio.to_thread.run_sync(joiner.wait_averaging)
        for stream in streams:
            await stream.aclose()


@pytest.mark.long
async def test_a_stranger_that_lies_about_its_step_and_speed_ends_nothing(
    swarm: Swarm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    peers = swarm.at_least(2)
    seen = {peer: len(peer.events()) for peer in peers}
    status = peers[0].status()
    folder = Path(tmp_path_factory.mktemp("raw"))
    async with raw_client(folder, peers[0].address) as (network, peer_id):
        group = Group(status["run_id"]).digest
        for step in (MAX_COUNT, status["step"]):
            talk = Conversation(await network.open_stream(peer_id, HELLO))
            await talk.send(hello(run_id=status["run_id"]))
            await talk.receive(Hello, timeout_s=ANSWER_S)
            closed = len(peers[0].events(EventName.ROUND_CLOSED))
            with trio.fail_after(LIES_S):
                for sequence in itertools.count(1):
                    await talk.send(beat(sequence, group, step, MAX_SECONDS))
                    await talk.receive(timeout_s=ANSWER_S)
                    if len(peers[0].events(EventName.ROUND_CLOSED)) > closed + NUM_ROUNDS:
                        break
            await talk.aclose()
        stranger = network.peer_id
    await trio.to_thread.run_sync(unharmed, peers, seen, stranger)
    for peer in peers:
        assert not peer.events(EventName.RUN_FINISHED)
        assert peer.status()["round"] < status["round"] + 1000


@pytest.mark.long
async def test_what_a_stranger_says_of_others_drives_nobody_out(
    swarm: Swarm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    peers = swarm.at_least(2)
    seen = {peer: len(peer.events()) for peer in peers}
    known = {told["peer_id"] for told in peers[0].status()["peers"]}
    nowhere = ("/ip4/127.0.0.1/tcp/1",)
    lies = PeerList(tuple(PeerEntry(peer_id, MAX_COUNT, nowhere) for peer_id in known))
    folder = Path(tmp_path_factory.mktemp("raw"))
    async with raw_client(folder, peers[0].address) as (network, peer_id):
        talk = Conversation(await network.open_stream(peer_id, HELLO))
        await talk.send(hello())
        await talk.receive(Hello, timeout_s=ANSWER_S)
        await talk.send(lies)
        for _ in range(NUM_BEATS):
            await talk.receive(timeout_s=ANSWER_S)
        stranger = network.peer_id
        await trio.to_thread.run_sync(unharmed, peers, seen, stranger)
        await talk.aclose()
    assert known <= {told["peer_id"] for told in peers[0].status()["peers"]} | {stranger}


async def test_another_version_and_another_run_are_refused_with_a_sentence(
    swarm: Swarm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (member, *_) = swarm.at_least(1)
    folder = Path(tmp_path_factory.mktemp("raw"))
    future = ("hello/1", "gossip/2", "state/2")
    for said, reason, sentences in (
        (hello(future), RefusalReason.VERSION, ("gossip/2", "gossip/1", "install loco-peer")),
        (hello(run_id=DIGEST), RefusalReason.OTHER_RUN, (DIGEST, "a home of its own")),
    ):
        async with raw_client(folder, member.address) as (network, peer_id):
            talk = Conversation(await network.open_stream(peer_id, HELLO))
            await talk.send(said)
            with pytest.raises(Refused) as refusal:
                await talk.receive(Hello, timeout_s=ANSWER_S)
            assert refusal.value.reason == reason
            for sentence in sentences:
                assert sentence in refusal.value.sentence
            await talk.aclose()
    assert member.running
