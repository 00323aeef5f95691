"""Looking for the swarm by addresses that users gave."""

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from peer.daemon.bootstrap import Bootstrap
from peer.daemon.report import LOOK_S, REPEAT_S
from peer.facts import Facts, PeerState
from peer.network.dial_errors import BACKOFF, cure_of
from peer.observe.events import EventLog
from peer.state.kept_files import Pins
from protocol.errors import Refused, StreamLost
from protocol.outcomes import RefusalReason


class NoLinks:
    """Links that nobody answers."""

    async def dial(self, *_: object) -> None:
        raise StreamLost("dial: connection refused")


NO_LINKS: Any = NoLinks()


class OpenLinks:
    """Links that everybody answers."""

    async def dial(self, *_: object) -> str:
        await trio.sleep(1)
        return "hello"


def _bootstrap(resolve, lines, pins=None, *, addresses=("h:1",), links=NO_LINKS, probe=None):
    events = EventLog(lines.append, peer="me", wall_time_s=trio.current_time, stream=None)
    services: Any = SimpleNamespace(
        facts=Facts("me", 1),
        events=events,
        pins=pins or Pins(),
        network=SimpleNamespace(probe=probe),
    )
    return Bootstrap(services, links, addresses, resolve=resolve)


async def test_our_own_identity_at_the_bootstrap_address_is_refused(autojump_clock):
    async def resolve(_: str):
        return "me", ("/ip4/10.0.0.1/tcp/1",)

    with pytest.raises(Refused, match="own identity") as refused:
        await _bootstrap(resolve, []).enter()
    assert refused.value.reason is RefusalReason.DUPLICATE_IDENTITY


async def test_an_address_of_our_own_among_others_is_left_out(autojump_clock):
    async def resolve(address: str):
        return ("me" if address == "own:1" else "other"), ("/ip4/10.0.0.1/tcp/1",)

    bootstrap = _bootstrap(resolve, [], addresses=("own:1", "h:1"), links=OpenLinks())
    assert await bootstrap.enter() == ("other", "hello")


async def test_it_says_again_what_fails_for_long_and_keeps_trying(autojump_clock):
    async def resolve(_: str):
        return "other", ("/ip4/10.0.0.1/tcp/1",)

    lines: list[bytes] = []
    started_s = trio.current_time()
    bootstrap = _bootstrap(resolve, lines)
    bootstrap._facts.state = PeerState.CONNECTING
    with trio.move_on_after(4 * REPEAT_S) as scope:
        await bootstrap.enter()
    assert scope.cancelled_caught
    failing = _failing(lines)
    seconds = [event["monotonic_s"] - started_s for event in failing]
    assert seconds[0] <= LOOK_S
    assert len(seconds) >= 3
    assert all(b - a == pytest.approx(REPEAT_S) for a, b in pairwise(seconds))
    assert {event["step"] for event in failing} == {"dial"}
    assert {event["cure"] for event in failing} == {cure_of("connection refused")}
    assert f"({cure_of('connection refused')})" in bootstrap._facts.doing


async def test_what_has_changed_is_said_within_a_second(autojump_clock):
    async def resolve(_: str):
        if trio.current_time() - started_s < 12:
            raise StreamLost("resolve: no address is known for h:1: Name or service not known")
        return "other", ("/ip4/10.0.0.1/tcp/1",)

    lines: list[bytes] = []
    started_s = trio.current_time()
    with trio.move_on_after(18):
        await _bootstrap(resolve, lines).enter()
    said = [(event["step"], event["monotonic_s"] - started_s) for event in _failing(lines)]
    assert [step for step, _ in said] == ["resolve", "dial"]
    assert "look names up" in _failing(lines)[0]["cure"]
    assert 12 < said[-1][1] < 18


async def test_the_cause_is_found_out_where_p2pd_does_not_try(autojump_clock):
    class BackingOff(NoLinks):
        async def dial(self, *_: object) -> None:
            raise StreamLost(f"dial: cannot reach other: 10.0.0.1:1: {BACKOFF}")

    async def resolve(_: str):
        return "12D3KooWother", ("/ip4/10.0.0.1/tcp/1",)

    async def refused(_: str):
        raise StreamLost("dial: cannot connect to 10.0.0.1:1: Connection refused")

    async def somebody(_: str):
        return "12D3KooWsomebody"

    links: Any = BackingOff()
    for probe, words in ((refused, "Connection refused"), (somebody, "found ...somebody")):
        lines: list[bytes] = []
        with trio.move_on_after(3):
            await _bootstrap(resolve, lines, links=links, probe=probe).enter()
        assert words in _failing(lines)[0]["detail"]


def _failing(lines):
    return [event for event in map(json.loads, lines) if event["event"] == "BootstrapFailing"]


async def test_who_answered_first_is_shown_and_nobody_else_is_taken(autojump_clock):
    answers = iter(["first", "second", *["first"] * 100])

    async def resolve(_: str):
        return next(answers), ("/ip4/10.0.0.1/tcp/1",)

    lines: list[bytes] = []
    with trio.move_on_after(10):
        await _bootstrap(resolve, lines).enter()
    events = list(map(json.loads, lines))
    pinned = [event for event in events if event["event"] == "IdentityPinned"]
    assert [(event["address"], event["multiaddr"]) for event in pinned] == [
        ("h:1", "/ip4/10.0.0.1/tcp/1/p2p/first")
    ]
    failing = [event for event in events if event["event"] == "BootstrapFailing"]
    assert {event["step"] for event in failing} == {"dial", "handshake"}
    assert any("second answers, where first did" in event["detail"] for event in failing)


async def test_another_peer_at_the_same_place_is_an_error_in_the_next_life_too(
    autojump_clock, tmp_path
):
    async def told_of(who: str) -> list[str]:
        """What a new process says when this peer answers there."""

        async def resolve(_: str):
            return who, ("/ip4/10.0.0.1/tcp/1",)

        lines: list[bytes] = []
        with trio.move_on_after(3):
            await _bootstrap(resolve, lines, Pins(tmp_path / "known_peers")).enter()
        events = map(json.loads, lines)
        return [event["detail"] for event in events if event["event"] == "BootstrapFailing"]

    assert set(await told_of("first")) == {"connection refused"}
    (sentence,) = set(await told_of("second"))
    assert "second answers, where first did" in sentence
    assert f"remove its line from {tmp_path / 'known_peers'}" in sentence
    assert (tmp_path / "known_peers").read_text() == "h:1 first\n"
    (tmp_path / "known_peers").write_text("other:2 somebody\nnot a pin\n")
    assert set(await told_of("second")) == {"connection refused"}
    assert Pins(tmp_path / "known_peers").get("other:2") == "somebody"
