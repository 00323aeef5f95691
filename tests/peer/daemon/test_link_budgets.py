"""Links: so many for one identity and one network; a link that lives is not replaced."""

from contextlib import AsyncExitStack
from dataclasses import replace

import msgspec
import pytest
import trio
from existing import existing
from swarm_worlds import simulated, start, toy_spec
from test_admission import BEAT, GREETING, beat, greet

from peer.daemon import links as links_file
from peer.daemon.greeting import BEAT_S, DUPLICATE_PROBE_S
from peer.daemon.link import LINK_BURST, Link
from peer.daemon.links import HANDOVER_S
from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from protocol.errors import Refused
from protocol.limits import LINK_MESSAGES_PER_S, LINK_PLACES, Shares
from protocol.outcomes import RefusalReason
from protocol.wire.messages import Hello, PeerEntry, PeerList
from protocol.wire.versions import HELLO
from simulation.swarm import identity_of, open_swarm

NOBODY = "/ip4/203.0.113.1/tcp/1"


async def hello_without_answer(swarm, network, name="a", **changes) -> Conversation:
    peer = swarm[name]
    await network.connect(peer.peer_id, peer.network.addresses)
    talk = Conversation(await network.open_stream(peer.peer_id, HELLO))
    await talk.send(msgspec.structs.replace(GREETING, **changes))
    return talk


@simulated()
async def test_one_identity_has_one_link_and_one_to_replace_it(tmp_path):
    async with open_swarm(1, toy_spec(60), tmp_path) as swarm:
        await start(swarm, "a", "b")
        before = swarm["a"].links.num_live
        greedy = identity_of(1, "greedy").peer_id
        async with swarm.internet.open_network(greedy) as network, trio.open_nursery() as nursery:
            talk, _ = await greet(swarm, network)
            nursery.start_soon(beat, talk)
            waiting = [await hello_without_answer(swarm, network) for _ in range(20)]
            refused = 0
            for other in waiting:
                with pytest.raises(Refused) as refusal:
                    await other.receive(Hello)
                assert refusal.value.reason is RefusalReason.TOO_MANY
                refused += 1
            assert refused == len(waiting)
            assert swarm["a"].links.num_live == before + 1
            nursery.cancel_scope.cancel()


@simulated()
async def test_a_link_that_beats_is_not_replaced_and_a_dead_one_is(tmp_path):
    async with open_swarm(1, toy_spec(60), tmp_path) as swarm:
        await start(swarm, "a")
        x = identity_of(1, "x").peer_id
        async with swarm.internet.open_network(x) as network:
            async with trio.open_nursery() as nursery:
                first, _ = await greet(swarm, network)
                nursery.start_soon(beat, first)
                with pytest.raises(Refused, match="linked already"):
                    await greet(swarm, network)
                nursery.cancel_scope.cancel()
            began_s = trio.current_time()
            await greet(swarm, network)  # the first says nothing any more
            assert trio.current_time() - began_s <= DUPLICATE_PROBE_S + 0.5
            await trio.sleep(0.5)
            assert swarm["a"].links.num_live == 1


@simulated()
async def test_one_network_has_its_share_of_the_links(tmp_path, monkeypatch):
    per_prefix = 3
    assert per_prefix < LINK_PLACES.per_prefix
    monkeypatch.setattr(links_file, "LINK_PLACES", Shares(128, LINK_PLACES.per_peer, per_prefix))
    async with open_swarm(1, toy_spec(20), tmp_path) as swarm, AsyncExitStack() as others:
        await start(swarm, "a")
        for number in range(per_prefix + 1):
            sybil = identity_of(1, f"sybil-{number}").peer_id
            address = f"/ip4/5.6.7.{number}/tcp/1"
            network = await others.enter_async_context(swarm.internet.open_network(sybil, address))
            if number < per_prefix:
                await greet(swarm, network)
        with pytest.raises(Refused) as refused:
            await greet(swarm, network)
        assert refused.value.reason is RefusalReason.TOO_MANY
        honest = identity_of(1, "honest").peer_id
        network = await others.enter_async_context(swarm.internet.open_network(honest))
        await greet(swarm, network)


@simulated()
async def test_links_that_others_open_leave_room_for_our_own_dials(tmp_path, monkeypatch):
    monkeypatch.setattr(links_file, "MAX_LINKS", 4)
    monkeypatch.setattr(links_file, "LINK_PLACES", replace(LINK_PLACES, per_prefix=2))
    dialled = trio.Event()

    async def note(_stream) -> None:
        dialled.set()
        await trio.sleep_forever()

    async with open_swarm(1, toy_spec(20), tmp_path) as swarm, AsyncExitStack() as others:
        await start(swarm, "a")
        ids = [identity_of(1, f"sybil-{number}").peer_id for number in range(8)]
        opened = [
            swarm.internet.open_network(sybil, f"/ip4/5.6.{number}.7/tcp/1")
            for number, sybil in enumerate(ids)
        ]
        sybils = [await others.enter_async_context(each) for each in opened]
        honest = identity_of(1, "honest").peer_id
        network = await others.enter_async_context(swarm.internet.open_network(honest))
        await network.serve(HELLO, note)
        async with trio.open_nursery() as nursery:
            for number, sybil in enumerate(sybils):
                talk, _ = await greet(swarm, sybil)
                nursery.start_soon(beat, talk)
                assert existing(swarm["a"].roster.get(ids[number])).network == f"5.6.{number}.0/24"
            swarm["a"].roster.introduced(honest, tuple(network.addresses))
            with trio.fail_after(10 * BEAT_S):
                await dialled.wait()
            nursery.cancel_scope.cancel()


@simulated()
async def test_peers_that_dial_each_other_at_once_keep_the_same_link(tmp_path):
    async with open_swarm(1, toy_spec(60), tmp_path) as swarm:
        await start(swarm, "a", "b", "c")
        await trio.sleep(2 * HANDOVER_S)
        names = "abc"
        lost = {name: len(swarm[name].events(EventName.PEER_LOST)) for name in names}
        b, c = swarm["b"], swarm["c"]
        for one, other in ((b, c), (c, b)):
            for link in one.links._links.pop(other.peer_id):
                link.scope.cancel()
        await trio.sleep(0.5)
        lost = {name: len(swarm[name].events(EventName.PEER_LOST)) for name in names}
        async with trio.open_nursery() as nursery:
            for one, other in ((b, c), (c, b)):
                nursery.start_soon(one.links.dial, other.peer_id, other.network.addresses)
        assert len(b.links._links[c.peer_id]) == 2
        await trio.sleep(HANDOVER_S + 1.0)
        (at_b,), (at_c,) = b.links._links[c.peer_id], c.links._links[b.peer_id]
        assert at_b.opened_by_us != at_c.opened_by_us
        assert at_b.opened_by_us == (b.peer_id < c.peer_id)
        assert lost == {name: len(swarm[name].events(EventName.PEER_LOST)) for name in names}


@simulated()
async def test_links_of_a_swarm_settle_on_one_for_each_pair(tmp_path):
    names = "abcdef"
    async with open_swarm(1, toy_spec(60), tmp_path) as swarm:
        await start(swarm, *names)
        await trio.sleep(10.0)
        for name in names:
            assert swarm[name].links.num_live == len(names) - 1
            assert not swarm[name].events(EventName.PEER_LOST)


# --- what is said on a link -----------------------------------------------------------------------
@pytest.mark.long
@simulated()
async def test_a_flood_is_read_at_a_pace(tmp_path, monkeypatch):
    heard: list[float] = []
    plain = Link.heard_beat

    def count(self, beat, now_s):
        heard.append(now_s)
        return plain(self, beat, now_s)

    async with open_swarm(1, toy_spec(60), tmp_path) as swarm:
        await start(swarm, "a")
        monkeypatch.setattr(Link, "heard_beat", count)
        loud = identity_of(1, "loud").peer_id
        async with swarm.internet.open_network(loud) as network:
            talk, _ = await greet(swarm, network)
            seconds = 5.0
            with trio.move_on_after(seconds):
                while True:
                    await talk.send(BEAT)
        assert len(heard) <= LINK_BURST + seconds * LINK_MESSAGES_PER_S + 1
        assert len(heard) >= seconds * LINK_MESSAGES_PER_S


def names(count: int, of: str = "nobody") -> PeerList:
    """A list of peers that do not exist."""
    ids = [identity_of(2, f"{of}-{number}").peer_id for number in range(count)]
    return PeerList(tuple(PeerEntry(peer_id, 1, (NOBODY,)) for peer_id in ids))


@simulated()
@pytest.mark.long
async def test_lists_of_peers_cost_what_beats_cost(tmp_path, monkeypatch):
    told: list[PeerList] = []
    async with open_swarm(1, toy_spec(60), tmp_path) as swarm:
        await start(swarm, "a")
        hearsay = swarm["a"].links.dialler
        monkeypatch.setattr(hearsay, "on_peer_list", lambda *said: told.append(said[-1]))
        loud = identity_of(1, "loud").peer_id
        async with swarm.internet.open_network(loud) as network:
            talk, _ = await greet(swarm, network)
            with trio.move_on_after(5.0):
                while True:
                    await talk.send(names(1))
        assert 5 <= len(told) <= (LINK_BURST + 5 * LINK_MESSAGES_PER_S) / LINK_MESSAGES_PER_S + 2
