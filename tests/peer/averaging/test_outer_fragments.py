"""The outer copy by fragments: steps, steps taken anew, chunks taken over; equal bytes for all."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from owner_worlds import arrived

from peer.averaging.diloco.nesterov import NesterovFactors
from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.codec import codes_as_tensor, get_codec
from protocol.diloco.chunk_ledger import NEVER, ChunkLedger
from protocol.diloco.commands import ChunkFetched
from protocol.errors import RemoteProtocolError
from protocol.fragment.fragments import Fragment, cut_chunks, cut_fragments
from protocol.run.layout import Layout
from protocol.wire.fragment_messages import ResultRank

LAYOUT = Layout.from_shapes(
    {"embed.weight": (70, 128)}
    | {f"layers.{layer}.weight": (80, 128) for layer in range(4)}
    | {f"layers.{layer}.norm": (128,) for layer in range(4)}
)
CODEC = get_codec("fp32")
FACTORS = NesterovFactors(learning_rate=0.5, momentum=0.5)
FRAGMENT = 1
"""Strided: its values lie in several places of the flat vector."""


class LedgeredFragments:
    """An outer copy, and beside it the ledgers that the exchange keeps of it."""

    def __init__(self, outer: OuterFragments) -> None:
        self.outer = outer
        self.ledgers = [ChunkLedger(stamps) for stamps in outer.first_stamps()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outer, name)

    def step(self, fragment, chunk, cycle, codes, outcome) -> None:
        ledger = self.ledgers[fragment]
        result = arrived(cycle, ledger.stamp(chunk), outcome, codes)
        ledger.stepped(chunk, cycle, outcome, self.outer.write(fragment, result))

    def redo(self, fragment, chunk, codes, outcome) -> None:
        ledger = self.ledgers[fragment]
        result = arrived(ledger.cycle(chunk), ledger.before(chunk), outcome, codes)
        ledger.redone(chunk, outcome, self.outer.write(fragment, result, again=True))

    def heal(self, fragment, chunk, cycle, stamp, values) -> None:
        self.outer.heal(ChunkFetched(fragment, cycle, stamp, values))
        self.ledgers[fragment].healed(chunk, cycle, stamp)

    def verify(self, fragment) -> set[int]:
        """Returns the spoilt chunks."""
        ledger = self.ledgers[fragment]
        cycles = [ledger.cycle(chunk) for chunk in range(len(ledger.stamps))]
        spoilt = self.outer.verify(fragment, cycles)
        for chunk, stamp in spoilt.items():
            ledger.healed(chunk, cycles[chunk], stamp)
        return set(spoilt)


def outer_copy(seed: int = 0, last_cycle: int | None = None) -> LedgeredFragments:
    values = np.random.default_rng(seed).standard_normal(LAYOUT.padded_parameters, np.float32)
    fragments, momentum = cut_fragments(LAYOUT, "strided", 2), np.full_like(values, 0.25)
    momentum *= last_cycle is not None
    return LedgeredFragments(
        OuterFragments(
            fragments, values, momentum, CODEC, FACTORS, lambda cycle: cycle == last_cycle
        )
    )


def codes(outer: LedgeredFragments, chunk: int, value: float) -> memoryview:
    size = outer.chunk_values(FRAGMENT, chunk)
    room = memoryview(bytearray(CODEC.code_bytes(size)))
    CODEC.encode(torch.full((size,), value), codes_as_tensor(room))
    return room


def flat(outer: LedgeredFragments) -> npt.NDArray[Any]:
    return outer._phi.numpy().copy()


def of_chunk(outer: LedgeredFragments, chunk: int) -> npt.NDArray[Any]:
    return np.frombuffer(outer.read(FRAGMENT, chunk), np.float32)


def test_a_chunk_may_lie_in_several_places():
    fragment = outer_copy().fragments[FRAGMENT]
    assert len(fragment.spans) > 1
    assert len(fragment.chunks) > 1


def test_a_step_moves_its_chunk_alone_by_nesterovs_rule():
    outer = outer_copy()
    before, phi = flat(outer), of_chunk(outer, 0)
    outer.step(FRAGMENT, 0, 3, codes(outer, 0, 2.0), ResultRank(4, b"a"))
    after, size = of_chunk(outer, 0), outer.chunk_values(FRAGMENT, 0)
    np.testing.assert_allclose(after[:size], phi[:size] - 0.5 * (2.0 + 0.5 * 2.0), rtol=1e-6)
    np.testing.assert_array_equal(after[size:], 2.0)
    assert np.count_nonzero(flat(outer) != before) == size
    stamp = outer.ledgers[FRAGMENT].stamp(0)
    assert (stamp.steps, stamp.weight, outer.ledgers[FRAGMENT].cycle(0)) == (1, 4, 3)


@pytest.mark.parametrize("redone", [False, True])
def test_the_last_cycle_takes_the_plain_mean_and_none_before_it_does(redone):
    outer, size = outer_copy(last_cycle=4), outer_copy().chunk_values(FRAGMENT, 0)
    for cycle, expected in (
        (3, lambda phi, v: phi - 0.5 * (2.0 + 0.5 * (2.0 + 0.5 * v))),
        (4, lambda phi, v: phi - np.float32(2.0)),
    ):
        phi, v = np.split(of_chunk(outer, 0), [size])
        first = codes(outer, 0, 3.0 if redone else 2.0)
        outer.step(FRAGMENT, 0, cycle, first, ResultRank(3, b"a"))
        if redone:
            outer.redo(FRAGMENT, 0, codes(outer, 0, 2.0), ResultRank(4, b"b"))
        np.testing.assert_allclose(of_chunk(outer, 0)[:size], expected(phi, v), rtol=1e-6)


def test_redoing_gives_what_the_winner_alone_would_have_given():
    redone, at_once = outer_copy(), outer_copy()
    redone.step(FRAGMENT, 1, 3, codes(redone, 1, 2.0), ResultRank(3, b"a"))
    redone.redo(FRAGMENT, 1, codes(redone, 1, -1.0), ResultRank(4, b"b"))
    at_once.step(FRAGMENT, 1, 3, codes(at_once, 1, -1.0), ResultRank(4, b"b"))
    assert redone.read(FRAGMENT, 1) == at_once.read(FRAGMENT, 1)
    assert redone.ledgers[FRAGMENT].stamps == at_once.ledgers[FRAGMENT].stamps


def test_equal_steps_give_equal_stamps_and_unequal_ones_do_not():
    one, two, three = outer_copy(), outer_copy(), outer_copy()
    one.step(FRAGMENT, 0, 3, codes(one, 0, 2.0), ResultRank(4, b"a"))
    two.step(FRAGMENT, 0, 3, codes(two, 0, 2.0), ResultRank(4, b"a"))
    three.step(FRAGMENT, 0, 3, codes(three, 0, 2.5), ResultRank(4, b"a"))
    assert one.ledgers[FRAGMENT].stamp(0) == two.ledgers[FRAGMENT].stamp(0)
    assert one.ledgers[FRAGMENT].stamp(0) != three.ledgers[FRAGMENT].stamp(0)


def test_a_chunk_taken_over_is_the_others_to_the_bit():
    ours, theirs = outer_copy(1), outer_copy(2)
    theirs.step(FRAGMENT, 1, 7, codes(theirs, 1, 2.0), ResultRank(4, b"a"))
    stamp = theirs.ledgers[FRAGMENT].stamp(1)
    ours.heal(FRAGMENT, 1, 7, stamp, memoryview(theirs.read(FRAGMENT, 1)))
    assert ours.read(FRAGMENT, 1) == theirs.read(FRAGMENT, 1)
    assert (ours.ledgers[FRAGMENT].stamp(1), ours.ledgers[FRAGMENT].cycle(1)) == (stamp, 7)


@pytest.mark.parametrize("which", ["phi", "v"])
def test_a_chunk_whose_memory_was_spoilt_is_behind_all_others_until_it_is_healed(which):
    ours, theirs = outer_copy(1), outer_copy(1)
    for outer in (ours, theirs):
        outer.step(FRAGMENT, 0, 3, codes(outer, 0, 2.0), ResultRank(4, b"a"))
        outer.step(FRAGMENT, 1, 3, codes(outer, 1, 2.0), ResultRank(4, b"a"))
    start, _ = ours.fragments[FRAGMENT].spans[0]
    memory = ours._phi if which == "phi" else ours._v
    memory[start] += 1.0
    assert ours.verify(FRAGMENT) == {0}
    ledger, stamp = ours.ledgers[FRAGMENT], theirs.ledgers[FRAGMENT].stamp(0)
    assert ledger.stamp(1) == theirs.ledgers[FRAGMENT].stamp(1)
    assert (ledger.stamp(0).steps, ledger.cycle(0)) == (0, 3)
    assert stamp.is_ahead_of(ledger.stamp(0))
    ours.heal(FRAGMENT, 0, 3, stamp, memoryview(theirs.read(FRAGMENT, 0)))
    assert ours.verify(FRAGMENT) == set()
    assert ledger.stamp(0) == stamp


@pytest.mark.parametrize("spoil", ["one bit", "length"])
def test_values_that_do_not_fit_their_stamp_are_refused(spoil):
    ours, theirs = outer_copy(1), outer_copy(2)
    values = bytearray(theirs.read(FRAGMENT, 1))
    before = ours.read(FRAGMENT, 1)
    if spoil == "one bit":
        values[5] ^= 1
    else:
        del values[-8:]
    with pytest.raises(RemoteProtocolError):
        stamp = theirs.ledgers[FRAGMENT].stamp(1)
        ours.heal(FRAGMENT, 1, NEVER, stamp, memoryview(values))
    assert ours.read(FRAGMENT, 1) == before


def test_codes_are_split_by_chunk_and_must_fit():
    outer = outer_copy()
    both = bytes(codes(outer, 0, 1.0)) + bytes(codes(outer, 1, 2.0))
    parts = outer.split_codes(FRAGMENT, [0, 1], memoryview(both))
    assert parts == {0: codes(outer, 0, 1.0), 1: codes(outer, 1, 2.0)}
    with pytest.raises(RemoteProtocolError, match="expected"):
        outer.split_codes(FRAGMENT, [0, 1], memoryview(both[:-1]))


def test_one_fragment_of_everything_is_the_flat_vector():
    size = LAYOUT.padded_parameters
    values = np.arange(size, dtype=np.float32)
    whole = (Fragment(0, ((0, size),), cut_chunks(size)),)
    outer = OuterFragments(whole, values, np.zeros_like(values), CODEC, FACTORS, lambda _: False)
    joined = [
        np.frombuffer(outer.read(0, chunk), np.float32)[: outer.chunk_values(0, chunk)]
        for chunk in range(len(whole[0].chunks))
    ]
    np.testing.assert_array_equal(np.concatenate(joined), values)
