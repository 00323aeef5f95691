"""Peers that never lived."""

from typing import Any

from demo.reading import Carried, Reading
from demo.summary import Finished
from peer.facts import PeerState
from peer.observe.status import Outcomes, PeerStatus, Status
from protocol.outcomes import SkipReason

PARAMETERS = 1_000_000


def reading(name="peer-1", *, step=30, state=PeerState.TRAINING, peers=(), part="model", **changes):
    status = Status(
        peer_id=f"12D3Koo{name}",
        run_id="ab",
        state=state,
        round=step // 10,
        step=step,
        tokens=1024 * step,
        train_loss=2.5,
        validation_loss=2.25,
        outcomes=Outcomes(3, {SkipReason.NO_PARTNER: 1, SkipReason.DEADLINE: 0}),
        peers=peers,
        part=part,
    )
    values: dict[str, Any] = {
        "tokens_per_s": 5000.0,
        "carried": Carried(2_000_000, 3_000_000),
    } | changes
    return Reading(name, status, **values)


def guest(peer_id="12D3KooWguestguest"):
    return PeerStatus(peer_id, "training", 2, 0.001)


def ended(
    name="a",
    *,
    loss=1.8,
    has_data=True,
    tokens=800_000,
    averaged=80,
    averaging_bytes=81_000_000,
):
    return Finished(
        peer_id=name,
        parameters=PARAMETERS,
        rounds=averaged + 2,
        averaged=averaged,
        skipped={"no_partner": 2},
        has_data=has_data,
        tokens=tokens,
        validation_loss=loss,
        averaging_bytes=averaging_bytes,
        total_bytes=averaging_bytes + 1000,
    )
