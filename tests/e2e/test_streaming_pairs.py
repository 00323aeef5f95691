"""Streaming gossip with real processes: fragments find partners, a killed peer holds nobody up."""

from collections.abc import Iterator, Sequence

import pytest
from swarm import INNER_STEPS, RUN_SPEC, START_S, Peer, Swarm, open_swarm

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

FRAGMENTS = {0, 1, 2}
SPEC = (
    RUN_SPEC.replace("num_layers = 1", "num_layers = 2")
    .replace("[sync]", '[sync]\nmethod = "streaming"\nstreaming = { blocks_per_fragment = 1 }')
    .replace(f"= {INNER_STEPS}", "= 60")
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with open_swarm(tmp_path_factory.mktemp("pairs"), SPEC) as swarm:
        swarm.found()
        yield swarm


def averages(peer: Peer) -> list[tuple[int, str]]:
    """Fragment and partner of each."""
    averaged = peer.events(EventName.ROUND_AVERAGED)
    return [(event["fragment"], event["partner"]) for event in averaged]


def wait_averages(peer: Peer, partners: Sequence[Peer]) -> None:
    """Until it has averaged each fragment with one of them once more."""
    before, ids = len(averages(peer)), {partner.peer_id for partner in partners}

    def more() -> bool:
        found = averages(peer)[before:]
        return {fragment for fragment, partner in found if partner in ids} == FRAGMENTS

    peer.wait_for("an average of each fragment", more, START_S)


@pytest.mark.long
def test_fragments_find_partners_and_a_killed_peer_holds_nobody_up(pairs: Swarm) -> None:
    a, b, c = pairs.at_least(3)
    for peer in (a, b, c):
        wait_averages(peer, (a, b, c))
    assert a.metric("loco_outer_rounds_total", outcome="averaged") >= len(FRAGMENTS)
    c.kill()
    wait_averages(a, (b,))
    closed = a.events(EventName.ROUND_CLOSED)[-1]["round"]
    a.wait_event(EventName.ROUND_CLOSED, START_S, round=closed + 2)
    assert a.events(EventName.TRAINER_DIED) == b.events(EventName.TRAINER_DIED) == []
