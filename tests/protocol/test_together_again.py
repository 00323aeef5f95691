"""After lies honest replicas average again, wherever they are: judgements and rests alone."""

import math
from collections.abc import Iterable
from itertools import combinations, permutations
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.gossip.helping import Helpfulness
from protocol.gossip.matchmaking import RESTS
from protocol.membership.book import BackOff
from protocol.plausible import KEPT_AVERAGES, Plausibility

ROUND_S: Final = 60.0
STEPS: Final = 10
VALUES: Final = 64
FARTHEST: Final = 3.0
"""In lengths, as in peer/averaging/gossip/lane.py, whose outer steps these are."""

Vector = npt.NDArray[np.float64]
Lies = Iterable[tuple[str, float]]


def rms(vector: Vector) -> float:
    return float(np.sqrt(np.mean(np.square(vector))))


class Replica:
    """One of them; each of its lengths is about one."""

    def __init__(self, name: str, values: Vector, moves: float, lies: Lies) -> None:
        self.name, self.values, self.moves = name, values, moves
        self.plausibility, self.rest = Plausibility(), BackOff(*RESTS)
        self.helpfulness = Helpfulness()
        for liar, distance in lies:
            self.plausibility.trained(STEPS)
            self.share(liar, distance)

    def train(self, random: np.random.Generator) -> None:
        move = random.standard_normal(VALUES)
        self.values = self.values + move * (self.moves / rms(move))
        self.plausibility.trained(STEPS)

    def share(self, sender: str, distance: float) -> float | None:
        moved = 0.0 if self.plausibility.is_usual(distance) else self.moves
        return self.plausibility.share(
            sender,
            distance,
            FARTHEST,
            expected=2 * moved or math.inf,
            least=moved,
            their_steps=STEPS,
        )

    def pulled(self, sender: str, theirs: Vector, now_s: float) -> Vector:
        """The weights after an exchange with another one. Whatever pulls far raises the loss."""
        distance = rms(theirs - self.values)
        share = self.share(sender, distance)
        if share is None:
            self.rest.failed(sender, now_s)
            return self.values
        if not self.helpfulness.takes(sender, 3 * self.moves - distance):
            self.plausibility.not_taken(sender)
            self.rest.failed(sender, now_s)
            return self.values
        return self.values + (theirs - self.values) * share / 2


class Company:
    """Replicas that have heard lies."""

    def __init__(self, apart: Iterable[float], moves: float, lies: Lies) -> None:
        self.random = np.random.default_rng(1)
        middle = self._one_long()
        places = [middle + distance * self._one_long() for distance in apart]
        names = (f"honest {number}" for number in range(len(places)))
        self.all = [
            Replica(name, place, moves, lies) for name, place in zip(names, places, strict=False)
        ]
        self.averaged: set[tuple[str, str]] = set()
        self._now_s = 0.0

    def _one_long(self) -> Vector:
        vector = self.random.standard_normal(VALUES)
        return vector / rms(vector)

    def rounds(self, number: int) -> None:
        """In each all train, and every two that do not rest meet."""
        for _ in range(number):
            self._now_s += ROUND_S
            for each in self.all:
                each.train(self.random)
            for one, other in combinations(self.all, 2):
                self._meet(one, other)

    def _meet(self, one: Replica, other: Replica) -> None:
        due = (one.rest.is_due(other.name, self._now_s), other.rest.is_due(one.name, self._now_s))
        if not all(due):
            return
        before = one.values, other.values
        one.values = one.pulled(other.name, before[1], self._now_s)
        other.values = other.pulled(one.name, before[0], self._now_s)
        if one.values is not before[0]:
            self.averaged.add((one.name, other.name))
        if other.values is not before[1]:
            self.averaged.add((other.name, one.name))

    @property
    def farthest(self) -> float:
        return max(rms(one.values - other.values) for one, other in combinations(self.all, 2))


liars = st.sampled_from([*(f"liar {number}" for number in range(20)), "honest 0", "honest 1"])
told_distances = st.floats(0.0, 1e3) | st.sampled_from([math.nan, math.inf])
lies = st.lists(st.tuples(liars, told_distances), max_size=60)


@settings(max_examples=200)
@given(st.lists(st.floats(0.0, 0.7), min_size=2, max_size=4), st.floats(-5.0, -1.0), lies)
def test_from_wherever_and_after_whatever_all_average_again_within_ten_rounds(apart, power, told):
    company = Company(apart, 10.0**power, told)
    company.rounds(10)
    assert company.averaged == set(permutations([each.name for each in company.all], 2))


MOVES: Final = 1e-3
TOLD: Final = {
    "none": [("honest 0", 2 * MOVES), ("honest 1", 2 * MOVES), ("honest 2", 2 * MOVES)] * 6,
    "an echo": [("echo", 0.0)] * KEPT_AVERAGES,
    "many that are near": [(f"liar {number}", MOVES / 10) for number in range(KEPT_AVERAGES)],
    "many that are far": [(f"liar {number}", 3 * MOVES) for number in range(KEPT_AVERAGES)],
    "refused": [("honest 0", 1.0), ("honest 1", 1.0), ("honest 2", 1.0)] * 3,
}


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("told", TOLD)
def test_replicas_ten_moves_apart_come_to_the_usual_distance(told, number):
    company = Company([0.0, 10 * MOVES, 0.0][:number], MOVES, TOLD[told])
    assert company.farthest > 9 * MOVES
    company.rounds(30)
    assert company.farthest < 3 * MOVES


@pytest.mark.parametrize(("others", "rounds"), [(2, 120), (3, 210), (5, 120)])
def test_one_parted_by_a_hundred_moves_comes_to_the_others(others, rounds):
    """Three others or more have trials to refuse it by; without trials it takes as long."""
    company = Company([100 * MOVES, *[0.0] * others], MOVES, TOLD["none"])
    company.rounds(rounds)
    assert company.farthest < 3 * MOVES
