"""Which part of the flat vector each rank moves."""

from itertools import pairwise

import pytest

from peer.training.ranks.group import parts_of
from peer.training.ranks.spans import ADAMW_WORK, spans_of
from protocol.run.layout import ALIGNMENT, Layout

LAYOUT = Layout.from_shapes(
    {"embed": (1000, 64), "norm": (64,)}
    | {
        f"layers.{layer}.{name}": (64, 64 * n)
        for layer in range(6)
        for n, name in ((1, "q"), (3, "up"))
    }
)
MATRICES = {entry.offset: entry for entry in LAYOUT.entries if "layers" in entry.name}


@pytest.mark.parametrize("muon", [(), MATRICES], ids=["adamw", "muon"])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_spans_cover_the_vector_and_cut_no_matrix_of_muons(count, muon):
    spans = spans_of(LAYOUT, count, muon)
    assert len(spans) == count
    assert (spans[0].start, spans[-1].stop) == (0, LAYOUT.padded_parameters)
    assert all(one.stop == other.start for one, other in pairwise(spans))
    cuts = [span.start for span in spans]
    assert not any(cut % ALIGNMENT for cut in cuts)
    for offset in muon:
        inside = range(offset + 1, offset + MATRICES[offset].padded_size)
        assert not any(cut in inside for cut in cuts)


def test_spans_are_of_equal_work():
    sizes = [span.stop - span.start for span in spans_of(LAYOUT, 4, ())]
    assert max(sizes) - min(sizes) <= ALIGNMENT
    work = [
        64 if entry.offset in MATRICES else ADAMW_WORK
        for entry in LAYOUT.entries
        for _ in range(entry.padded_size)
    ]
    first, second = (sum(work[span]) for span in spans_of(LAYOUT, 2, MATRICES))
    assert first == pytest.approx(second, rel=0.1)


@pytest.mark.parametrize("muon", [(), MATRICES], ids=["adamw", "muon"])
def test_spans_by_size_are_of_equal_length_but_for_a_matrix(muon):
    sizes = [span.stop - span.start for span in spans_of(LAYOUT, 3, muon, by_size=True)]
    most = max(entry.padded_size for entry in MATRICES.values()) if muon else ALIGNMENT
    assert max(sizes) - min(sizes) <= 2 * most
    by_work = [span.stop - span.start for span in spans_of(LAYOUT, 3, MATRICES)]
    assert max(by_work) - min(by_work) > 2 * most or not muon


def test_a_vector_shorter_than_the_ranks_leaves_some_with_nothing():
    short = Layout.from_shapes({"a": (2, 100)})
    sizes = [span.stop - span.start for span in spans_of(short, 4, ())]
    assert (sum(sizes), max(sizes)) == (short.padded_parameters, ALIGNMENT)


def test_the_parts_of_a_leaf_are_places_in_it():
    assert parts_of(slice(100, 200), (slice(0, 150), slice(150, 300), slice(300, 400))) == [
        slice(0, 50),
        slice(50, 100),
        slice(200, 200),
    ]
