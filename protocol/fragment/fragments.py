"""Fragments of a model: what is sent when, and in which pieces it is averaged.

Idea. A model is cut into fragments of a few transformer blocks, and each fragment is sent at its
own moment of the round, so that the link carries a little all the time and not everything at its
end. (Streaming DiLoCo, arXiv 2501.18512, algorithm 2.)

Rules
  1. The fragments partition the flat vector. One holds what belongs to no block (embeddings, final
     norm, head); it is fragment 0. The blocks make up the others, `sequential` (neighbours
     together) or `strided` (every n-th together), as evenly as whole blocks allow. `whole` is one
     fragment of everything: plain DiLoCo.
  2. Fragment p of F is sent after each inner step t with (t - t_p) mod H = 0, where t counts
     nominal steps from 1 and t_p = floor(p H / F); so each is sent once in H steps, at even
     distances. The first send of a fragment with t_p > 0 covers t_p steps only.
  3. What was sent at t comes back, averaged, tau steps later.
  4. A fragment is averaged in chunks, each by itself: a chunk is what one peer collects and
     averages for all. The chunks of a fragment are as even as whole code blocks allow.

Only `Fragment.spans` lie in the flat vector; all else counts in the fragment's own values: the
spans one after another.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import blake3

from protocol.limits import MAX_CHUNKS_PER_FRAGMENT, MIN_CHUNK_VALUES
from protocol.run.layout import ALIGNMENT, Layout
from protocol.run.sections import FragmentsSection

Pattern = Literal["strided", "sequential", "whole"]
Span = tuple[int, int]
"""Start and stop, in values."""

BLOCK_OF: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""The transformer block in a parameter's name."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of the model that is sent at one moment.

    Attributes:
        index: p.
        spans: where its values lie in the flat vector, ascending; whole code blocks.
        chunks: of its own values; whole code blocks.
    """

    index: int
    spans: tuple[Span, ...]
    chunks: tuple[Span, ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def chunk_spans(self, chunk: int) -> tuple[Span, ...]:
        """Where the values of a chunk lie in the flat vector, in order."""
        first, last = self.chunks[chunk]
        found, begin = [], 0
        for start, stop in self.spans:
            end = begin + stop - start
            if first < end and begin < last:
                found.append((start + max(first - begin, 0), stop - max(end - last, 0)))
            begin = end
        return tuple(found)


def cut_fragments(
    layout: Layout, pattern: Pattern, blocks_per_fragment: int
) -> tuple[Fragment, ...]:
    """The fragments of a model (rules 1 and 4)."""
    outside, blocks = _blocks(layout)
    groups = [outside, *_grouped(blocks, pattern, blocks_per_fragment)]
    if pattern == "whole":
        groups = [sorted(span for group in groups for span in group)]
    return tuple(
        Fragment(index, spans, cut_chunks(sum(stop - start for start, stop in spans)))
        for index, spans in enumerate(_merged(group) for group in groups if group)
    )


def fragments_of_run(section: FragmentsSection, layout: Layout) -> tuple[Fragment, ...]:
    return cut_fragments(layout, section.fragments, section.blocks_per_fragment)


def fragment_layout_digest(layout_digest: str, fragment: Fragment) -> str:
    """Names the values of one fragment of a model: 32 hex digits."""
    spans = ",".join(f"{start}-{stop}" for start, stop in fragment.spans)
    return blake3.blake3(f"{layout_digest}/{spans}".encode()).hexdigest(length=16)


def _blocks(layout: Layout) -> tuple[list[Span], list[list[Span]]]:
    """The spans outside of transformer blocks, and those of each block, in order."""
    outside: list[Span] = []
    blocks = defaultdict[int, list[Span]](list)
    for entry in layout.entries:
        found = BLOCK_OF.search(entry.name)
        spans = blocks[int(found[1])] if found else outside
        spans.append((entry.offset, entry.offset + entry.padded_size))
    return outside, [blocks[block] for block in sorted(blocks)]


def _grouped(
    blocks: Sequence[list[Span]], pattern: Pattern, blocks_per_fragment: int
) -> list[list[Span]]:
    count = -(-len(blocks) // blocks_per_fragment)
    groups: list[list[Span]] = [[] for _ in range(count)]
    for block, spans in enumerate(blocks):
        group = block * count // len(blocks) if pattern == "sequential" else block % count
        groups[group] += spans
    return [sorted(group) for group in groups]


def _merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def cut_chunks(num_values: int) -> tuple[Span, ...]:
    """Start and stop of each chunk of so many values (rule 4)."""
    blocks = num_values // ALIGNMENT
    count = min(MAX_CHUNKS_PER_FRAGMENT, max(1, num_values // MIN_CHUNK_VALUES))
    cuts = [chunk * blocks // count * ALIGNMENT for chunk in range(count + 1)]
    return tuple(pairwise(cuts))


def offset(fragment: int, num_fragments: int, inner_steps: int) -> int:
    """t_p: nominal steps from the start of a round to the send of a fragment (rule 2)."""
    return fragment * inner_steps // num_fragments


def last_sent(fragment: int, num_fragments: int, inner_steps: int, round_: int) -> int:
    """The last cycle of a fragment before this round's first step (rule 2); -1: none."""
    if round_ == 0:  # no round before has sent cycle 0
        return -1
    return round_ - (offset(fragment, num_fragments, inner_steps) > 0)


def sends_between(
    before: int, now: int, num_fragments: int, inner_steps: int
) -> Iterator[tuple[int, int]]:
    """Fragment and cycle of the sends due between two nominal counts of steps (rule 2).

    A peer that is slower than the swarm passes several nominal steps in one of its own. Cycle k of
    fragment p is sent at step k H + t_p.
    """
    for step in range(before + 1, now + 1):
        for fragment in range(num_fragments):
            since = step - offset(fragment, num_fragments, inner_steps)
            if since >= 0 and since % inner_steps == 0:
                yield fragment, since // inner_steps
