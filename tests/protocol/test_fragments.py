"""The fragments partition the model; their schedule is that of the paper."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.fragment.fragments import (
    cut_chunks,
    cut_fragments,
    fragment_layout_digest,
    last_sent,
    offset,
    sends_between,
)
from protocol.limits import MAX_CHUNKS_PER_FRAGMENT
from protocol.run.layout import ALIGNMENT, Layout


def layout_of(num_layers: int) -> Layout:
    shapes = {"model.embed_tokens.weight": (300, 16), "model.norm.weight": (16,)}
    for layer in range(num_layers):
        shapes[f"model.layers.{layer}.mlp.weight"] = (40, 16)
        shapes[f"model.layers.{layer}.norm.weight"] = (16,)
    return Layout.from_shapes(shapes)


def layers_of(layout: Layout, spans: tuple[tuple[int, int], ...]) -> list[int]:
    return sorted(
        {
            int(entry.name.split(".")[2])
            for entry in layout.entries
            for start, stop in spans
            if start <= entry.offset < stop and ".layers." in entry.name
        }
    )


def test_no_two_fragments_of_models_have_one_digest():
    fragments = [
        *cut_fragments(layout_of(6), "strided", 3),
        *cut_fragments(layout_of(6), "whole", 3),
    ]
    digests = [
        fragment_layout_digest(layout, each)
        for layout in ("ab" * 16, "cd" * 16)
        for each in fragments
    ]
    assert len(set(digests)) == len(digests) == 8
    again = cut_fragments(layout_of(6), "strided", 3)[1]
    assert fragment_layout_digest("ab" * 16, again) == digests[1]


@given(
    num_layers=st.integers(0, 13),
    pattern=st.sampled_from(["strided", "sequential", "whole"]),
    blocks_per_fragment=st.integers(1, 5),
)
def test_fragments_partition_the_vector(num_layers, pattern, blocks_per_fragment):
    layout = layout_of(num_layers)
    fragments = cut_fragments(layout, pattern, blocks_per_fragment)
    covered = sorted(span for fragment in fragments for span in fragment.spans)
    assert covered[0][0] == 0
    assert covered[-1][1] == layout.padded_parameters
    assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))
    assert [fragment.index for fragment in fragments] == list(range(len(fragments)))
    for fragment in fragments:
        assert fragment.chunks[0][0] == 0
        assert fragment.chunks[-1][1] == fragment.size


@pytest.mark.parametrize("pattern", ["strided", "sequential", "whole"])
def test_chunks_lie_where_their_fragment_lies(pattern):
    layout = Layout.from_shapes({f"layers.{i}.weight": (9000 + 128 * i,) for i in range(6)})
    for fragment in cut_fragments(layout, pattern, 2):
        values = [value for span in fragment.spans for value in range(*span)]
        assert len(fragment.chunks) > 1
        for chunk, (start, stop) in enumerate(fragment.chunks):
            found = [value for span in fragment.chunk_spans(chunk) for value in range(*span)]
            assert found == values[start:stop]


def test_sequential_takes_neighbours_and_strided_every_nth():
    layout = layout_of(12)
    sequential = cut_fragments(layout, "sequential", 3)[1:]
    strided = cut_fragments(layout, "strided", 3)[1:]
    assert [layers_of(layout, f.spans) for f in sequential] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]
    assert [layers_of(layout, f.spans) for f in strided] == [
        [0, 4, 8],
        [1, 5, 9],
        [2, 6, 10],
        [3, 7, 11],
    ]


def test_uneven_blocks_are_spread():
    layout = layout_of(4)
    for pattern in ("sequential", "strided"):
        fragments = cut_fragments(layout, pattern, 3)[1:]
        assert [len(layers_of(layout, f.spans)) for f in fragments] == [2, 2]


def test_the_first_fragment_holds_what_is_in_no_block():
    layout = layout_of(4)
    first = cut_fragments(layout, "strided", 2)[0]
    assert layers_of(layout, first.spans) == []
    assert first.size == 300 * 16 + (-(300 * 16) % ALIGNMENT) + ALIGNMENT


@given(st.integers(1, 10_000))
def test_chunks_are_even_and_few(blocks):
    chunks = cut_chunks(blocks * ALIGNMENT)
    sizes = [stop - start for start, stop in chunks]
    assert sum(sizes) == blocks * ALIGNMENT
    assert len(chunks) <= MAX_CHUNKS_PER_FRAGMENT
    assert max(sizes) - min(sizes) <= ALIGNMENT
    assert all(size > 0 and size % ALIGNMENT == 0 for size in sizes)


def test_schedule_oracle_of_the_paper():
    """H = 12, three fragments: the sends of the worked example; applied two steps later."""
    sends = [(step, p) for step in range(1, 25) for p, _ in sends_between(step - 1, step, 3, 12)]
    assert sends == [(4, 1), (8, 2), (12, 0), (16, 1), (20, 2), (24, 0)]


def test_two_fragments_alternate_at_half_rounds():
    sends = [(step, p) for step in range(1, 301) for p, _ in sends_between(step - 1, step, 2, 100)]
    assert sends == [(50, 1), (100, 0), (150, 1), (200, 0), (250, 1), (300, 0)]


@given(
    num_fragments=st.integers(1, 9),
    inner_steps=st.integers(9, 60),
    stride=st.integers(1, 25),
)
def test_each_fragment_is_sent_once_in_h_steps_at_any_speed(num_fragments, inner_steps, stride):
    end = 4 * inner_steps
    points = [*range(0, end, stride), end]
    sends = [
        send
        for before, now in itertools.pairwise(points)
        for send in sends_between(before, now, num_fragments, inner_steps)
    ]
    for fragment in range(num_fragments):
        cycles = [cycle for p, cycle in sends if p == fragment]
        late = offset(fragment, num_fragments, inner_steps) > 0
        assert cycles == ([0, 1, 2, 3] if late else [1, 2, 3, 4])


@pytest.mark.parametrize("num_fragments", [1, 3, 7])
def test_offsets_are_spread_evenly(num_fragments):
    offsets = [offset(p, num_fragments, 42) for p in range(num_fragments)]
    assert offsets == [42 // num_fragments * p for p in range(num_fragments)]


@pytest.mark.parametrize("num_fragments", [1, 2, 3, 5])
@pytest.mark.parametrize("inner_steps", [3, 12])
def test_who_begins_with_a_round_knows_what_was_sent_before(num_fragments, inner_steps):
    round_ = 4
    sent = dict(sends_between(0, round_ * inner_steps, num_fragments, inner_steps))
    for fragment in range(num_fragments):
        expected = last_sent(fragment, num_fragments, inner_steps, round_)
        assert sent[fragment] == expected
        assert last_sent(fragment, num_fragments, inner_steps, 0) == -1
