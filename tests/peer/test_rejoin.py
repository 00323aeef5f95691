"""A process beyond healing joins again in a new one."""

import sys
from typing import Any, cast

import pytest
import trio

from peer.daemon import run as daemon
from peer.options.config import load_config
from peer.options.exit_codes import ExitCode
from peer.process.rejoin import JoinAgain, rejoin_command
from peer.state.home import Home


def test_the_command_keeps_what_the_command_line_said(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/loco-peer", "start", "run.toml"])
    given = {"home": tmp_path, "threads": "2", "json-ready": True, "listen": "127.0.0.1:4000"}
    given["bootstrap"] = ["10.0.0.1:1"]
    config = load_config(given, {"LOCO_GRACE": "3"})
    command = rejoin_command(config)
    assert command[:5] == [sys.executable, "/usr/bin/loco-peer", "join", "--home", str(tmp_path)]
    assert command[5:7] == ["--bootstrap", "10.0.0.1:1"]
    assert command[7:] == ["--threads", "2", "--listen", "127.0.0.1:4000", "--json-ready"]


async def test_who_is_asked_to_leave_while_all_is_closed_for_that_does_not_join_again(
    monkeypatch, tmp_path
):
    class Closing:
        def __init__(self, *given: Any) -> None:
            *_, self._stop, _show = given

        async def run(self, _: Any) -> None:
            try:
                async with trio.open_nursery():
                    raise JoinAgain("far behind")
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
