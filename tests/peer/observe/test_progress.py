"""The line that says how far a run is."""

import pytest

from peer.observe.progress import RunProgress, duration, progress_line

NOW = RunProgress(110, 1200, 0.01, 2900.0, 8400.0, 372.0, 4)


def test_the_line_says_how_far_the_run_is() -> None:
    assert progress_line(NOW, 2.314, None) == (
        "step 110 of 1,200 (9%), loss 2.31, 2,900 tokens/s (swarm 8,400), 6 min left, 4 peers"
    )


def test_what_is_unknown_is_left_out() -> None:
    stage = RunProgress(step=110, total_steps=1200, peers=1)
    assert progress_line(stage, None, None) == "step 110 of 1,200 (9%), 1 peer"
    assert progress_line(RunProgress(), None, None) == "step -, 0 peers"


def test_the_held_out_loss_stands_beside() -> None:
    assert "loss 2.31 (held out 2.40)," in progress_line(NOW, 2.31, 2.4)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2.0 h"), (172_800, "2.0 days")],
)
def test_durations_are_short(seconds: float, said: str) -> None:
    assert duration(seconds) == said
