"""What only the real directory can suffer: hostile nodes, silent ones, a p2pd that dies."""

import os
import signal
from contextlib import suppress
from functools import partial

import msgpack
import pytest
import trio
from directory_worlds import ADDRESS, eventually, real_world

from peer.network import directory as directory_module
from peer.network.conversation import Conversation
from peer.network.identity import Identity
from protocol.errors import LocoError, Refused, StreamLost
from protocol.limits import NEAREST_NODES, RECORDS
from protocol.membership.records import PeerRecord, encode_record, place_of, record_keys
from protocol.outcomes import RefusalReason
from protocol.wire.directory_messages import (
    FindRecords,
    FoundRecord,
    KeepRecord,
    NearNode,
    RecordKept,
    RecordsFound,
)
from protocol.wire.messages import Refusal
from protocol.wire.versions import DIRECTORY

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
KEY, OTHER_KEY = record_keys("run")[:2]
ANSWERED_S = 10.0
"""For a question that takes milliseconds where nobody hinders it, on a busy machine."""


@pytest.fixture
async def world(tmp_path_factory):
    async with real_world(tmp_path_factory) as real:
        yield real


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Others have time to answer, however busy the machine is."""
    for bound in ("ASK_TIMEOUT_S", "SEARCH_S"):
        monkeypatch.setattr(directory_module, bound, ANSWERED_S)


class Judge:
    """Refuses these peers, as a run does that not everybody may join."""

    def __init__(self, *refused):
        self._refused = refused

    def refusal_of(self, peer_id):
        refused = peer_id in self._refused
        return Refusal(RefusalReason.NOT_ADMITTED, "You are not admitted.") if refused else None

    conduct_refusal_of = refusal_of

    def wait_s(self, peer_id):
        return 0.0

    def blame(self, peer_id, fault): ...


async def asked(network, peer_id, question, *expected):
    stream = await network.open_stream(peer_id, DIRECTORY)
    async with Conversation(stream) as talk:
        await talk.send(question)
        answer, _ = await talk.receive(*expected)
    return answer


async def thrown(network, peer_id, data):
    """Send bytes as a question. Returns whether anything but the stream's end answered."""
    stream = await network.open_stream(peer_id, DIRECTORY)
    try:
        await stream.send_all(data)
        with trio.fail_after(ANSWERED_S):
            return bool(await stream.receive_some())
    except StreamLost:
        return False
    finally:
        await stream.aclose()


def colliding_tuples(num_bytes):
    """A dictionary of about so many bytes, whose keys are tuples of one hash.

    A decoder that makes tuples of them takes half a second for 76 kB, twelve for 0.4 MB.
    """
    items: list[object] = []
    size = 0
    while size < num_bytes:
        digits = range(16)  # hash(-1) == hash(-2)
        tuple_key = msgpack.packb([-1 - (len(items) >> digit & 1) for digit in digits])
        items.append([msgpack.ExtType(0x40, tuple_key), b"", 2e9])
        size += len(tuple_key) + 14
    return msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([9, 2e9, items])))


# --- strangers ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "num_bytes",
    [*(pytest.param(size, marks=pytest.mark.long) for size in (60_000, 76_000)), 400_000],
)
async def test_a_dictionary_of_colliding_keys_holds_nobody_up(world, num_bytes):
    honest, hostile = await world.peer(1), await world.peer(2)
    value = await honest.announce(KEY)
    poison = colliding_tuples(num_bytes)
    keep = {"t": "keep_record", "place": place_of(KEY), "value": hostile.value(KEY, 2e9)}
    headers = [
        poison,
        msgpack.packb(keep | {"value": poison}),
        msgpack.packb(keep | {"value": msgpack.ExtType(0x50, poison)}),
        msgpack.packb(keep | {"more": msgpack.ExtType(0x50, poison)}),
    ]
    frames = [b"loc\1" + len(h).to_bytes(4, "little") + bytes(8) + h for h in headers]
    for _ in range(3):
        assert not any([await thrown(hostile.network, honest.peer_id, f) for f in frames[:3]])
        await thrown(hostile.network, honest.peer_id, frames[3])
        with trio.fail_after(ANSWERED_S):
            found = await honest.directory.get(KEY)
    assert found[honest.peer_id] == value
    assert honest.directory.restarts == 0


@pytest.mark.long
async def test_drawn_questions_and_answers_end_neither_node_nor_daemon(tmp_path_factory):
    from bench.fuzzing.directories import besieged_directory  # it imports torch

    fired = await besieged_directory(tmp_path_factory.mktemp("f"), examples=15, pool=20, seed=1)
    assert fired.total() >= 60, "its answers come on top, as often as a busy machine asks"


@pytest.mark.long
async def test_a_planted_bug_of_the_directory_is_found(tmp_path_factory, monkeypatch):
    from bench.fuzzing.directories import besieged_directory
    from bench.fuzzing.swarms import FoundBug

    monkeypatch.setattr(directory_module.SharedTable, "_answer", None)
    with pytest.raises(FoundBug, match="Volley"):
        await besieged_directory(tmp_path_factory.mktemp("f"), examples=2, pool=5, seed=1)


async def test_a_node_keeps_valid_records_of_their_sender_alone(world):
    honest, hostile = await world.peer(1), await world.peer(2)
    value = await honest.announce(KEY)
    now_s = hostile.directory.swarm_time_s()
    own = hostile.value(KEY, now_s + 90)

    async def keeps(key, value):
        question = KeepRecord(place_of(key), value)
        return (await asked(hostile.network, honest.peer_id, question, RecordKept)).kept

    for wrong in (
        value,  # another's
        own[:-1] + bytes([own[-1] ^ 1]),
        hostile.value(OTHER_KEY, now_s + 90),
        hostile.value(KEY, now_s + 1e8),
        hostile.value(KEY, now_s - 1),
        b"",
        b"\xc1" * 100,
    ):
        assert not await keeps(KEY, wrong)
    with pytest.raises(LocoError):
        await asked(hostile.network, honest.peer_id, KeepRecord(KEY, own), RecordKept)
    assert await honest.directory.get(KEY) == {honest.peer_id: value}
    keys = record_keys("other run")
    kept = [await keeps(key, hostile.value(key, now_s + 90)) for key in keys]
    assert kept.count(True) == RECORDS.per_peer


async def serve_lies(network, answer):
    async def lie(stream):
        talk = Conversation(stream)
        question, _ = await talk.receive(FindRecords, KeepRecord)
        kept = isinstance(question, KeepRecord)
        await talk.send(RecordKept(True) if kept else answer)

    await network.serve(DIRECTORY, lie)


def named(count, *addresses):
    """Nodes that do not exist."""
    identities = (Identity((number + 900).to_bytes(32, "big")) for number in range(count))
    return tuple(NearNode(identity.peer_id, addresses) for identity in identities)


async def test_a_hostile_node_neither_hangs_nor_misleads_a_reader(world):
    reader = await world.peer(1)
    identity, network = await world.network(2)
    value = await reader.announce(KEY)
    now_s = reader.directory.swarm_time_s()

    def signed(expires_s, key=KEY):
        record = PeerRecord(identity.peer_id, 1, (ADDRESS,), expires_s)
        return encode_record(record, key, identity.sign)

    records = (
        FoundRecord(reader.peer_id, value[:-1] + b"x"),
        FoundRecord("x", b"y"),
        FoundRecord(identity.peer_id, signed(now_s - 1)),
        FoundRecord(identity.peer_id, signed(now_s + 1e6)),
        FoundRecord(identity.peer_id, signed(now_s + 60, OTHER_KEY)),
        FoundRecord(reader.peer_id, signed(now_s + 60)),
    )
    nobody = named(NEAREST_NODES - 1, "/ip4/127.0.0.1/tcp/9")
    us = NearNode(reader.peer_id, ("/ip4/127.0.0.1/tcp/9",))
    await serve_lies(network, RecordsFound(records, (us, *nobody)))
    await reader.directory.add_peers([f"{ADDRESS}/p2p/{identity.peer_id}"])
    with trio.fail_after(3 * ANSWERED_S):
        assert await reader.directory.get(KEY) == {reader.peer_id: value}
        await reader.announce(KEY, lifetime_s=70.0)
    assert reader.directory.restarts == 0


async def test_an_outsider_of_a_private_run_learns_no_member_and_is_told_no_record(world):
    first, second = await world.peer(1), await world.peer(2)
    outsider = await world.peer(3)
    told = []

    async def listen(stream):
        told.append(await stream.receive_some())

    outsider.network._handlers[DIRECTORY] = listen
    for member in (first, second):
        member.network.admit_by(Judge(outsider.peer_id))
        await member.network.connect(outsider.peer_id, outsider.network.addresses)
        await member.directory.add_peers(outsider.network.addresses)
    value = await first.announce(KEY)
    assert await second.directory.get(KEY) == {first.peer_id: value}
    for member in (first, second):
        for question in (
            FindRecords(place_of(KEY)),
            FindRecords(bytes(20)),
            KeepRecord(place_of(KEY), outsider.value(KEY, 2e9)),
        ):
            with pytest.raises((Refused, StreamLost)):  # a refusal may be lost with its stream
                await asked(outsider.network, member.peer_id, question, RecordsFound, RecordKept)
    assert await outsider.directory.get(KEY) == {}
    assert told == []


async def test_nodes_that_were_never_told_of_each_other_meet_by_the_addresses_in_answers(world):
    first = await world.peer(1)
    others = [await world.peer(number) for number in (2, 3, 4)]
    values = {other.peer_id: await other.announce(KEY, 600.0) for other in others}
    for peer in (*others, first):
        await eventually(partial(finds_again, peer, others, values))


async def finds_again(peer, others, values):
    """Whether a peer finds these records, all of which are stored anew, as daemons do.

    One question that a busy machine answers late lets a node rest, and a search without it.
    """
    for other in others:
        await other.directory.store(KEY, values[other.peer_id])
    return await peer.directory.get(KEY) == values


@pytest.mark.long
async def test_a_flood_of_finds_waits_its_turn_and_others_are_answered(world):
    honest, hostile, other = [await world.peer(number) for number in (1, 2, 3)]
    value = await honest.announce(KEY)
    answered = []

    async def flood():
        while True:
            with suppress(LocoError):
                await asked(hostile.network, honest.peer_id, FindRecords(bytes(20)), RecordsFound)
                answered.append(1)

    honest.network.admit_by(Judge())
    async with trio.open_nursery() as nursery:
        for _ in range(32):
            nursery.start_soon(flood)
        await trio.sleep(1)
        for _ in range(5):
            with trio.fail_after(ANSWERED_S):
                assert await other.directory.get(KEY) == {honest.peer_id: value}
        nursery.cancel_scope.cancel()
    assert honest.directory.restarts == 0


# --- around it ------------------------------------------------------------------------------------
async def test_a_bug_that_an_answer_finds_costs_the_table_alone(world, monkeypatch):
    first, second = await world.peer(1), await world.peer(2)
    value = await first.announce(KEY)
    with monkeypatch.context() as broken:
        broken.setattr(directory_module.SharedTable, "_add_newest", lambda *_: 1 / 0)
        await second.directory.get(KEY)
    assert second.directory.restarts == 1
    assert "ZeroDivisionError" in second.directory.last_failure
    assert await second.directory.get(KEY) == {first.peer_id: value}


async def test_the_node_follows_the_directorys_clock_and_not_the_machines(world):
    first = await world.peer(1, clock_skew_s=-7200.0)
    second = await world.peer(2, clock_skew_s=-7200.0)
    value = await first.announce(KEY, lifetime_s=30.0)  # two hours ago for time.time
    assert await second.directory.get(KEY) == {first.peer_id: value}


async def test_p2pd_killed_and_restarted(world):
    first, second = await world.peer(1), await world.peer(2)
    value = await first.announce(KEY)
    os.kill(second.network.statistics().p2pd_pid, signal.SIGKILL)

    async def found_again():
        return await second.directory.get(KEY) == {first.peer_id: value}

    await eventually(found_again)
    assert second.directory.restarts == 0
