"""Homes of an earlier loco-peer come back at their step, in each way of averaging."""

from collections.abc import Iterator

import pytest
from recorded_homes import RECORDED, Recorded
from swarm import START_S, Peer, Swarm, open_swarm

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture
def homes(tmp_path) -> Iterator[Swarm]:
    with open_swarm(tmp_path) as swarm:
        yield swarm


def back(homes: Swarm, *names: str) -> list[tuple[Peer, Recorded]]:
    """The peers of these homes, started as their users would after an upgrade."""
    recorded = [each for each in RECORDED if each.name in names]
    for each in recorded:
        each.unpack(homes.folder("."))
    return [(homes.launch(each.name, "start", "--alone"), each) for each in recorded]


@pytest.mark.parametrize(
    "names",
    [
        ("pairs-a",),
        pytest.param(("diloco-a",), marks=pytest.mark.long),
        pytest.param(("stages-a", "stages-b"), marks=pytest.mark.long),
    ],
    ids=lambda names: names[0].removesuffix("-a"),
)
def test_a_recorded_home_comes_back_at_its_step_and_trains_on(
    homes: Swarm, names: tuple[str, ...]
) -> None:
    for peer, recorded in back(homes, *names):
        resumed = peer.wait_event(EventName.RUN_RESUMED, START_S)
        assert resumed["step"] == recorded.step
        closed = peer.wait_event(EventName.ROUND_CLOSED, START_S)
        assert closed["step"] > recorded.step
        assert peer.status()["run_id"] == recorded.run_id
