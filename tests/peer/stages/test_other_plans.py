"""Plans that differ are counted against those of the data peers that are there."""

from peer.facts import Facts
from peer.stages.exchange import OtherPlans
from protocol.microbatch.trip import Leg, Microbatch, Trip


def trip(origin: str, plan: str) -> Trip:
    return Trip(Microbatch(origin, 1, 1), Leg.FORWARD, ("relay",), 1, (1,), plan)


def test_a_data_peer_that_is_gone_has_no_plan_any_more() -> None:
    facts = Facts("relay", 1)
    plans = OtherPlans(facts)
    plans.look(trip("a", "old"), {"a", "b"})
    plans.look(trip("b", "old"), {"a", "b"})
    plans.look(trip("b", "new"), {"a", "b"})
    assert facts.pipeline.other_plans == 1
    for _ in range(3):
        plans.look(trip("b", "new"), {"b"})
    assert facts.pipeline.other_plans == 1
