"""The parts of bench.outer_codes that decide what its figures mean."""

from dataclasses import replace

import pytest
import torch
from small_texts import small_texts

from bench import outer_codes
from bench.quality.outer_gradients import outer_gradients
from bench.quality.settings import SMOKE
from bench.quality.tails import Tails, known_spreads, median_peak, parts_of
from bench.quality.world import World
from peer.codec import BLOCK, get_codec
from protocol.run.layout import Layout

P = 4 * BLOCK


def _rounds(count: int, replicas: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(replicas, P, generator=generator) for _ in range(count)]


def _layout() -> Layout:
    return Layout.from_shapes(
        {
            "embed_tokens": (P // 4,),
            "layers.0.post_attention_layernorm": (P // 4,),
            "layers.0.self_attn.q": (P // 4,),
            "layers.0.mlp.up": (P // 4,),
        }
    )


def test_without_a_code_there_is_no_error() -> None:
    sender = outer_codes.Sender(get_codec("fp32"), 0.0)
    for deltas_MP in _rounds(3):
        sender.take(deltas_MP)
    found = sender.found()
    assert found["one"] == found["mean"] == 0
    assert found["sum"] < 1e-6
    assert found["cosine"] == pytest.approx(1)


def test_errors_of_the_mean_fall_where_replicas_have_something_in_common() -> None:
    (deltas_MP,) = _rounds(1)
    ratios = []
    for common in (0.0, 3.0):
        sender = outer_codes.Sender(get_codec("int4"), 0.0)
        sender.take(deltas_MP + common * deltas_MP.roll(1)[0])
        ratios.append(sender.found()["mean"] / sender.found()["one"])
    assert ratios[0] == pytest.approx(1, rel=0.1)  # errors halve, and so does the true mean
    assert ratios[1] < 0.7


def test_feedback_helps_the_sum_and_not_the_single_round() -> None:
    rounds = _rounds(12)
    found = {}
    for beta in (0.0, 1.0):
        sender = outer_codes.Sender(get_codec("e3m0"), beta)
        for deltas_MP in rounds:
            sender.take(deltas_MP)
        found[beta] = sender.found()
    assert found[1.0]["sum"] < 0.5 * found[0.0]["sum"]
    assert found[1.0]["one"] > found[0.0]["one"]


def test_kinds_of_tensors_do_not_overlap_and_leave_nothing_out() -> None:
    entries = _layout().entries
    parts = [part for kind in ("embed", "attn", "mlp", "norm") for part in parts_of(entries, kind)]
    assert sorted((part.start, part.stop) for part in parts) == [
        (start, start + BLOCK) for start in range(0, P, BLOCK)
    ]


def test_peaks_rise_with_the_tails() -> None:
    gauss, laplace, student = (median_peak(x_P) for x_P in known_spreads().values())
    assert 2.4 < gauss < 2.9 < laplace < student


def test_notes_say_where_errors_arise() -> None:
    tails = Tails(_layout().entries)
    (deltas_MP,) = _rounds(1)
    deltas_MP[:, :BLOCK] *= 10
    tails.take(deltas_MP)
    peak, embed, *_ = tails.notes()
    assert "Gauss" in peak
    assert embed.startswith("embed: 97")


def test_rows_have_both_feedbacks_and_goals_compare_them() -> None:
    senders = outer_codes.measure(_rounds(8), Tails(_layout().entries))
    entries = outer_codes.rows({key: [sender.found()] for key, sender in senders.items()})
    assert {row["bits"] for row in entries} == {4.125, 8.125}
    assert [goal.met for goal in outer_codes.goals(entries)] == [True, True]


@pytest.mark.slow
def test_all_replicas_begin_a_round_with_the_same_weights(tmp_path) -> None:
    setting = replace(SMOKE, source=small_texts(tmp_path, 40))
    world = World.open(setting, 0, tmp_path / "cache")
    rounds = list(outer_gradients(world))
    assert len(rounds) == setting.steps // setting.inner_steps
    for deltas_MP in rounds:
        assert deltas_MP.shape[0] == setting.replicas
        assert not torch.equal(deltas_MP[0], deltas_MP[1])
    # What a replica moves by in H steps of AdamW, and no more: phi was taken over by all.
    largest = max(float(deltas_MP.abs().max()) for deltas_MP in rounds)
    assert 0 < largest < 2 * setting.inner_steps * setting.learning_rate
