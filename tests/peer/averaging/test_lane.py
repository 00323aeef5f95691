"""Outer steps of one peer: whom it doubts, and how far its first partners pull it."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import trio

from peer.averaging.gossip.exchange_session import (
    Averaged,
    AverageEnded,
    OwnVector,
    RoundOutcome,
    Skipped,
)
from peer.averaging.gossip.gossip import Gossip
from peer.averaging.gossip.lane import EXPECTED_AT_FIRST, FARTHEST_WHOLE, PairLane
from peer.averaging.gossip.outer_step import NolocoFactors, OuterState
from peer.codec import get_codec
from peer.facts import Facts
from protocol.gossip.final_averaging import Meeting
from protocol.outcomes import SkipReason
from protocol.plausible import CLIP, FIRST
from protocol.run.run_spec import RunSpec
from simulation.work import SimulatedWork

P = 256
PHI = 1.0
MOVE = 0.01


class Doubts(list[str]):
    """What gossip is told of partners that are doubted, and how many are believed."""

    believed = 0

    @property
    def packer(self):
        return self

    def doubt(self, peer_id, fault):
        self.append(peer_id if fault else f"{peer_id}, blameless")

    async def learn(self, own, theirs):
        self.believed += 1


class Quiet:
    def emit(self, name, /, **fields):
        pass


def tried(gain: float | None):
    """A trainer that says so of each step."""

    async def trial(own):
        return gain

    return trial


def codes_of(values: float) -> memoryview:
    view: memoryview = torch.full((P,), values).numpy().view(np.uint8).data
    return view


def step(
    outcome: RoundOutcome,
    own: float = PHI + MOVE,
    meeting: Meeting | None = None,
    before: Sequence[RoundOutcome] = (),
    gain: float | None = None,
) -> tuple[float, Doubts]:
    """Take one step with plain averaging; where phi is then, and who is doubted.

    Args:
        meeting: of the final averaging, after rounds that ended so; phi is then where it was.
    """
    doubts, phi_P = Doubts(), np.full(P, PHI, np.float32)
    outer = OuterState(phi_P, np.zeros_like(phi_P), get_codec("fp32"), NolocoFactors(0.0, 1.0, 1.0))
    spec = RunSpec.model_validate({"name": "steps", "data": {"source": "stdlib"}})
    vector = OwnVector(0, 50, False, 50, 0, "", codes_of(own))
    last = replace(vector, round=len(before), final=meeting is not None)

    async def take():
        parts: Any = SimpleNamespace(
            spec=spec,
            services=SimpleNamespace(facts=Facts("own", 1), work=SimulatedWork()),
            observe_round=lambda timing: None,
        )
        steps = PairLane(parts, outer, cast(Gossip, doubts), Quiet(), trio.Lock())
        for number, earlier in enumerate(before):
            each = replace(vector, round=number)
            await steps.apply(AverageEnded(each, earlier, 0.0, 0.0), None, 0.0, tried(0.0))
            phi_P[:] = PHI
        await steps.apply(AverageEnded(last, outcome, 0.0, 0.0), meeting, 0.0, tried(gain))

    trio.run(take)
    return float(phi_P.mean()), doubts


def averaged_with(values: float, name: str = "other") -> Averaged:
    return Averaged(name, 50, codes_of(values))


def test_the_first_partner_counts_as_we_do_when_it_is_as_far_as_two_moves():
    phi, doubts = step(averaged_with(PHI - MOVE))
    assert phi == pytest.approx(PHI, abs=1e-5)
    assert not doubts
    assert doubts.believed == 1


def test_a_first_partner_that_is_far_pulls_no_more_than_a_few_moves():
    phi, doubts = step(averaged_with(2.4))
    most = CLIP.largest * EXPECTED_AT_FIRST * MOVE / 2
    assert phi == pytest.approx(PHI + MOVE + most, abs=1e-4)
    assert not doubts


def test_no_first_partner_turns_us_round_however_far_we_have_moved():
    phi, doubts = step(averaged_with(-6.0 * PHI), own=10 * PHI)  # 1.6 lengths away
    assert phi == pytest.approx(10 * PHI - CLIP.largest * 10 * PHI / 2)
    assert not doubts


def test_a_peer_that_has_not_moved_cannot_tell_what_is_far():
    assert step(averaged_with(2.0), own=PHI)[0] == pytest.approx(1.5)
    assert step(averaged_with(3.0), own=PHI)[1] == ["other"]


def test_a_first_partner_may_be_several_times_as_long_as_we_are():
    phi, doubts = step(averaged_with(3.5))
    assert PHI < phi < PHI + 10 * MOVE
    assert not doubts


ROUNDS = [averaged_with(PHI - MOVE)] * FIRST
"""Rounds after which two moves are the usual distance."""


@pytest.mark.parametrize("own_share", [1 / 3, 0.5, 1.0])
def test_the_final_mean_is_exact_where_all_are_as_far_apart_as_before(own_share):
    meeting = Meeting(0, "other", asks=True, own_share=own_share)
    phi, doubts = step(averaged_with(PHI - MOVE), meeting=meeting, before=ROUNDS)
    assert phi == pytest.approx(PHI + MOVE - (1 - own_share) * 2 * MOVE, abs=1e-6)
    assert not doubts


@pytest.mark.parametrize("own_share", [0.0, 1 / 3, 0.5])
def test_in_the_final_averaging_too_a_partner_pulls_no_more_than_from_a_little_afar(own_share):
    meeting = Meeting(0, "other", asks=True, own_share=own_share)
    phi, doubts = step(averaged_with(PHI - 5 * MOVE), meeting=meeting, before=ROUNDS)
    usual = CLIP.least * 2 * MOVE
    pulled = (1 - own_share) * usual if own_share else usual / 2
    assert phi == pytest.approx(PHI + MOVE - pulled, abs=1e-5)
    assert not doubts


RESULT = Meeting(3, "other", asks=False, own_share=0.0)
"""One other's, for a peer that has no partner in the cube."""


def test_a_result_is_taken_over_whole_where_the_mean_of_all_can_be():
    phi, doubts = step(averaged_with(PHI), meeting=RESULT, before=ROUNDS)
    assert phi == pytest.approx(PHI, abs=1e-6)
    assert not doubts


def test_a_result_of_one_other_pulls_no_more_than_a_partner_though_nothing_is_usual_yet():
    farthest = FARTHEST_WHOLE * (PHI + MOVE)
    phi, _ = step(averaged_with(PHI + MOVE + 0.9 * farthest), meeting=RESULT)
    assert phi == pytest.approx(PHI + MOVE + farthest / 2)


def test_a_final_averaging_after_too_few_rounds_clips_nothing():
    meeting = Meeting(1, "other", asks=True, own_share=0.5)
    assert step(averaged_with(1.5), meeting=meeting)[0] == pytest.approx((PHI + MOVE + 1.5) / 2)


def test_a_partner_without_a_vector_is_doubted_as_one_that_is_too_far_away():
    far, bad = averaged_with(9.0), Skipped(SkipReason.BAD_VECTOR, "other")
    lost, ours = (
        Skipped(why, "other") for why in (SkipReason.PARTNER_LOST, SkipReason.OWN_MISTAKE)
    )
    for outcome, doubted in ((far, ["other"]), (bad, ["other"]), (lost, []), (ours, [])):
        _, doubts = step(outcome)
        assert doubts == doubted
        assert doubts.believed == 0


def test_after_rounds_alone_a_partner_may_be_further_away():
    far = averaged_with(PHI - 20 * MOVE)
    assert step(far, before=ROUNDS)[1] == ["other"]
    alone = [Skipped(SkipReason.NO_PARTNER)] * 2
    phi, doubts = step(far, before=[*ROUNDS, *alone])
    assert doubts == []
    assert phi == pytest.approx(PHI + MOVE - 1.5 * CLIP.least * MOVE, abs=1e-5)


OTHERS = [averaged_with(PHI - MOVE, name) for name in "abcd"]
"""Rounds in which nobody has helped or harmed."""


def test_a_partner_that_raises_our_loss_is_taken_out_of_the_step_and_rests_without_blame():
    phi, doubts = step(averaged_with(PHI - MOVE), before=OTHERS, gain=-0.1)
    assert phi == pytest.approx(PHI + MOVE, abs=1e-6)
    assert doubts == ["other, blameless"]


def test_a_partner_that_helps_or_cannot_be_tried_is_averaged_with():
    for gain in (0.1, None):
        phi, doubts = step(averaged_with(PHI - MOVE), before=OTHERS, gain=gain)
        assert phi == pytest.approx(PHI, abs=1e-6)
        assert not doubts


def test_in_the_final_averaging_nothing_is_tried():
    meeting = Meeting(0, "other", asks=True, own_share=0.5)
    phi, doubts = step(averaged_with(PHI - MOVE), meeting=meeting, before=OTHERS, gain=-0.1)
    assert phi == pytest.approx(PHI, abs=1e-6)
    assert not doubts
