"""How a model is cut into stages, and which of them a newcomer is needed for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError
from protocol.run.layout import part_of_stage, stage_layers, stage_of_part


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_every_layer_is_in_one_stage_and_stages_are_even(sizes):
    layers, stages = sizes
    cut = [stage_layers(layers, stages, stage) for stage in range(stages)]
    assert [layer for each in cut for layer in each] == list(range(layers))
    lengths = [len(each) for each in cut]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[0] == min(lengths)


def test_a_cut_that_cannot_be_is_refused():
    with pytest.raises(LocalProtocolError, match="3 layers cannot be cut into 4"):
        stage_layers(3, 4, 0)
    with pytest.raises(LocalProtocolError, match="no stage 2 of 2"):
        stage_layers(4, 2, 2)


def test_parts_are_named_by_their_stage():
    assert [stage_of_part(part_of_stage(stage)) for stage in (0, 7)] == [0, 7]
    assert stage_of_part("model") is None
    assert stage_of_part("fragment/3") is None
