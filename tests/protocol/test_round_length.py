"""How many inner steps a peer puts between two averages: by its line, and by nobody's word."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.gossip.round_length import (
    BAND,
    FEWEST,
    KEPT_WISHES,
    LEAST_INNER_STEPS,
    LINE_SHARE,
    MOST_INNER_STEPS,
    PAUSE_SHARE,
    AveragingCpu,
    ProcessorUse,
    RoundLength,
    wished,
)

START = 64
NOISE = 0.25


Average = tuple[str, float]
"""The partner, and the H that is wished for."""


def wishing(inner_steps: float, partner: str = "p") -> Average:
    """An average of a line that would be filled with this H."""
    return partner, wished(inner_steps * LINE_SHARE, 0.0, 1.0)


def begun() -> RoundLength:
    length = RoundLength()
    length.inner_steps = START
    return length


def lived(
    wish_of: Callable[[int], Average], averages: int, length: RoundLength | None = None
) -> list[int]:
    """H after each of so many averages."""
    length = length or begun()
    found = []
    for number in range(averages):
        before = length.inner_steps
        assert length.averaged(*wish_of(number)) == (length.inner_steps != before)
        found.append(length.inner_steps)
    return found


def turns(found: list[int]) -> int:
    """How often H went up after it had gone down, or the other way."""
    steps = [now - before for before, now in pairwise([START, *found]) if now != before]
    return sum(one * other < 0 for one, other in pairwise(steps))


def noisy(wish: float, seed: int, partners: int = 1) -> Callable[[int], Average]:
    """Averages of a steady line, each off by a quarter at most."""
    draw = random.Random(seed)

    def of(_: int) -> Average:
        factor = draw.uniform(1 - NOISE, 1 + NOISE)
        return wishing(wish * factor, f"p{draw.randrange(partners)}")

    return of


# --- what it comes to -----------------------------------------------------------------------------
def test_the_line_is_filled_with_some_slack() -> None:
    of = "p", wished(line_s=8.0, pause_s=0.0, nominal_step_s=0.1)
    assert lived(lambda _: of, FEWEST)[-1] == math.ceil(8.0 / (0.1 * LINE_SHARE)) == 100


def test_nothing_changes_before_there_are_enough_averages() -> None:
    assert lived(lambda _: wishing(300), FEWEST) == [START] * (FEWEST - 1) + [300]


@pytest.mark.parametrize(
    ("wish", "inner_steps"),
    [(0.01, LEAST_INNER_STEPS), (2.2, 3), (10.0, 10), (1e6, MOST_INNER_STEPS)],
)
def test_there_is_a_floor_a_ceiling_and_whole_steps_between(wish: float, inner_steps: int) -> None:
    assert lived(lambda _: wishing(wish), KEPT_WISHES)[-1] == inner_steps


def test_a_trainer_does_not_stand_still_for_more_than_a_small_part_of_the_round() -> None:
    of = "p", wished(line_s=0.1, pause_s=0.2, nominal_step_s=0.1)
    inner_steps = lived(lambda _: of, FEWEST)[-1]
    assert 0.2 / (inner_steps * 0.1) == pytest.approx(PAUSE_SHARE, rel=0.05)


def test_a_line_that_becomes_slower_or_faster_is_followed() -> None:
    length = begun()
    assert lived(lambda _: wishing(20), KEPT_WISHES, length)[-1] == 20
    slower = lived(lambda _: wishing(80), KEPT_WISHES, length)
    assert slower[-1] == pytest.approx(80, rel=BAND)
    assert slower == sorted(slower)
    faster = lived(lambda _: wishing(10), KEPT_WISHES, length)
    assert faster[-1] == pytest.approx(10, rel=BAND)
    assert faster == sorted(faster, reverse=True)


# --- noise ----------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("partners", [1, 2, 3, 8, 50])
def test_noise_of_a_quarter_never_makes_it_flap(partners: int) -> None:
    for seed in range(40):
        wish = math.exp(random.Random(seed).uniform(math.log(2), math.log(500)))
        found = lived(noisy(wish, seed, partners), 200)
        # The first estimate is of few averages, and may be corrected once.
        assert turns(found) <= 1, (seed, wish, found)
        assert len(set(found[KEPT_WISHES:])) <= 2, (seed, wish, found)


@pytest.mark.slow
@given(
    wish=st.floats(3, 400),
    factors=st.lists(st.floats(1 - NOISE, 1 + NOISE), min_size=KEPT_WISHES, max_size=80),
    partners=st.integers(1, 6),
)
def test_whatever_noise_does_it_is_off_by_no_more(
    wish: float, factors: list[float], partners: int
) -> None:
    found = lived(lambda n: wishing(wish * factors[n], f"p{n % partners}"), len(factors))
    for inner_steps in found[KEPT_WISHES - 1 :]:
        least, most = wish * (1 - NOISE) / (1 + BAND), wish * (1 + NOISE) / (1 - BAND)
        assert least - 1 <= inner_steps <= most + 1


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.one_of(st.floats(0, 1e12), st.just(math.inf)),
            st.floats(0, 1e12),
            st.floats(0, 1e6),
        ),
        max_size=60,
    )
)
def test_it_is_bounded_whatever_is_measured(
    averages: list[tuple[str, float, float, float]],
) -> None:
    length = begun()
    for partner, *times in averages:
        length.averaged(partner, wished(*times))
        assert LEAST_INNER_STEPS <= length.inner_steps <= MOST_INNER_STEPS


# --- unequal lines, and liars ---------------------------------------------------------------------
def test_a_peer_with_a_fast_line_keeps_it_busy_among_thin_ones() -> None:
    """Half of its partners are a hundred times slower: they are waited for, and set no H."""
    draw = random.Random(1)
    found = lived(lambda _: wishing(*draw.choice([(3.0, "a"), (300.0, "b")])), 300)
    assert set(found[FEWEST:]) == {3}


@pytest.mark.slow
def test_the_share_of_fast_partners_decides_once_and_not_again_and_again() -> None:
    for fast in range(1, 20):
        draw, changes = random.Random(fast), 0

        def wish_of(_: int, fast: int = fast, draw: random.Random = draw) -> Average:
            partner = draw.randrange(20)
            return wishing(3.0 if partner < fast else 300.0, f"p{partner}")

        found = lived(wish_of, 1000)
        changes = sum(before != now for before, now in pairwise(found))
        assert changes <= 24, (fast, changes)


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("slower", [2.0, 10.0, 1e6])
def test_a_partner_that_pretends_to_be_slow_moves_nothing(share: float, slower: float) -> None:
    draw = random.Random(1)

    def wish_of(number: int) -> Average:
        if number >= KEPT_WISHES and draw.random() < share:
            return wishing(20 * slower, "liar")
        return wishing(20, f"p{number % 2}")

    assert set(lived(wish_of, 300)[KEPT_WISHES:]) == {20}


# --- what averages take of the processors ---------------------------------------------------------
def flown(
    averaging_cpu: AveragingCpu, rounds: int, *, average_s: float, always: float, idle: float = 0.0
) -> list[float]:
    """What each average took: each round of a second begins with one of a fifth of it.

    Args:
        average_s: processor seconds of an average.
        always: of a processor that is taken all the time, for other things.
        idle: processors of the machine that are idle, on the average.
    """
    found = []
    for number in range(rounds):
        began_s, taken_s = 1.0 * number, number * (average_s + always)
        averaging_cpu.begin(ProcessorUse(began_s, taken_s, idle * began_s))
        ended_s, taken_s = began_s + 0.2, taken_s + average_s + 0.2 * always
        found.append(averaging_cpu.end(ProcessorUse(ended_s, taken_s, idle * ended_s)))
    return found


def test_what_an_average_takes_counts_and_what_is_taken_always_does_not() -> None:
    assert flown(AveragingCpu(), 5, average_s=0.03, always=0.0) == pytest.approx([0.03] * 5)
    first, *later = flown(AveragingCpu(), 5, average_s=0.03, always=0.5)
    assert first == pytest.approx(0.03 + 0.5 * 0.2)  # nothing is known before
    assert later == pytest.approx([0.03] * 4)


@pytest.mark.parametrize(("idle", "left"), [(0.0, 1.0), (0.25, 0.75), (1.0, 0.0), (14.0, 0.0)])
def test_an_idle_processor_would_do_it(idle: float, left: float) -> None:
    found = flown(AveragingCpu(), 5, average_s=0.03, always=0.1, idle=idle)
    assert found[1:] == pytest.approx([0.03 * left] * 4)


def test_less_than_is_taken_always_is_nothing() -> None:
    averaging_cpu = AveragingCpu()
    flown(averaging_cpu, 2, average_s=0.0, always=0.5)
    averaging_cpu.begin(ProcessorUse(2.0, 1.0, 0.0))
    assert averaging_cpu.end(ProcessorUse(2.2, 1.0, 0.0)) == 0.0


def test_a_process_that_begins_anew_makes_no_average_dear() -> None:
    averaging_cpu = AveragingCpu()
    averaging_cpu.end(ProcessorUse(0.0, 100.0, 0.0))
    averaging_cpu.begin(ProcessorUse(1.0, 2.0, 0.0))
    assert averaging_cpu.end(ProcessorUse(1.2, 2.03, 0.0)) == pytest.approx(0.03)
