"""Streaming gossip with real processes: fragments find partners, a killed peer holds nobody up."""

from collections.abc import Iterator

import pytest
from swarm import RUN_SPEC, START_S, Peer, Swarm, open_swarm

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

FRAGMENTS = range(3)
SPEC = RUN_SPEC.replace("num_layers = 1", "num_layers = 2").replace(
    "[sync]", '[sync]\nmethod = "streaming"\nstreaming = { blocks_per_fragment = 1 }'
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with open_swarm(tmp_path_factory.mktemp("pairs"), SPEC) as swarm:
        swarm.found()
        yield swarm


def averages(peer: Peer, fragment: int, partner: Peer) -> int:
    return sum(
        (event["fragment"], event["partner"]) == (fragment, partner.peer_id)
        for event in peer.events(EventName.ROUND_AVERAGED)
    )


def wait_averages(peer: Peer, partner: Peer) -> None:
    """Until each fragment has been averaged with that peer once more."""
    for fragment in FRAGMENTS:
        before = averages(peer, fragment, partner)
        more = lambda fragment=fragment, before=before: averages(peer, fragment, partner) > before
        peer.wait_for(f"an average of fragment {fragment}", more, START_S)


def test_fragments_find_partners_and_a_killed_peer_holds_nobody_up(pairs: Swarm) -> None:
    a, b, c = pairs.at_least(3)
    for peer, partner in ((a, b), (b, c), (c, a)):
        wait_averages(peer, partner)
    assert a.metric("loco_outer_rounds_total", outcome="averaged") >= len(FRAGMENTS)
    c.kill()
    wait_averages(a, b)
    closed = a.events(EventName.ROUND_CLOSED)[-1]["round"]
    a.wait_event(EventName.ROUND_CLOSED, START_S, round=closed + 2)
    assert a.events(EventName.TRAINER_DIED) == b.events(EventName.TRAINER_DIED) == []
