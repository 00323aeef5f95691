"""kill -9: of a peer in mid-exchange, of p2pd, of the trainer, of the founder. The others go on.

Bounds, set before anything was measured:
  A peer that is killed costs each other peer at most one skipped round of which it is the partner.
  The median time between two closed rounds, after the kill, is at most GROWTH times that before.
  The longest is at most GROWTH times the longest before, and NOTICED_S: so soon its partner
  knows that it is dead. To wait until it is silent for SILENCE_S would take longer.
  A trainer that is started again is in step after MAX_ROUNDS_OUT_OF_STEP of its rounds.
"""

import signal
import statistics
from functools import partial
from itertools import pairwise

import pytest
from swarm import (
    START_S,
    Event,
    Peer,
    Swarm,
    all_averaging,
    has_said,
    rounds_behind,
    skips,
    wait_until,
    within,
)

from peer.facts import PeerState
from peer.observe.event_names import EventName
from protocol.outcomes import SkipReason

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

NUM_ROUNDS = 5
"""Rounds measured on either side of a kill."""
GROWTH = 1.5
NOTICED_S = 5.0
MAX_ROUNDS_OUT_OF_STEP = 2
"""The round in which its trainer died, and one that began while the others were asked."""
NEAR_ROUNDS = 1.5
"""So far apart are peers that are in step: one may be at the end of a round, or wait there."""
LOST = {SkipReason.PARTNER_LOST, SkipReason.PARTNER_STALLED, SkipReason.UNSETTLED}
STOP_IN_EXCHANGE_TRIES = 50
BYTES_UNDER_WAY_S = 0.5
"""What a stopped peer had sent has arrived after this time, and is dealt with."""


def closed_s(peer: Peer) -> list[float]:
    return [event["monotonic_s"] for event in peer.events(EventName.ROUND_CLOSED)]


def lasted_s(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def wait_rounds(peers: list[Peer], num_rounds: int) -> None:
    """Until each of them has closed that many more."""
    enough = {peer: len(closed_s(peer)) + num_rounds for peer in peers}
    for peer in peers:
        peer.wait_for(
            f"{num_rounds} more rounds",
            partial(has_said, peer, EventName.ROUND_CLOSED, enough[peer]),
            START_S,
        )


def sees_training(peer: Peer, other: Peer) -> bool:
    return any(
        (told["peer_id"], told["state"]) == (other.peer_id, PeerState.TRAINING)
        for told in peer.status()["peers"]
    )


def wait_seen_by(peers: list[Peer], other: Peer) -> None:
    """Until each of them sees the other one train."""
    for peer in peers:
        peer.wait_for(
            f"it sees {other.name} train",
            partial(sees_training, peer, other),
            START_S,
        )


def stop_in_exchange(victim: Peer, others: list[Peer]) -> tuple[Peer, int]:
    """Stop every process of the victim in mid-exchange.

    Stopped too late, when all bytes are out, or too soon, when the partner does not know yet that
    it is one, it goes on, and the next exchange is waited for.

    Returns:
        Its partner, and how many events the partner had seen before.
    """
    by_id = {peer.peer_id: peer for peer in others}
    for _ in range(STOP_IN_EXCHANGE_TRIES):
        seen = {peer: len(peer.events()) for peer in others}
        paired = wait_until(
            partial(accepted, victim, len(victim.events())),
            f"{victim.name} finds a partner",
            poll_s=0.0,
            peers=[victim],
        )
        victim.signal_all(signal.SIGSTOP)
        partner = by_id[paired[-1]["remote"]]
        since = seen[partner]
        too_late = within(partial(has_ended, partner, victim, since), BYTES_UNDER_WAY_S)
        if not too_late and said_of(partner, victim, since, EventName.PROPOSAL_ACCEPTED):
            return partner, since
        victim.signal_all(signal.SIGCONT)
    raise AssertionError("never stopped in mid-exchange")


def accepted(peer: Peer, since: int) -> list[Event]:
    """Proposals, its own and others', after its first `since` events."""
    seen = peer.events()[since:]
    return [event for event in seen if event["event"] == EventName.PROPOSAL_ACCEPTED]


def said_of(peer: Peer, other: Peer, since: int, *names: EventName) -> list[Event]:
    """Such events that name the other one, after its first `since` events."""
    return [
        event
        for event in peer.events()[since:]
        if event["event"] in names and other.peer_id in (event.get("remote"), event.get("partner"))
    ]


def gave_up_at_once(peer: Peer, other: Peer, since: int) -> bool:
    """Whether the other one was gone before it had sent anything: then it costs no round."""
    refused = said_of(peer, other, since, EventName.PROPOSAL_REFUSED)
    return any(event["reason"] == "withdrawn" for event in refused)


def has_ended(peer: Peer, other: Peer, since: int) -> bool:
    """Whether the peer's exchange with the other one is over."""
    ends = (EventName.ROUND_AVERAGED, EventName.ROUND_SKIPPED)
    return bool(said_of(peer, other, since, *ends)) or gave_up_at_once(peer, other, since)


@pytest.mark.long
def test_a_peer_killed_in_mid_exchange_costs_its_partner_one_round(swarm: Swarm) -> None:
    *others, victim = swarm.at_least(4)
    wait_seen_by(others, victim)
    wait_rounds(others, NUM_ROUNDS)
    before = {peer: (len(peer.events()), closed_s(peer)[-NUM_ROUNDS - 1 :]) for peer in others}
    partner, since = stop_in_exchange(victim, others)
    victim.kill()
    partner.wait_for("its exchange ends", lambda: has_ended(partner, victim, since))
    costs_a_round = not gave_up_at_once(partner, victim, since)
    wait_rounds(others, NUM_ROUNDS)
    for peer in others:
        count, times = before[peer]
        because = [event for event in skips(peer, count) if event["partner"] == victim.peer_id]
        assert len(because) == (peer is partner and costs_a_round), peer.report()
        assert {event["reason"] for event in because} <= LOST
        peer.wait_averaging()
        after = lasted_s([time for time in closed_s(peer) if time >= times[-1]])
        assert statistics.median(after) <= GROWTH * statistics.median(lasted_s(times))
        assert max(after) <= GROWTH * max(lasted_s(times)) + NOTICED_S
        assert victim.peer_id not in {told["peer_id"] for told in peer.status()["peers"]}
        assert peer.running


def test_a_killed_p2pd_is_replaced_and_averaging_goes_on(swarm: Swarm) -> None:
    *others, victim = swarm.at_least(3)
    restarts = victim.metric("loco_p2pd_restarts_total")
    dead, count = victim.p2pd(), len(victim.events())
    dead.kill()
    victim.wait_event(EventName.NETWORK_RESTARTED, after=count)
    assert victim.metric("loco_p2pd_restarts_total") == restarts + 1
    assert victim.p2pd().pid != dead.pid
    wait_seen_by([victim], others[0])
    wait_seen_by(others, victim)
    all_averaging([victim, *others], 2)
    assert victim.trainer().is_running()
    assert not victim.events(EventName.TRAINER_DIED)
    assert "Traceback" not in victim.stderr


@pytest.mark.long
def test_a_killed_trainer_is_restarted_from_the_outer_state(swarm: Swarm) -> None:
    *others, victim = swarm.at_least(3)
    restarts = victim.metric("loco_trainer_restarts_total", reason="died")
    unharmed = {peer: len(peer.events()) for peer in others}
    victim.wait_event(EventName.VALIDATED)
    loss_before = victim.events(EventName.VALIDATED)[-1]["loss"]
    count = len(victim.events())
    opened = victim.wait_event(EventName.ROUND_OPENED, after=count)
    victim.trainer().kill()
    died = victim.wait_event(EventName.TRAINER_DIED, after=count)
    assert (died["reason"], "signal 9" in died["detail"]) == ("died", True)
    victim.wait_event(EventName.TRAINER_STARTED, START_S, after=victim.events().index(died))
    again = victim.wait_event(EventName.ROUND_OPENED, after=victim.events().index(died))
    assert again["round"] >= opened["round"]
    victim.wait_for("it is near the others", lambda: rounds_behind(victim, others) <= NEAR_ROUNDS)
    since = victim.events()[victim.events().index(again) :]
    closed = [event for event in since if event["event"] == EventName.ROUND_CLOSED]
    assert len(closed) <= MAX_ROUNDS_OUT_OF_STEP, victim.report()
    assert victim.metric("loco_trainer_restarts_total", reason="died") == restarts + 1
    victim.wait_averaging(2)
    assert victim.events(EventName.VALIDATED)[-1]["loss"] < loss_before + 0.3
    all_averaging(others)
    for peer, seen in unharmed.items():
        harm = {EventName.TRAINER_DIED, EventName.PEER_LOST}
        assert not [event for event in peer.events()[seen:] if event["event"] in harm]


@pytest.mark.long
def test_the_founder_dies_and_the_others_go_on_and_take_in_a_new_one(swarm: Swarm) -> None:
    swarm.at_least(3)
    founder = swarm.founder
    assert founder.running
    others = [peer for peer in swarm.members if peer is not founder]
    founder.kill()
    all_averaging(others, 3)
    joiner = swarm.join(others[-1])
    joiner.wait_averaging(2)
    assert joiner.status()["run_id"] == others[0].status()["run_id"]
    wait_seen_by(others, joiner)
