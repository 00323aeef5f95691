"""What the runs of one peer alone say of the tokens that it needs."""

import pytest

from bench.lone_tokens import note, preset_rate, with_rate
from demo.plan import Plan
from demo.reading import Point

ENDS = [Point(100_000, 1.7), Point(200_000, 1.5), Point(300_000, 1.4)]


@pytest.mark.parametrize(
    ("worst", "needed"),
    [(1.45, "250,000"), (1.6, "150,000"), (1.3, "more than 300,000")],
)
def test_between_two_runs_losses_lie_on_a_straight_line(worst: float, needed: str) -> None:
    assert f": {needed} tokens" in note(0.012, ENDS, worst)


def test_only_the_rate_is_another() -> None:
    spec = Plan().lone_spec(300_000)
    changed = with_rate(spec, preset_rate())
    assert changed.optimizer.muon is not None
    assert changed.optimizer.muon.learning_rate == 8e-3
    assert changed.model_copy(update={"optimizer": spec.optimizer}) == spec
