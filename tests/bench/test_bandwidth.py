"""The bandwidth simulator, against utilisations that can be worked out by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from bench.bandwidth.intellect1 import SITES
from bench.bandwidth.methods import (
    DATA_PARALLEL,
    DILOCO,
    INNER_STEPS,
    MODELS,
    NOLOCO,
    NOLOCO_WAITING,
    OVERLAPPED,
    OVERLAPPED_FP4,
    STREAMING,
    Reading,
    fragments_at,
    our_curves,
    paper_curves,
)
from bench.bandwidth.simulator import Kind, Model, Sends, nodes_of_step, utilisation
from bench.bandwidth.table import (
    GRID_GBIT_S,
    PAPER_GBIT_S,
    Cell,
    cells,
    nearest_point,
    needed,
    reversed_pairs,
    swapped_methods,
)

SMALL = Model("small", layers=6, step_s=0.1, parameters=1e8)
LINK_GBIT_S = np.logspace(-2, 3, 30)
ENDLESS_GBIT_S = np.array([1e12])


def test_a_step_has_a_node_less_than_four_per_layer():
    nodes = nodes_of_step(24)
    assert len(nodes) == len(set(nodes)) == 4 * 24 - 1
    assert Counter(kind for kind, _ in nodes)[Kind.BACKWARD_ACTIVATIONS] == 23


def test_one_layer_overlaps_nothing():
    model = replace(SMALL, layers=1)
    sends = Sends(16, ((0,),))
    expected = 0.1 / (0.1 + 1.6 / LINK_GBIT_S)
    assert utilisation(model, sends, LINK_GBIT_S) == pytest.approx(expected)


def test_waiting_for_all_after_the_step_is_the_closed_form_of_diloco():
    idle = ((),) * (INNER_STEPS - 1)
    sends = Sends(16, (*idle, tuple(range(6))), after_step=True)
    expected = 10.0 / (10.0 + 1.6 / LINK_GBIT_S)
    assert utilisation(SMALL, sends, LINK_GBIT_S) == pytest.approx(expected)


def test_layers_that_leave_early_travel_while_shallower_ones_compute():
    """Two layers: F0 F1 B1 W1 W0 of 1 s each; R1 of 0.8 s is hidden behind W0, R0 is not."""
    model = Model("two layers", layers=2, step_s=5.0, parameters=2e9)
    sends = Sends(0.8, ((0, 1),))
    assert utilisation(model, sends, np.array([1.0])) == pytest.approx(5.0 / 5.8)


def test_reductions_wait_for_the_link():
    """The same with R of 1.5 s: R1 lasts until 0.5 s after W0, then R0."""
    model = Model("two layers", layers=2, step_s=5.0, parameters=2e9)
    sends = Sends(1.5, ((0, 1),))
    assert utilisation(model, sends, np.array([1.0])) == pytest.approx(5.0 / 7.0)


def test_a_deep_layer_alone_has_until_its_own_forward_node():
    """Four layers, 11 nodes of 1 s: from W3 to F3 of the next step, 5 + 3 nodes lie."""
    model = Model("four layers", layers=4, step_s=11.0, parameters=4e9)
    sends = Sends(9.0, ((3,),))
    assert utilisation(model, sends, np.array([9.0 / 8.0, 1.0])) == pytest.approx([1.0, 11 / 12])


def test_a_delay_of_one_step_hides_a_step():
    sends = Sends(16, ((0,), (), ()), delay_steps=1, after_step=True)
    layer_gbit = 16 * 1e8 / 6 / 1e9
    fits_gbit_s = layer_gbit / SMALL.step_s
    found = utilisation(SMALL, sends, fits_gbit_s * np.array([1.0, 0.5]))
    assert found == pytest.approx([1.0, 3 / 4])


def all_curves(model):
    return paper_curves(model, Reading()) | our_curves(model, peers=8, delay_steps=1)


@pytest.mark.parametrize("name", all_curves(SMALL))
def test_an_endless_link_keeps_everybody_busy(name):
    assert all_curves(SMALL)[name](ENDLESS_GBIT_S) == pytest.approx(1.0)


@pytest.mark.parametrize("name", all_curves(SMALL))
def test_more_bandwidth_never_hurts(name):
    found = all_curves(SMALL)[name](LINK_GBIT_S)
    assert np.all(np.diff(found) >= -1e-12)
    assert found[0] < found[-1] <= 1 + 1e-12


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        (DATA_PARALLEL, DILOCO),
        (STREAMING, OVERLAPPED),
        (OVERLAPPED, OVERLAPPED_FP4),
        (NOLOCO_WAITING, NOLOCO),
    ],
)
def test_each_change_of_the_method_helps_at_every_bandwidth(worse, better):
    curves = all_curves(SMALL)
    assert np.all(curves[worse](LINK_GBIT_S) <= curves[better](LINK_GBIT_S) + 1e-12)


def test_noloco_waits_or_keeps_its_rounds_until_the_vector_takes_longer():
    vector_s = 8.125 * 1e8 / 1e9 / LINK_GBIT_S
    curves = our_curves(SMALL, peers=2, delay_steps=1)
    assert curves[NOLOCO_WAITING](LINK_GBIT_S) == pytest.approx(10 / (10 + vector_s))
    assert curves[NOLOCO](LINK_GBIT_S) == pytest.approx(np.minimum(1, 10 / vector_s))


@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_fragments_hold_each_layer_once_in_a_round(model, strided):
    at = fragments_at(model.layers, strided=strided)
    assert len(at) == INNER_STEPS
    assert sorted(layer for layers in at for layer in layers) == list(range(model.layers))


def test_fragments_have_the_distances_of_the_table():
    for model, apart in zip(MODELS, (11, 5, 2), strict=True):
        at = fragments_at(model.layers, even=False)
        assert [step for step, layers in enumerate(at) if layers][:3] == [0, apart, 2 * apart]
    assert fragments_at(24)[0] == (0, 8, 16)
    assert fragments_at(24, strided=False)[11] == (3, 4, 5)


def test_the_paper_s_values_lie_on_the_grid():
    values = [v for models in PAPER_GBIT_S.values() for row in models.values() for v in row]
    assert len(values) == 75
    for value in values:
        assert GRID_GBIT_S[nearest_point(value)] == pytest.approx(value, abs=0.06)


def test_a_level_is_read_below_and_where_it_is_crossed():
    found = list(needed(lambda gbit_s: gbit_s / (gbit_s + 10.0)))
    for level, point, exact_gbit_s in found:
        assert exact_gbit_s == pytest.approx(10 * level / (1 - level), rel=1e-3)
        assert GRID_GBIT_S[point] < exact_gbit_s <= GRID_GBIT_S[point + 1]


def test_a_level_beyond_the_grid_is_refused():
    with pytest.raises(ValueError, match="50%"):
        list(needed(lambda gbit_s: 0.4 + 0 * gbit_s))


def cell(method, paper, ours, exact_gbit_s):
    return Cell(method, "1B", 0.5, paper, ours, exact_gbit_s)


def test_an_order_is_reversed_only_when_both_tell_an_order():
    low, high = cell("a", 3, 4, 1.0), cell("b", 5, 4, 0.9)
    assert reversed_pairs([low, high]) == []
    assert swapped_methods([low, high]) == [(low, high)]
    assert reversed_pairs([low, replace(high, ours=3)]) == [(low, replace(high, ours=3))]
    assert swapped_methods([low, replace(high, model="10B")]) == []


def test_intellect1_s_seconds_give_its_utilisation():
    for site in SITES:
        assert site.counted == pytest.approx(site.reported, abs=0.002)
        assert site.noloco_waiting > site.counted
        assert site.noloco == 1.0


def test_a_cell_says_how_far_it_is_from_the_paper():
    assert cell("a", 3, 3, 1.0).ratio == 1.0
    assert cell("a", 3, 4, 1.0).ratio == pytest.approx(GRID_GBIT_S[4] / GRID_GBIT_S[3])
    assert cell("a", 3, 1, 1.0).steps == -2


@pytest.mark.slow
def test_the_paper_s_table_comes_out_in_its_order():
    found = cells(Reading())
    assert len(found) == 75
    assert max(abs(one.steps) for one in found) == 1
    assert reversed_pairs(found) == swapped_methods(found) == []
