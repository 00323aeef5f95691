"""Who comes late gets everything from the swarm, and nobody waits for it."""

import statistics
from itertools import pairwise

import pytest
from swarm import START_S, Peer, Swarm

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PAUSE_FACTOR = 5.0
PAUSE_FLOOR_S = 3.0
"""No gap between two rounds of another peer, while the joiner takes its state, may be longer than
the larger of the floor and so many usual gaps: a joiner's start takes processor time away here."""


def round_at(peer: Peer, swarm_time_s: float) -> int:
    """The round it was in at that time."""
    opened = peer.events(EventName.ROUND_OPENED)
    return max(int(event["round"]) for event in opened if event["time"] <= swarm_time_s)


def test_a_late_joiner_gets_everything_and_nobody_pauses(swarm: Swarm) -> None:
    others = swarm.at_least(2)
    via = next(peer for peer in reversed(others) if peer is not swarm.founder)
    before = {peer: len(peer.events()) for peer in others}
    joiner = swarm.join(via)
    received = joiner.wait_event(EventName.RUN_RECEIVED, START_S)
    assert received["remote"] == via.peer_id
    state = joiner.wait_event(EventName.STATE_RECEIVED, START_S)
    assert set(state["remotes"]) <= {peer.peer_id for peer in others}
    assert state["bytes"] > 0
    opened = joiner.wait_event(EventName.ROUND_OPENED, START_S)
    newest = max(round_at(peer, opened["time"]) for peer in others)
    assert newest - opened["round"] <= 2, "it begins with the round that the others are in"
    assert opened["round"] - state["round"] <= 2, "its state is of the round before"
    closed = joiner.wait_event(EventName.ROUND_CLOSED, START_S)
    assert (closed["round"], closed["tokens"] > 0) == (opened["round"], True)
    joiner.wait_averaging()
    first_loss = joiner.wait_event(EventName.VALIDATED)["loss"]
    untrained_loss = swarm.started[0].events(EventName.VALIDATED)[0]["loss"]
    assert first_loss < untrained_loss
    for peer in others:
        times = [event["monotonic_s"] for event in peer.events(EventName.ROUND_CLOSED)]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        joined_s = peer.events()[before[peer]]["monotonic_s"]
        meanwhile = [later - earlier for earlier, later in pairwise(times) if later >= joined_s]
        bound_s = max(PAUSE_FLOOR_S, PAUSE_FACTOR * statistics.median(gaps))
        assert max(meanwhile) <= bound_s, peer.report()
