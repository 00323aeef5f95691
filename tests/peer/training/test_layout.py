"""The order of the flat vector."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.run.layout import ALIGNMENT, Layout

SHAPES = st.dictionaries(
    st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8),
    st.lists(st.integers(1, 20), min_size=0, max_size=3).map(tuple),
    min_size=1,
    max_size=8,
)


@given(SHAPES)
def test_tensors_stand_sorted_aligned_and_apart(shapes):
    layout = Layout.from_shapes(shapes)
    assert [entry.name for entry in layout.entries] == sorted(shapes)
    end = 0
    for entry in layout.entries:
        assert entry.offset == end
        assert entry.offset % ALIGNMENT == 0
        end = entry.offset + entry.padded_size
        assert 0 <= entry.padded_size - entry.size < ALIGNMENT
    assert layout.padded_parameters == end
    assert layout.parameters == sum(entry.size for entry in layout.entries)


@given(SHAPES)
def test_the_digest_does_not_depend_on_the_order_of_arrival(shapes):
    backwards = dict(reversed(shapes.items()))
    assert Layout.from_shapes(shapes).digest == Layout.from_shapes(backwards).digest


@pytest.mark.parametrize("other", [{"a": (2, 4), "b": (8,)}, {"a": (4, 2), "c": (8,)}])
def test_the_digest_tells_names_and_shapes_apart(other):
    assert Layout.from_shapes({"a": (4, 2), "b": (8,)}).digest != Layout.from_shapes(other).digest


def test_the_digest_stays_as_it_is():
    digest = Layout.from_shapes({"a": (4, 2), "b": (8,)}).digest
    assert digest == "2548cdf5e25b92224d848daa2b0d9d1a"


@pytest.mark.parametrize("shapes", [{}, {"a": (0, 3)}])
def test_nothing_to_lay_out_is_refused(shapes):
    with pytest.raises(ValueError, match="values|without parameters"):
        Layout.from_shapes(shapes)
