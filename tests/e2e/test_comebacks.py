"""Who was gone comes back: a machine that slept, and a founder that is started as if it were first.

Bounds, set before anything was measured:
  A peer that falls silent without a word is out of the others' views within FORGOTTEN_S, costs each
  of them at most one round. Whoever was its partner waits until it is silent for SILENCE_S: beyond
  that no round lasts longer than GROWTH times the longest before.
  A peer that comes back averages again. COMEBACK_S is how long a test waits for that on a machine
  that is busy with other things too, not what it takes.
"""

import itertools
import signal
from functools import partial

import pytest
from swarm import Peer, Swarm, port_of, skips

from peer.daemon.links import SILENCE_S
from peer.observe.event_names import EventName

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

FORGOTTEN_S = SILENCE_S + 5.0
GROWTH = 1.5
COMEBACK_S = 120.0


def gaps_s(peer: Peer) -> list[float]:
    """Between the ends of its rounds."""
    closed = [event["monotonic_s"] for event in peer.events(EventName.ROUND_CLOSED)]
    return [later - earlier for earlier, later in itertools.pairwise(closed)]


def sees(peer: Peer, other: Peer) -> bool:
    return other.peer_id in {told["peer_id"] for told in peer.status()["peers"]}


@pytest.mark.long
def test_a_machine_that_falls_asleep_is_forgotten_and_comes_back(swarm: Swarm) -> None:
    *others, sleeper = swarm.at_least(4)
    for peer in others:
        peer.wait_for("it sees the sleeper", partial(sees, peer, sleeper))
    before = {peer: len(peer.events()) for peer in others}
    usual = {peer: gaps_s(peer) for peer in others}
    longest_s = GROWTH * max(itertools.chain(*usual.values())) + SILENCE_S
    sleeper.signal_all(signal.SIGSTOP)
    for peer in others:
        peer.wait_event(
            EventName.PEER_LOST, FORGOTTEN_S, after=before[peer], remote=sleeper.peer_id
        )
        assert not sees(peer, sleeper)
        peer.wait_averaging(2)
        because = [s for s in skips(peer, before[peer]) if s["partner"] == sleeper.peer_id]
        assert len(because) <= 1, peer.report()
        assert max(gaps_s(peer)[len(usual[peer]) :]) <= longest_s, peer.report()
    sleeper.signal_all(signal.SIGCONT)
    sleeper.wait_averaging(2, COMEBACK_S)
    for peer in others:
        peer.wait_for("it sees the sleeper again", partial(sees, peer, sleeper))


@pytest.mark.long
def test_a_founder_started_again_finds_the_swarm_and_takes_its_state(swarm: Swarm) -> None:
    swarm.at_least(3)
    founder = swarm.founder
    listen = f"127.0.0.1:{port_of(founder.address)}"
    if founder.running:
        founder.kill()
    again = swarm.launch(founder.name, "start", str(swarm.folder("run.toml")), listen=listen)
    again.wait_event(EventName.STATE_RECEIVED, COMEBACK_S)
    again.wait_averaging(2, COMEBACK_S)
    assert again.running
    # It may have entered by a new process of its own: who watches it finds it where it was.
    assert again.metric("loco_tokens_total") > 0
