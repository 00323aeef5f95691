"""What one reader of state can cost its source, and one source its reader."""

import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from service_worlds import GROUP, SIGNED, P, World, empty_vectors, world
from trio.testing import MockClock

from peer.content.fetching import (
    CONTENT_ANSWER_S,
    RATE_WINDOW_S,
    ContentClient,
    ExpectedState,
    StateDownload,
    slowest_rate,
    whole_state,
)
from peer.content.service import READINGS_OF_A_STATE
from peer.content.state_file import state_bytes
from peer.network.conversation import Conversation, StreamStalled
from protocol.content.manifest import digest_of
from protocol.errors import Refused, StreamLost
from protocol.limits import (
    MAX_READER_REQUESTS,
    MAX_TRANSFER_S,
    MIN_FETCH_BYTES_PER_S,
    READERS,
    SEND_STALL_S,
    STATE_CHUNK_BYTES,
)
from protocol.outcomes import RefusalReason
from protocol.run.needs import KEPT_STATES
from protocol.wire.content_messages import (
    GetParts,
    GetSpec,
    GetState,
    Part,
    SpecReply,
    StateScalars,
)
from protocol.wire.versions import CONTENT
from simulation.network import LinkModel

THIN = LinkModel(latency_s=0.02, bandwidth_bytes_per_s=4 * MIN_FETCH_BYTES_PER_S)


async def hold(made: World, network: Any) -> None:
    """Ask for the spec, and keep the stream open for as long as it is let."""
    async with made.fetcher(network) as fetcher:
        await fetcher.spec(None)
        await trio.sleep(2 * CONTENT_ANSWER_S)


async def is_served(made: World, network: Any = None) -> bool:
    """Whether one more reader has a place."""
    async with made.fetcher(network) as fetcher:
        try:
            return await fetcher.spec(None) == SIGNED
        except Refused:
            return False


async def test_readers_are_bounded_and_a_silent_one_makes_room(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with (
        world(tmp_path) as made,
        made.crowd(*[None] * READERS.total) as readers,
        trio.open_nursery() as nursery,
    ):
        for network in readers:
            nursery.start_soon(hold, made, network)
        await trio.sleep(1.0)
        assert not await is_served(made)
        await trio.sleep(CONTENT_ANSWER_S)
        assert await is_served(made)
        nursery.cancel_scope.cancel()


async def test_one_peer_takes_its_own_places_alone(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with (
        world(tmp_path) as made,
        made.another("greedy") as greedy,
        trio.open_nursery() as nursery,
    ):
        for _ in range(READERS.per_peer):
            nursery.start_soon(hold, made, greedy)
        await trio.sleep(1.0)
        assert not await is_served(made, greedy)
        assert await is_served(made)
        nursery.cancel_scope.cancel()


async def test_one_network_takes_its_own_places_alone(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    addresses = [f"/ip4/5.6.7.{number}/tcp/1" for number in range(READERS.per_prefix + 1)]
    async with (
        world(tmp_path) as made,
        made.crowd(*addresses) as (one_more, *others),
        trio.open_nursery() as nursery,
    ):
        for network in others:
            nursery.start_soon(hold, made, network)
        await trio.sleep(1.0)
        assert not await is_served(made, one_more)
        assert await is_served(made)
        nursery.cancel_scope.cancel()


async def test_a_stream_that_says_nothing_is_given_up_soon(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made:
        silent = await made.client.open_stream(made.server.peer_id, CONTENT)
        began_s = trio.current_time()
        assert await silent.receive_some() == b""
        assert trio.current_time() - began_s <= CONTENT_ANSWER_S + 0.5


async def ask_and_read_nothing(made: World, network: Any, request: Any) -> None:
    talk = Conversation(await network.open_stream(made.server.peer_id, CONTENT))
    with contextlib.suppress(StreamLost):
        for _ in range(MAX_READER_REQUESTS):
            await talk.send(request)
    await trio.sleep_forever()


@pytest.mark.parametrize("what", ["chunks", "manifests", "specs"])
async def test_streams_that_never_read_lose_their_places(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("simulation.network.WINDOW_BYTES", 512)
    monkeypatch.setattr("simulation.network.SEGMENT_BYTES", 256)
    async with (
        world(tmp_path) as made,
        made.crowd(*[None] * READERS.total) as readers,
        trio.open_nursery() as nursery,
    ):
        state = await made.service.write()
        assert state is not None
        requests = {
            "chunks": GetParts(state[1].root, (0, 1)),
            "manifests": GetState(GROUP, 0),
            "specs": GetSpec(),
        }
        for network in readers:
            nursery.start_soon(ask_and_read_nothing, made, network, requests[what])
        await trio.sleep(1.0)
        assert not await is_served(made)
        await trio.sleep(SEND_STALL_S + 1.0)
        assert await is_served(made)
        nursery.cancel_scope.cancel()


# --- states that are being read -------------------------------------------------------------------
async def read(made: World, network: Any, done: Callable[[int], None]) -> None:
    async with made.fetcher(network) as fetcher:
        done((await whole_state(fetcher, ExpectedState(GROUP), *empty_vectors())).round)


def next_round(made: World) -> None:
    source = made.source
    source.round, source.step = source.round + 1, source.step + 50
    source.written_step = source.step


async def test_slow_joiners_of_two_rounds_finish_whoever_comes_meanwhile(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with (
        world(tmp_path) as made,
        made.another("slow") as slow,
        made.another("later") as later,
        trio.open_nursery() as nursery,
    ):
        for network in (slow, later):
            made.internet.link(made.server.peer_id, network.peer_id).model = THIN
        finished: list[int] = []
        nursery.start_soon(read, made, slow, finished.append)
        await trio.sleep(5.0)
        next_round(made)
        nursery.start_soon(read, made, later, finished.append)
        await trio.sleep(5.0)
        given: list[int] = []
        for _ in range(4):
            next_round(made)
            await read(made, made.client, given.append)
        assert given == [5] * 4, "the newest that is being read"
        assert made.source.writes == KEPT_STATES
        assert not finished
        while len(finished) < 2:
            await trio.sleep(1.0)
        assert finished == [4, 5]
        await read(made, made.client, given.append)
        assert given[-1] == made.source.round, "there is room again"


async def test_when_no_state_that_is_read_is_of_use_the_joiner_is_sent_on(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with (
        world(tmp_path) as made,
        made.crowd(*[None] * KEPT_STATES) as readers,
        AsyncExitStack() as streams,
    ):
        for network in readers:
            fetcher = await streams.enter_async_context(made.fetcher(network))
            await whole_state(fetcher, ExpectedState(GROUP), *empty_vectors())
            next_round(made)
        async with made.fetcher() as fetcher:
            with pytest.raises(Refused) as refused:
                await whole_state(fetcher, ExpectedState(GROUP, made.source.step), *empty_vectors())
            assert refused.value.reason is RefusalReason.TOO_MANY
        assert made.source.writes == KEPT_STATES


async def test_nobody_reads_a_state_for_ever(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        talk = fetcher.talk
        await talk.send(GetState(GROUP, 0))
        _, digests = await talk.receive(StateScalars)
        root, sent = digest_of(digests).hex(), 0
        with pytest.raises(Refused) as refused:
            while sent < 100:
                await talk.send(GetParts(root, (0,)))
                await talk.receive(Part, max_payload_bytes=STATE_CHUNK_BYTES)
                sent += 1
        assert refused.value.reason is RefusalReason.TOO_MANY
        assert sent == READINGS_OF_A_STATE * len(digests) // 32


async def test_requests_on_one_stream_are_bounded(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        for _ in range(MAX_READER_REQUESTS):
            await fetcher.spec(None)
        with pytest.raises(Refused, match="are enough"):
            await fetcher.spec(None)


@pytest.mark.parametrize("states", [0, 2])
async def test_so_are_requests_for_states_that_are_not_here_or_in_turn(
    autojump_clock: MockClock, tmp_path: Path, states: int
) -> None:
    """Each would open the budget of chunks anew."""
    async with world(tmp_path) as made, AsyncExitStack() as streams:
        roots = ["ab" * 32]
        for _ in range(states):
            fetcher = await streams.enter_async_context(made.fetcher())
            await fetcher.talk.send(GetState(GROUP, 0))
            _, digests = await fetcher.talk.receive(StateScalars)
            roots = [*roots[-1:], digest_of(digests).hex()]
            next_round(made)
        talk = (await streams.enter_async_context(made.fetcher())).talk
        for number in range(MAX_READER_REQUESTS):
            await talk.send(GetParts(roots[number % len(roots)], (0,)))
            with contextlib.suppress(Refused) if not states else contextlib.nullcontext():
                await talk.receive(Part, max_payload_bytes=STATE_CHUNK_BYTES)
        await talk.send(GetParts(roots[0], (0,)))
        with pytest.raises(Refused, match="are enough"):
            await talk.receive(Part, max_payload_bytes=STATE_CHUNK_BYTES)


# --- sources that trickle -------------------------------------------------------------------------
def test_a_large_state_has_to_come_faster() -> None:
    assert slowest_rate(1) == MIN_FETCH_BYTES_PER_S
    assert slowest_rate(10**12) == 10**12 / MAX_TRANSFER_S


def trickle(made: World) -> None:
    model = replace(THIN, bandwidth_bytes_per_s=MIN_FETCH_BYTES_PER_S / 4)
    made.internet.link(made.server.peer_id, made.client.peer_id).model = model


async def test_a_source_that_trickles_is_left_within_minutes_and_its_chunks_are_kept(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual: Any = Conversation.send.__kwdefaults__
    monkeypatch.setitem(usual, "stall_s", 1e6)
    monkeypatch.setattr("peer.content.fetching.CONTENT_STALL_S", 1e6)
    async with world(tmp_path) as made:
        vectors = empty_vectors()
        download = StateDownload(*vectors)

        async def begin(fetcher: ContentClient, after: Callable[[float], Any]) -> Any:
            download.on_progress = lambda: after(download.share)
            return await download.follow(
                fetcher, await fetcher.description(ExpectedState(GROUP), P)
            )

        async with made.fetcher() as fetcher:
            took = await some_chunks(fetcher, begin, lambda: trickle(made))
        assert took <= 2 * RATE_WINDOW_S + 1.0
        made.internet.link(made.server.peer_id, made.client.peer_id).model = LinkModel()
        before = made.client.statistics().received_bytes[CONTENT]
        async with made.fetcher() as fetcher:
            await begin(fetcher, lambda _: None)
        came = made.client.statistics().received_bytes[CONTENT] - before
        assert came < state_bytes(P) - STATE_CHUNK_BYTES / 2
        assert (vectors[0] == made.source.phi_P).all()
        assert (vectors[1] == made.source.delta_P).all()


async def some_chunks(
    fetcher: ContentClient,
    begin: Callable[[ContentClient, Callable[[float], Any]], Awaitable[Any]],
    slow_down: Callable[[], None],
) -> float:
    """Fetch until the source trickles; for how long it then was waited for."""
    began_s: list[float] = []

    def after(_: float) -> None:
        if not began_s:
            began_s.append(trio.current_time())
            slow_down()

    with pytest.raises(StreamStalled, match="bytes a second"):
        await begin(fetcher, after)
    return trio.current_time() - began_s[0]


async def test_a_source_that_describes_its_state_for_ever_is_left(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as made, made.fetcher() as fetcher:

        async def never(_: Path) -> Any:
            await trio.sleep_forever()

        monkeypatch.setattr(made.source, "write", never)
        with trio.fail_after(3 * RATE_WINDOW_S), pytest.raises(StreamLost):
            await whole_state(fetcher, ExpectedState(GROUP), *empty_vectors())


async def test_a_peer_that_never_reads_is_given_up_in_every_conversation(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulation.network.WINDOW_BYTES", 16)
    async with world(tmp_path) as made:

        async def deaf(_: Any) -> None:
            await trio.sleep_forever()

        await made.server.serve("/loco/deaf/1", deaf)
        stream = await made.client.open_stream(made.server.peer_id, "/loco/deaf/1")
        with trio.fail_after(3600), pytest.raises(StreamStalled, match="took nothing"):
            await Conversation(stream).send(SpecReply(bytes(32), bytes(64)), bytes(1000))
