"""Relays of a real pipeline are killed again and again: nearly nothing of what was begun is lost.

Goodput, here: of the gradients that were begun, how many moved a stage's weights, for each stage.
The data peer's `status` tells: what was `done` without what was `gone`, over what was `begun`.
"""

import signal
import time
from collections.abc import Iterator, Mapping

import pytest
from swarm import INNER_STEPS, RUN_SPEC, START_S, Peer, Swarm, none_blamed, open_swarm

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.e2e]

KILLS = 3
CHURN_S = 30.0
"""No kill after so long, since the first."""
GOODPUT = 0.95
MICROBATCHES_ON = 12
"""Begun after a kill before it counts as gone on."""
SPEC = (
    RUN_SPEC.replace("num_layers = 1", "num_layers = 2").replace(
        "total_steps = 1000000", "total_steps = 1000000\nmicro_batch = 1"
    )
    + "\n[pipeline]\nstages = 2\n"
).replace(f"inner_steps = {INNER_STEPS}", "inner_steps = 20")


@pytest.fixture
def pipeline(tmp_path) -> Iterator[Swarm]:
    with open_swarm(tmp_path, SPEC) as swarm:
        yield swarm


def counts(peer: Peer) -> Mapping[str, int]:
    found: Mapping[str, int] = peer.status()["microbatches"]
    return found


def goes_on(data_peer: Peer) -> None:
    """Wait until the data peer has begun and ended more."""
    before = counts(data_peer)

    def has_gone_on() -> bool:
        now = counts(data_peer)
        begun = now["begun"] - before.get("begun", 0)
        ended = now.get("done", 0) - before.get("done", 0)
        return begun > MICROBATCHES_ON and ended > MICROBATCHES_ON

    data_peer.wait_for("microbatches to go on", has_gone_on, START_S)


def holds_relay(peer: Peer) -> bool:
    return bool(peer.status()["part"] == "stage/1")


def test_killed_relays_cost_next_to_nothing(pipeline: Swarm) -> None:
    pipeline.folder("run.toml").write_text(SPEC)
    data_peer = pipeline.launch("founder0", "start", str(pipeline.folder("run.toml")))
    data_peer.wait_event(EventName.TRAINER_STARTED, START_S)
    relays = []
    for name in ("relay1", "data2", "relay3"):
        peer = pipeline.join(data_peer, name)
        peer.wait_event(EventName.TRAINER_STARTED, START_S)
        assert holds_relay(peer) == name.startswith("relay")
        relays += [peer] if holds_relay(peer) else []
    goes_on(data_peer)

    began_s = time.monotonic()
    for kill in range(KILLS):
        if time.monotonic() > began_s + CHURN_S:
            break
        relay = relays[kill % 2]
        relay.signal_all(signal.SIGKILL)
        goes_on(data_peer)
        relays[kill % 2] = pipeline.join(data_peer, relay.name)
        relays[kill % 2].wait_event(EventName.TRAINER_STARTED, START_S)
        goes_on(data_peer)

    now = counts(data_peer)
    in_flight = now["begun"] - now["done"] - now.get("lost", 0)
    assert 0 <= in_flight <= 8
    assert now["done"] >= GOODPUT * now["begun"]
    assert now["done"] - now.get("gone", 0) >= GOODPUT * now["begun"]
    assert now.get("again", 0) + now.get("mended", 0) > 0
    none_blamed([data_peer, *relays])
    print(dict(now), [dict(counts(relay)) for relay in relays])
