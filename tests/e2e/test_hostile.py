"""A stranger with an identity of its own throws bytes at a live peer: only its own streams end."""

import itertools
import random
import struct
from pathlib import Path

import pytest
import trio
from raw_client import ANSWER_S, raw_client, throw
from swarm import Peer, Swarm, all_averaging, ending

from peer.network.conversation import Conversation
from peer.network.handlers import MAX_INBOUND_STREAMS_PER_PEER
from peer.observe.event_names import EventName
from protocol.errors import LocoError, Refused
from protocol.field_types import MAX_COUNT, MAX_SECONDS
from protocol.frames import FRAME_VERSION, MAGIC, encode_frame
from protocol.limits import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
from protocol.messages import (
    Beat,
    GetChunks,
    GetState,
    Hello,
    Leaving,
    PeerEntry,
    PeerList,
    Propose,
    Received,
    SpecReply,
    Vector,
    encode_message,
)
from protocol.outcomes import RefusalReason
from protocol.versions import GOSSIP, HELLO, SPOKEN, STATE

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

DIGEST = "0" * 32
LIES_S = 60.0
NUM_BEATS = 3
"""Messages after which a peer has read what it was told."""
NUM_ROUNDS = 3
"""Rounds that a peer opens while it is lied to."""


def hello(protocols: tuple[str, ...] = SPOKEN, run_id: str | None = None) -> Hello:
    return Hello(
        software="raw 0.0.1",
        protocols=protocols,
        run_id=run_id,
        incarnation=1,
        addresses=(),
        swarm_time_s=1.0,
        state="training",
        round=1 << 40,
        layout_digest=None,
    )


def beat(sequence: int, round_: int, steps_per_s: float) -> Beat:
    return Beat(
        sequence=sequence,
        state="training",
        round=round_,
        fraction=0.5,
        steps_per_s=steps_per_s,
        epoch=MAX_COUNT,
        position=MAX_COUNT,
        step=0,
        tokens=0,
        sent_s=0.0,
        echo_s=None,
        echo_hold_s=0.0,
        swarm_time_s=0.0,
    )


def prefix(
    header_bytes: int, payload_bytes: int, magic: bytes = MAGIC, version: int = FRAME_VERSION
) -> bytes:
    return struct.pack("<3sBIQ", magic, version, header_bytes, payload_bytes)


def framed(message: object, payload: bytes = b"") -> bytes:
    return encode_frame(encode_message(message), len(payload)) + payload  # type: ignore[arg-type]


def missiles() -> dict[str, bytes]:
    """What is thrown at each protocol."""
    garbage = random.Random(0).randbytes(100_000)
    whole = framed(hello())
    return {
        "garbage": garbage,
        "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "version of the future": prefix(10, 0, version=255) + bytes(10),
        "garbage in a frame": prefix(64, 0) + garbage[:64],
        "deep nesting": prefix(MAX_HEADER_BYTES, 0) + b"\x91" * MAX_HEADER_BYTES,
        "unknown type": prefix(6, 0) + b"\x81\xa1t\xa2zz",
        "header too long": prefix(MAX_HEADER_BYTES + 1, 0) + bytes(MAX_HEADER_BYTES + 1),
        "payload too long": prefix(len(whole) - 16, MAX_PAYLOAD_BYTES) + whole[16:],
        "payload where none belongs": framed(Leaving()) + whole,
        "answers to no question": framed(SpecReply(bytes(32), bytes(64)), b"{}"),
        "a receipt for nothing": framed(Received(0, DIGEST)),
        "a vector of nothing": framed(Vector(0, 1, 1, "int8", 1, DIGEST), bytes(1000)),
        "state of another run": framed(GetState(DIGEST, 0)) + garbage,
        "chunks of nothing": framed(GetChunks(DIGEST * 2, 1 << 40, 100_000)) + garbage,
        "proposal of another run": framed(Propose(DIGEST, 1, DIGEST, "int8", 1, 1, 1)) + garbage,
        "hello, then garbage": whole + garbage,
        "hello, then a frame cut short": whole + prefix(100, 0) + bytes(10),
    }


def unharmed(peers: list[Peer], seen: dict[Peer, int], stranger: str) -> None:
    """Nobody lost a link, a trainer or a process, and all average on."""
    all_averaging(peers)
    for peer in peers:
        for event in peer.events()[seen[peer] :]:
            assert event["event"] not in (EventName.TRAINER_DIED, EventName.NETWORK_RESTARTED)
            if event["event"] == EventName.PEER_LOST:
                assert event["remote"] == stranger, peer.report()
        assert "Traceback" not in peer.stderr, peer.report()


async def test_garbage_on_every_protocol_harms_nobody(
    swarm: Swarm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    peers = swarm.at_least(2)
    seen = {peer: len(peer.events()) for peer in peers}
    folder = Path(tmp_path_factory.mktemp("raw"))
    async with raw_client(folder, peers[0].address) as (network, peer_id):
        for protocol in (HELLO, GOSSIP, STATE):
            async with trio.open_nursery() as nursery:
                for data in missiles().values():
                    nursery.start_soon(throw, network, peer_id, protocol, data)
                    nursery.start_soon(cut_short, network, peer_id, protocol, data)
        stranger = network.peer_id
    await trio.to_thread.run_sync(unharmed, peers, seen, stranger)


async def cut_short(network: object, peer_id: str, protocol: str, data: bytes) -> None:
    """Half of it, and away."""
    stream = await network.open_stream(peer_id, protocol)  # type: ignore[attr-defined]
    try:
        await stream.send_all(data[: len(data) // 2])
    except LocoError:
        pass
    finally:
        await stream.aclose()


async def test_too_many_silent_streams_of_a_stranger_shut_out_only_the_stranger(
    swarm: Swarm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    peers = swarm.at_least(2)
    seen = {peer: len(peer.events()) for peer in peers}
    folder = Path(tmp_path_factory.mktemp("raw"))
    async with raw_client(folder, peers[0].address) as (network, peer_id):
        streams = [
            await network.open_stream(peer_id, STATE)
            for _ in range(2 * MAX_INBOUND_STREAMS_PER_PEER)
        ]
        await trio.to_thread.run_sync(unharmed, peers, seen, network.peer_id)
        with ending(swarm.join(peers[1])) as joiner:
            await trio.to_thread.run_sync(joiner.wait_averaging)
        for stream in streams:
            await stream.aclose()


async def test_a_stranger_that_lies_about_its_round_and_speed_ends_nothing(
    swarm: Swarm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    peers = swarm.at_least(2)
    seen = {peer: len(peer.events()) for peer in peers}
    status = peers[0].status()
    folder = Path(tmp_path_factory.mktemp("raw"))
    async with raw_client(folder, peers[0].address) as (network, peer_id):
        for round_ in (MAX_COUNT, status["round"]):
            talk = Conversation(await network.open_stream(peer_id, HELLO))
            await talk.send(hello(run_id=status["run_id"]))
            await talk.receive(Hello, timeout_s=ANSWER_S)
            closed = len(peers[0].events(EventName.ROUND_CLOSED))
            with trio.fail_after(LIES_S):
                for sequence in itertools.count(1):
                    await talk.send(beat(sequence, round_, MAX_SECONDS))
                    await talk.receive(timeout_s=ANSWER_S)
                    if len(peers[0].events(EventName.ROUND_CLOSED)) > closed + NUM_ROUNDS:
                        break
            await talk.aclose()
        stranger = network.peer_id
    await trio.to_thread.run_sync(unharmed, peers, seen, stranger)
    for peer in peers:
        assert not peer.events(EventName.RUN_FINISHED)
        assert peer.status()["round"] < status["round"] + 1000


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
