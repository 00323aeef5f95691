"""The directory's process is stopped again and again: it is replaced, nothing else notices."""

from pathlib import Path

import psutil
import pytest
from swarm import Peer, Swarm, ending

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.e2e]

HEALED_S = 90.0
"""A call is given up after ten seconds, and calls come every quarter minute."""
TIMES = 5
"""Four made it drop its weights and join again, when the directory was a thread."""


def children(peer: Peer) -> dict[str, psutil.Process]:
    """The table, the trainer and p2pd."""
    found = psutil.Process(peer.process.pid).children()
    return {
        name: child
        for name in ("peer.network.table", "peer.training.child", "p2pd")
        for child in found
        if any(Path(word).name == name for word in child.cmdline())
    }


def test_a_blocked_directory_is_replaced_as_often_as_needed(swarm: Swarm) -> None:
    *_, member = swarm.at_least(2)
    with ending(swarm.join(member)) as victim:
        victim.wait_averaging()
        before = children(victim)
        averaged = len(victim.events(EventName.ROUND_AVERAGED))
        for turn in range(1, TIMES + 1):
            children(victim)["peer.network.table"].suspend()
            victim.wait_event(EventName.DIRECTORY_RESTARTED, HEALED_S, restarts=turn)
        assert victim.metric("loco_directory_restarts_total") == TIMES
        assert len(victim.events(EventName.ROUND_AVERAGED)) > averaged, "it averaged meanwhile"
        after = children(victim)
        for name in ("peer.training.child", "p2pd"):
            assert after[name] == before[name]
        assert after["peer.network.table"] != before["peer.network.table"]
        assert victim.events(EventName.PEER_LOST) == []
        victim.wait_averaging()
