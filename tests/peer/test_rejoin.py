"""A process beyond healing joins again in a new one."""

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from peer.daemon import run as daemon
from peer.daemon.membership import Membership
from peer.options.config import load_config
from peer.options.exit_codes import ExitCode
from peer.process.rejoin import JoinAgain, rejoin_command
from peer.runtime import DirectoryUnrecoverable
from peer.state.home import Home
from protocol.membership.view import Roster


def test_the_command_keeps_what_the_command_line_said(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/loco-peer", "start", "run.toml"])
    given = {"home": tmp_path, "threads": "2", "json-ready": True, "listen": "127.0.0.1:4000"}
    given["bootstrap"] = ["10.0.0.1:1"]
    config = load_config(given, {"LOCO_GRACE": "3"})
    command = rejoin_command(config)
    assert command[:5] == [sys.executable, "/usr/bin/loco-peer", "join", "--home", str(tmp_path)]
    assert command[5:] == ["--threads", "2", "--listen", "127.0.0.1:4000", "--json-ready"]


class BrokenDirectory:
    """A directory that no call heals."""

    def swarm_time_s(self) -> float:
        return trio.current_time()

    async def store(self, *_: object) -> None:
        raise DirectoryUnrecoverable("hung 4 times in a row")

    get = store


class Nowhere:
    """A network of one peer."""

    peer_id = "12D3KooWGLDxabPrkBdVwyewHYcVHUhs7PphjhV3wNamxfSGb4Bh"
    addresses = ("/ip4/127.0.0.1/tcp/1",)


def _membership(roster: Roster) -> Membership:
    ports: Any = SimpleNamespace(
        facts=SimpleNamespace(incarnation=1),
        network=Nowhere(),
        directory=BrokenDirectory(),
        roster=roster,
        sign=lambda _: b"s" * 64,
    )
    return Membership(ports, "0" * 32)


async def test_with_others_alive_a_broken_directory_ends_the_process(autojump_clock):
    roster = Roster(silence_s=10)
    roster.heard(trio.current_time(), "b", 1, addresses=("/ip4/10.0.0.2/tcp/7",))
    with pytest.raises(BaseExceptionGroup) as caught:
        await _membership(roster).run()
    assert all(isinstance(again, JoinAgain) for again in caught.value.exceptions)


async def test_alone_it_goes_on_without_a_directory(autojump_clock):
    with trio.move_on_after(1000) as scope:
        await _membership(Roster(silence_s=10)).run()
    assert scope.cancelled_caught


async def test_who_is_asked_to_leave_while_all_is_closed_for_that_does_not_join_again(
    monkeypatch, tmp_path
):
    class Closing:
        def __init__(self, _config: Any, _home: Any, _spare: Any, stop: trio.Event) -> None:
            self._stop = stop

        async def run(self, _: Any) -> None:
            try:
                async with trio.open_nursery():
                    raise JoinAgain("its thread hung")
            finally:
                if asked:
                    self._stop.set()

    monkeypatch.setattr(daemon, "_Daemon", Closing)
    config, home, spare = load_config({"home": tmp_path}, {}), Home(tmp_path), cast(Any, None)
    asked = False
    with pytest.RaisesGroup(JoinAgain, flatten_subgroups=True):
        await daemon.run_daemon(config, None, home, spare)
    asked = True
    assert await daemon.run_daemon(config, None, home, spare) is ExitCode.OK
