"""Whom a joiner asks first, and when it asks again."""

from contextlib import nullcontext

import pytest
import trio
from swarm_worlds import simulated, start, toy_spec

from peer.content import service
from peer.content.service import ContentService
from peer.daemon import sources
from peer.daemon.sources import (
    DOUBT_PAUSE_S,
    MAX_SOURCE_PAUSE_S,
    SOURCE_PAUSE_S,
    Sources,
    in_order,
    pause_after,
)
from peer.facts import Facts
from peer.state.home import HomeError
from protocol.errors import Refused, RemoteProtocolError, StreamLost
from protocol.membership.book import BackOff
from protocol.membership.view import Progress, Roster
from protocol.outcomes import RefusalReason
from simulation.network import SimulatedInternet, SimulatedNetwork
from simulation.swarm import open_swarm

NUM_PEERS = 9


@pytest.mark.parametrize(
    ("error", "pause_s"),
    [
        (StreamLost("away"), SOURCE_PAUSE_S),
        (Refused(RefusalReason.UNAVAILABLE, "none yet"), SOURCE_PAUSE_S),
        (Refused(RefusalReason.NOT_ADMITTED, "no"), DOUBT_PAUSE_S),
        (RemoteProtocolError("a lie"), DOUBT_PAUSE_S),
        (Refused(RefusalReason.TOO_LARGE, "too large"), DOUBT_PAUSE_S),
    ],
)
def test_a_source_that_could_not_help_is_asked_later(error, pause_s):
    waits = BackOff(SOURCE_PAUSE_S, MAX_SOURCE_PAUSE_S)
    waits.failed("a", 0.0, pause_after(error))
    assert not waits.is_due("a", pause_s - 0.01)
    assert waits.is_due("a", pause_s)
    assert waits.is_due("b", 0.0)


def test_what_may_pass_is_asked_for_less_and_less_often():
    waits, now_s, times = BackOff(SOURCE_PAUSE_S, MAX_SOURCE_PAUSE_S), 0.0, []
    while now_s < 60:
        if waits.is_due("a", now_s):
            waits.failed("a", now_s, pause_after(StreamLost("away")))
            times.append(now_s)
        now_s += SOURCE_PAUSE_S
    assert times[1] == SOURCE_PAUSE_S
    assert len(times) <= 2 + 60 / MAX_SOURCE_PAUSE_S


async def test_no_claim_makes_a_source_the_first(autojump_clock):
    roster = Roster(10.0)
    for number in range(NUM_PEERS):
        progress = Progress(state="training", round=number, step=100 + number)
        roster.heard(trio.current_time(), f"peer-{number}", 1, progress=progress)
    before = in_order(roster, "me", None)
    boldest = before[-1]
    for claim in (1 << 40, 0):
        progress = Progress(state="training", round=claim, step=claim)
        roster.heard(trio.current_time(), boldest, 1, progress=progress)
        order = in_order(roster, "me", None)
        assert order.index(boldest) >= NUM_PEERS // 2
        assert sorted(order) == sorted(before)
    firsts = {in_order(roster, f"joiner-{number}", None)[0] for number in range(50)}
    assert len(firsts) > 3, "joiners spread over the sources"
    assert in_order(roster, "me", boldest)[0] == boldest


async def test_what_fails_on_this_machine_is_asked_of_nobody_else(autojump_clock, monkeypatch):
    roster, asked = Roster(10.0), []
    for peer_id in ("one", "two"):
        roster.heard(
            trio.current_time(), peer_id, 1, progress=Progress(state="training", round=1, step=9)
        )

    async def ask(fetcher):
        asked.append(fetcher)
        raise HomeError("no room")

    network = SimulatedNetwork(SimulatedInternet(seed=0), "me", "nowhere")
    monkeypatch.setattr(sources, "fetch_from", lambda _, peer_id: nullcontext(peer_id))
    with trio.fail_after(10), pytest.raises(HomeError, match="no room"):
        await Sources(network, Facts("me", 1)).fetch(ask, roster)
    assert len(asked) == 1


@pytest.mark.slow
@simulated()
async def test_a_corpus_that_is_too_large_is_not_asked_for_again_and_again(tmp_path, monkeypatch):
    asked: list[float] = []
    honest = ContentService._blob

    async def count(self, digest):
        asked.append(trio.current_time())
        return await honest(self, digest)

    monkeypatch.setattr(ContentService, "_blob", count)
    async with open_swarm(1, toy_spec(2000), tmp_path) as swarm:
        await start(swarm, "a", "b")
        monkeypatch.setattr(service, "MAX_BLOB_BYTES", 1)
        asked.clear()
        c = swarm.join("c")
        await trio.sleep(0.9 * DOUBT_PAUSE_S)
        assert len(asked) == 2, "each source once"
        assert "larger than" in c.facts.doing
        await trio.sleep(0.2 * DOUBT_PAUSE_S)
        assert len(asked) == 4
