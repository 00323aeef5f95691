"""The directory's process is stopped again and again: it is replaced, nothing else notices."""

import pytest
from swarm import Swarm, ending

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.e2e]

HEALED_S = 90.0
"""A call is given up after ten seconds, and calls come every quarter minute."""
TIMES = 5
"""Four made it drop its weights and join again, when the directory was a thread."""


def test_a_blocked_directory_is_replaced_as_often_as_needed(swarm: Swarm) -> None:
    *_, member = swarm.at_least(2)
    with ending(swarm.join(member)) as victim:
        victim.wait_averaging()
        first, others = victim.table(), (victim.trainer(), victim.p2pd())
        averaged = len(victim.events(EventName.ROUND_AVERAGED))
        for turn in range(1, TIMES + 1):
            victim.table().suspend()
            victim.wait_event(EventName.DIRECTORY_RESTARTED, HEALED_S, restarts=turn)
        assert victim.metric("loco_directory_restarts_total") == TIMES
        assert len(victim.events(EventName.ROUND_AVERAGED)) > averaged, "it averaged meanwhile"
        assert (victim.trainer(), victim.p2pd()) == others
        assert victim.table() != first
        assert victim.events(EventName.PEER_LOST) == []
        victim.wait_averaging()
