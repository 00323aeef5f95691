"""A call that never returns blocks the directory's thread: it is replaced, nothing else stops."""

from pathlib import Path

import pytest
from swarm import Swarm, ending, wait_until

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.e2e]

HEALED_S = 90.0
"""A call is given up after ten seconds, and calls come every quarter minute."""

SITE = """
import pathlib, threading, time, uvloop

_order = pathlib.Path({order!r})
_new_event_loop = uvloop.new_event_loop

def _watched():
    loop = _new_event_loop()
    def watch():
        while not _order.exists():
            time.sleep(0.05)
        _order.unlink()
        loop.call_soon_threadsafe(time.sleep, 3600)
    threading.Thread(target=watch, daemon=True).start()
    return loop

uvloop.new_event_loop = _watched
"""
"""The loop of the directory's thread can be blocked from outside, by a file."""


def test_a_blocked_directory_is_replaced(swarm: Swarm, tmp_path: Path) -> None:
    *_, member = swarm.at_least(2)
    order = tmp_path / "block"
    environment = swarm.with_site(tmp_path / "site", SITE.format(order=str(order)))
    with ending(swarm.join(member, environment=environment)) as victim:
        victim.wait_averaging()
        assert victim.metric("loco_directory_restarts_total") == 0
        averaged = len(victim.events(EventName.ROUND_AVERAGED))
        order.touch()
        wait_until(lambda: not order.exists(), "the loop is blocked", peers=[victim])
        victim.wait_event(EventName.DIRECTORY_RESTARTED, HEALED_S)
        assert victim.metric("loco_directory_restarts_total") == 1
        assert len(victim.events(EventName.ROUND_AVERAGED)) > averaged, "it averaged meanwhile"
        assert victim.metric("loco_trainer_restarts_total") == 0
        victim.wait_averaging()
