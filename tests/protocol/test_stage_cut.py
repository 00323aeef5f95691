"""How a model is cut into stages, and which of them a newcomer is needed for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError
from protocol.run.stages import needed_stage, part_of_stage, stage_layers, stage_of_part


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


@pytest.mark.parametrize(
    ("holders", "visited", "needed"),
    [
        ((1, 0, 0), 3, 1),
        ((1, 1, 0), 3, 2),
        ((1, 1, 1), 3, 0),
        ((2, 1, 1), 3, 1),
        ((0, 3, 3), 3, 0),
        ((1, 1, 1), 2, 0),  # half of the relays are visited, so twice as many data peers
        ((2, 1, 1), 2, 0),
    ],
)
def test_a_newcomer_takes_the_stage_that_has_fewest_for_its_share(holders, visited, needed):
    assert needed_stage(holders, visited) == needed


def test_a_swarm_grows_to_the_published_shares():
    """SkipPipe's settings: 5 data peers and 3 relays a stage (6 stages, 4 visited), and 6 and 4."""
    for stages, visited, shares in ((6, 4, [5, 3, 3, 3, 3, 3]), (4, 3, [6, 4, 4, 4])):
        holders = [1, *[0] * (stages - 1)]
        while sum(holders) < sum(shares):
            holders[needed_stage(holders, visited)] += 1
        assert holders == shares
