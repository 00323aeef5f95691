"""Rounds by the line with real processes: behind a thin line they become longer."""

import pytest
from swarm import RUN_SPEC, START_S, open_swarm

from peer.observe.event_names import EventName
from protocol.gossip.round_length import FIRST_INNER_STEPS, MOST_INNER_STEPS

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.e2e]

SPEC = (
    RUN_SPEC.replace("inner_steps = 150", 'inner_steps = "auto"')
    .replace("hidden_size = 32", "hidden_size = 128")
    .replace("intermediate_size = 64", "intermediate_size = 256")
)
THIN_MBPS = "1"
"""A vector of this model takes more than a second, which is many of its steps."""


def test_rounds_fit_a_thin_line(tmp_path_factory: pytest.TempPathFactory) -> None:
    with open_swarm(tmp_path_factory.mktemp("chosen"), SPEC) as swarm:
        thin = swarm.environment | {"LOCO_MAX_UPLOAD_MBPS": THIN_MBPS}
        founder = swarm.found(environment=thin)
        joiner = swarm.join(founder)
        for peer in (founder, joiner):
            chosen = peer.wait_event(EventName.ROUND_LENGTH_CHANGED, START_S)
            assert chosen["before"] == FIRST_INNER_STEPS
            assert FIRST_INNER_STEPS < chosen["inner_steps"] <= MOST_INNER_STEPS
            after = chosen["round"] + 3
            peer.wait_event(EventName.ROUND_AVERAGED, START_S, round=after)
            opened = peer.wait_event(EventName.ROUND_OPENED, START_S, round=after)
            assert opened["quota"] > FIRST_INNER_STEPS
            assert peer.status()["chosen_inner_steps"] >= FIRST_INNER_STEPS
            assert peer.metric("loco_inner_steps_per_average") >= FIRST_INNER_STEPS
