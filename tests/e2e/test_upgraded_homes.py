"""Homes of an earlier loco-peer come back at their step, in each way of averaging."""

from collections.abc import Iterator
from functools import partial

import pytest
from recorded_homes import RECORDED, Recorded
from swarm import START_S, Peer, Swarm, open_swarm

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture
def homes(tmp_path) -> Iterator[Swarm]:
    with open_swarm(tmp_path) as swarm:
        yield swarm


def started_again(homes: Swarm, *names: str) -> list[tuple[Peer, Recorded]]:
    """The peers of these homes, as their users start them after an upgrade, at new addresses."""
    recorded = [each for each in RECORDED if each.name in names]
    peers = list[Peer]()
    for each in recorded:
        each.unpack(homes.folder("."))
        how = ("join", "--bootstrap", peers[0].address) if peers else ("start", "--alone")
        peers.append(homes.launch(each.name, *how))
    return list(zip(peers, recorded, strict=True))


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
    for peer, recorded in started_again(homes, *names):
        resumed = peer.wait_event(EventName.RUN_RESUMED, START_S)
        assert resumed["step"] == recorded.step
        assert peer.status()["run_id"] == recorded.run_id
        peer.wait_for("steps", partial(trains_on, peer, recorded.step), START_S)


def trains_on(peer: Peer, step: int) -> bool:
    """Whether it has closed a round beyond this step."""
    return any(event["step"] > step for event in peer.events(EventName.ROUND_CLOSED))
