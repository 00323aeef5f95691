"""A lost stage is made of its neighbours, layer by layer, as CheckFree says."""

import numpy as np
import pytest

from peer.state.rebuilt_stage import Neighbour, rebuild
from protocol.run.layout import Layout, stage_layouts

SIZE = 4
FIRST = 9.0


def whole(layers):
    ends = {"model.embed_tokens.weight": (SIZE,), "model.norm.weight": (SIZE,)}
    parts = ("mlp.weight", "norm.weight")
    inside = {f"model.layers.{n}.{part}": (SIZE,) for n in range(layers) for part in parts}
    return Layout.from_shapes(ends | inside)


def filled(layout):
    """Each value is its layer's number, a half more in norms."""
    vector_P = np.zeros(layout.padded_parameters, np.float32)
    for entry in layout.entries:
        words = entry.name.split(".")
        if words[1] == "layers":
            value = int(words[2]) + (0.5 if words[3] == "norm" else 0.0)
            vector_P[entry.offset : entry.offset + entry.size] = value
    return vector_P


def neighbour(layout, norm):
    return Neighbour(layout, filled(layout), norm)


def layer_values(layout, vector_P, part):
    return {
        int(entry.name.split(".")[2]): set(
            vector_P[entry.offset : entry.offset + entry.size].tolist()
        )
        for entry in layout.entries
        if entry.name.endswith(part) and "layers" in entry.name
    }


@pytest.mark.parametrize(
    ("norms", "of_layer_2"),
    [
        ((1.0, 1.0), 2.0),
        ((1.0, 3.0), (1 * 0 + 9 * 4) / 10),
        ((0.0, 0.0), 2.0),
        ((0.0, 5.0), 4.0),
    ],
)
def test_two_neighbours_count_by_the_squares_of_their_norms(norms, of_layer_2):
    before, lost, after = stage_layouts(whole(6), 3)
    vector_P = np.full(lost.padded_parameters, FIRST, np.float32)
    assert rebuild(lost, vector_P, [neighbour(before, norms[0]), neighbour(after, norms[1])]) == []
    plain = layer_values(lost, vector_P, "mlp.weight")
    assert plain == {2: {np.float32(of_layer_2)}, 3: {np.float32(of_layer_2 + 1)}}
    norm = layer_values(lost, vector_P, "layers.2.norm.weight")
    assert norm == {2: {np.float32(of_layer_2 + 0.5)}}


def test_the_last_stage_copies_the_one_before():
    before, lost = stage_layouts(whole(4), 2)
    vector_P = np.full(lost.padded_parameters, FIRST, np.float32)
    assert rebuild(lost, vector_P, [neighbour(before, 0.25)]) == []
    assert layer_values(lost, vector_P, "mlp.weight") == {2: {0.0}, 3: {1.0}}


def test_stages_of_other_lengths_answer_in_proportion():
    _, lost, after = stage_layouts(whole(7), 3)  # 2, 2 and 3 layers
    assert len(layer_values(after, filled(after), "mlp.weight")) == 3
    vector_P = np.full(after.padded_parameters, FIRST, np.float32)
    rebuild(after, vector_P, [neighbour(lost, 1.0)])
    assert layer_values(after, vector_P, "mlp.weight") == {4: {2.0}, 5: {2.0}, 6: {3.0}}


def test_the_ends_of_the_model_keep_their_first_values():
    lost, after = stage_layouts(whole(4), 2)
    vector_P = np.full(lost.padded_parameters, FIRST, np.float32)
    kept = rebuild(lost, vector_P, [neighbour(after, 1.0)])
    assert kept == ["model.embed_tokens.weight", "model.norm.weight"]
    for entry in lost.entries:
        if entry.name in kept:
            assert set(vector_P[entry.offset : entry.offset + entry.size]) == {FIRST}
