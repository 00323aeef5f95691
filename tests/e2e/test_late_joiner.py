"""Who comes late gets everything from the swarm, and nobody waits for it."""

import statistics
from itertools import pairwise

import pytest
from swarm import START_S, Peer, Swarm, rounds_behind

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

NEAR_ROUNDS = 2.0
"""It begins with a state that the others had at the end of their last round."""
PAUSE_FACTOR = 3.0
PAUSE_FLOOR_S = 8.0
"""No gap between two rounds of another peer, while the joiner takes its state, may be longer than
the larger of the floor and so many usual gaps: a joiner's start takes processor time away here (on
two slow cores gaps of 5.7 s were seen). So this finds a peer that waits until something times out,
which takes ten seconds and more; that nobody pauses at all is shown in virtual time
(tests/peer/daemon/test_failures.py)."""


def gaps_after(peer: Peer, num_events: int) -> tuple[list[float], list[float]]:
    """Seconds between the ends of its rounds: before it had said so much, and from then on."""
    since_s = peer.events()[num_events]["monotonic_s"]
    times = [event["monotonic_s"] for event in peer.events(EventName.ROUND_CLOSED)]
    gaps = [(later, later - earlier) for earlier, later in pairwise(times)]
    return [g for at_s, g in gaps if at_s < since_s], [g for at_s, g in gaps if at_s >= since_s]


@pytest.mark.long
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
    assert rounds_behind(joiner, others) <= NEAR_ROUNDS, "it begins where the others are"
    assert opened["round"] - state["round"] <= 2, "its state is of the round before"
    closed = joiner.wait_event(EventName.ROUND_CLOSED, START_S)
    assert (closed["round"], closed["tokens"] > 0) == (opened["round"], True)
    joiner.wait_averaging()
    first_loss = joiner.wait_event(EventName.VALIDATED)["loss"]
    untrained_loss = swarm.started[0].events(EventName.VALIDATED)[0]["loss"]
    assert first_loss < untrained_loss
    gaps = {peer: gaps_after(peer, before[peer]) for peer in others}
    usual_s = statistics.median(gap for earlier, _ in gaps.values() for gap in earlier)
    for peer, (_, meanwhile) in gaps.items():
        assert max(meanwhile) <= max(PAUSE_FLOOR_S, PAUSE_FACTOR * usual_s), peer.report()
