"""Plans that differ are counted against those of the data peers that are there."""

from peer.facts import Facts
from peer.stages.exchange import OtherPlans
from protocol.wire.stage_messages import Direction, Hop, Microbatch, Path


def hop(origin: str, plan: str) -> Hop:
    return Hop(Microbatch(origin, 1, 1), Direction.FORWARD, Path(("relay",), (1,), plan), 1)


def test_a_data_peer_that_is_gone_has_no_plan_any_more() -> None:
    facts = Facts("relay", 1)
    plans = OtherPlans(facts)
    plans.count(hop("a", "old"), {"a", "b"})
    plans.count(hop("b", "old"), {"a", "b"})
    plans.count(hop("b", "new"), {"a", "b"})
    assert facts.pipeline.other_plans == 1
    for _ in range(3):
        plans.count(hop("b", "new"), {"b"})
    assert facts.pipeline.other_plans == 1
