"""Pairs of many runs at once: the daemon's judgements (lane.py), and others beside them."""

import math
from collections import deque
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Final

import torch

from peer.averaging.gossip.lane import EXPECTED_AT_FIRST, FARTHEST_AT_FIRST, FARTHEST_WHOLE
from protocol.gossip.matchmaking import RESTS, pair_rank
from protocol.membership.book import BackOff
from protocol.plausible import CLIP, KEPT_AVERAGES, Plausibility

from .arms import PEERS
from .liars import JUST_BELOW
from .long_arms import MEASURING, SLY, LongArm
from .long_world import Counts, LongWorld
from .pairs import ROUND_S
from .stack import Stack, lengths, of_length, quantised

NAMES: Final = tuple(f"peer-{index:02d}" for index in range(PEERS))
SCALES: Final = {"flip": -1.0, "scale-10": 10.0}
CENTRE_SHARE: Final = 0.2
COURSE_SHARE: Final = 0.1
"""How much of a centre, and of its course, is new in each round."""
SLY_LENGTHS: Final = (3.0, 2.0, 1.4, 1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.0)
"""In usual distances."""
SLY_MARGIN: Final = 0.001


class _Peer:
    def __init__(self) -> None:
        self.plausible, self.rest = Plausibility(), BackOff(*RESTS)
        self.gains = deque[float](maxlen=KEPT_AVERAGES)
        self.distances = deque[float](maxlen=KEPT_AVERAGES)


class _Company:
    """One run: its arm, and the rows of its peers."""

    def __init__(self, arm: LongArm, first: int) -> None:
        self.arm, self.first = arm, first
        self.peers = [_Peer() for _ in range(arm.peers)]
        self.direction: torch.Tensor | None = None
        self.counts = Counts()
        self.honest_rows = slice(first, first + arm.honest)

    def partners(self, order: Sequence[tuple[int, int]], now_s: float) -> dict[int, int]:
        """The pairs of a round, both ways."""
        found: dict[int, int] = {}
        for one, other in order:
            is_free = other < len(self.peers) and found.keys().isdisjoint((one, other))
            if is_free and self._asks(one, other, now_s) and self._asks(other, one, now_s):
                found[one], found[other] = other, one
        return found

    def _asks(self, one: int, other: int, now_s: float) -> bool:
        return self.peers[one].rest.is_due(NAMES[other], now_s)

    def is_liar(self, peer: int) -> bool:
        return peer >= self.arm.honest


class LongPairs:
    """Averages; training is the caller's."""

    def __init__(self, stack: Stack, arms: Sequence[LongArm], world: LongWorld) -> None:
        self._stack, self._world = stack, world
        self.companies: list[_Company] = []
        for arm in arms:
            first = sum(each.arm.peers for each in self.companies)
            self.companies.append(_Company(arm, first))
        self.phi_RP = stack.theta_RP.clone()
        self._centre_RP, self._course_RP = self.phi_RP.clone(), torch.zeros_like(self.phi_RP)

    def after_step(self, step: int) -> None:
        """Average when a round is done; the first step is 1."""
        if step % self._world.inner_steps == 0:
            self._close(step // self._world.inner_steps - 1)

    def settle(self) -> None:
        """Nothing is on its way."""

    def judged(self, company: int) -> torch.Tensor:
        """Slow weights of its honest peers."""
        of = self.companies[company]
        return self.phi_RP[of.first : of.first + of.arm.honest]

    def _close(self, round_: int) -> None:
        theta_RP, phi_RP = self._stack.theta_RP, self.phi_RP
        own_RP = quantised(theta_RP)
        met = self._met(round_)
        partner_of = {
            of.first + one: of.first + other for of, pairs in met for one, other in pairs.items()
        }
        index = torch.tensor([partner_of.get(row, row) for row in range(len(own_RP))])
        sent_RP = own_RP[index.to(own_RP.device)]
        self._lie(met, own_RP, sent_RP, round_)
        found = torch.stack(
            (lengths(sent_RP - own_RP), lengths(own_RP), lengths(own_RP - phi_RP))
        ).T.tolist()
        weights = [0.0] * len(own_RP)
        for of, pairs in met:
            for one in range(of.arm.peers):
                of.peers[one].plausible.trained(self._world.inner_steps)
                if one in pairs:
                    row = of.first + one
                    weights[row] = self._weight(of, one, pairs[one], found[row], round_)
        self._measure(met, own_RP, sent_RP, weights, round_)
        self._centre(met, own_RP, sent_RP, weights)
        weight_R1 = torch.tensor(weights, device=own_RP.device)[:, None]
        new_RP = torch.where(weight_R1 > 0, own_RP + weight_R1 * (sent_RP - own_RP), own_RP)
        self._trust(met, own_RP, sent_RP, weights, new_RP)
        self._course_RP.lerp_(new_RP - phi_RP, COURSE_SHARE)
        self.phi_RP = new_RP
        theta_RP.add_(new_RP - own_RP)

    def _met(self, round_: int) -> list[tuple[_Company, dict[int, int]]]:
        def rank(pair: tuple[int, int]) -> bytes:
            one, other = ((NAMES[place], round_) for place in pair)
            return pair_rank(f"hostile-{self._world.seed}", one, other)

        order = sorted(combinations(range(PEERS), 2), key=rank)
        return [(of, of.partners(order, round_ * ROUND_S)) for of in self.companies]

    # --- lies -------------------------------------------------------------------------------------
    def _lie(
        self,
        met: Sequence[tuple[_Company, dict[int, int]]],
        own_RP: torch.Tensor,
        sent_RP: torch.Tensor,
        round_: int,
    ) -> None:
        """Put what liars send in the place of theirs; as in liars.py."""
        theta_RP, phi_RP = self._stack.theta_RP, self.phi_RP
        own_lengths, moved = torch.stack((lengths(theta_RP), lengths(theta_RP - phi_RP))).tolist()
        lies: dict[int, torch.Tensor] = {}
        sly: list[tuple[_Company, int, float]] = []
        for of, pairs in met:
            for one, other in pairs.items():
                if of.is_liar(one) or not of.is_liar(other):
                    continue
                row, liar, honest = of.first + one, of.first + other, of.honest_rows
                reach = of.peers[one].plausible.bound(FARTHEST_AT_FIRST * own_lengths[row])
                if of.direction is None:
                    of.direction = (phi_RP[honest] - theta_RP[honest]).mean(0)
                if of.arm.attack == SLY:
                    sly.append((of, one, reach))
                elif of.arm.attack == "collude":
                    lies[row] = theta_RP[row] + of_length(of.direction, JUST_BELOW * reach)
                elif of.arm.attack == "inner":
                    against_P = (phi_RP[honest] - theta_RP[honest]).mean(0)
                    lies[row] = phi_RP[liar] + of_length(against_P, median(moved[honest]))
                else:
                    scale = SCALES[of.arm.attack]
                    lies[row] = phi_RP[liar] + scale * (theta_RP[liar] - phi_RP[liar])
        lies |= self._sly(sly, own_RP, round_)
        if lies:
            rows = torch.tensor(list(lies), device=sent_RP.device)
            sent_RP[rows] = quantised(torch.stack(list(lies.values())))

    def _sly(
        self, fooled: Sequence[tuple[_Company, int, float]], own_RP: torch.Tensor, round_: int
    ) -> dict[int, torch.Tensor]:
        """The mean of the honest, and from there as far against them as it still helps enough."""
        if not fooled:
            return {}
        lies, usuals = [], []
        for of, one, _ in fooled:
            honest_NP, own_P = own_RP[of.honest_rows], own_RP[of.first + one]
            usual = lengths(honest_NP - own_P).median()
            assert of.direction is not None, "it is set with the first lie"
            push_P, mean_P = of_length(of.direction, usual), honest_NP.mean(0)
            lies.append(torch.stack([mean_P + length * push_P for length in SLY_LENGTHS]))
            usuals.append(usual)
        lies_NLP = torch.stack(lies)
        own_N1P = torch.stack([own_RP[of.first + one] for of, one, _ in fooled])[:, None]
        after_NLP = torch.cat((own_N1P, (lies_NLP + own_N1P) / 2), dim=1)
        blocks = self._world.own_blocks(round_, PEERS - 1)  # the liars' own
        tried_NP = after_NLP.flatten(0, 1)
        found = self._stack.losses(tried_NP, blocks.expand(len(tried_NP), -1, -1))
        losses = found.view(len(fooled), -1).tolist()
        distances = lengths(lies_NLP - own_N1P).tolist()
        chosen = {}
        for number, (of, one, reach) in enumerate(fooled):
            most = JUST_BELOW * min(reach, CLIP.least * float(usuals[number]))
            needed = self._needed(of, one) + SLY_MARGIN
            before, *after = losses[number]
            pairs = zip(distances[number], after, strict=True)
            fit = [
                place
                for place, (far, loss) in enumerate(pairs)
                if far < most and before - loss >= needed
            ]
            chosen[of.first + one] = lies_NLP[number, fit[0] if fit else -1]
        return chosen

    @staticmethod
    def _needed(of: _Company, one: int) -> float:
        gains = of.peers[one].gains
        middle = median(gains) if gains else 0.0
        return middle / 2 if of.arm.defence == "half" else min(0.0, middle)

    # --- defences ---------------------------------------------------------------------------------
    def _weight(
        self, of: _Company, one: int, other: int, found: Sequence[float], round_: int
    ) -> float:
        """The partner's weight in the mean, as the daemon has it."""
        distance, own, moved = found
        peer, steps = of.peers[one], self._world.inner_steps
        if peer.plausible.is_usual(distance):
            moved = 0.0
        share = peer.plausible.share(
            NAMES[other],
            distance,
            (FARTHEST_AT_FIRST if moved else FARTHEST_WHOLE) * own,
            expected=min(EXPECTED_AT_FIRST * moved, own) or math.inf,
            least=moved,
            their_steps=steps,
        )
        if of.arm.defence == "none":
            share = 1.0
        if share is None:
            peer.rest.failed(NAMES[other], round_ * ROUND_S)
        weight = (share or 0.0) / 2
        if not of.is_liar(one):
            of.counts.note(weight, is_liar=of.is_liar(other))
        return weight

    def _rows(
        self, met: Sequence[tuple[_Company, dict[int, int]]], weights: Sequence[float], *names: str
    ) -> list[tuple[_Company, int, int, int]]:
        """Company, peer, partner and row of the honest that were let average, of some defences."""
        return [
            (of, one, other, of.first + one)
            for of, pairs in met
            if of.arm.defence in names
            for one, other in pairs.items()
            if not of.is_liar(one) and weights[of.first + one] > 0
        ]

    def _measure(
        self,
        met: Sequence[tuple[_Company, dict[int, int]]],
        own_RP: torch.Tensor,
        sent_RP: torch.Tensor,
        weights: list[float],
        round_: int,
    ) -> None:
        """Believe no partner that does not help."""
        asked = self._rows(met, weights, *MEASURING)
        if not asked:
            return
        rows = torch.tensor([row for *_, row in asked], device=own_RP.device)
        weight_N1 = torch.tensor([weights[row] for *_, row in asked], device=own_RP.device)[:, None]
        before_NP, theirs_NP = own_RP[rows], sent_RP[rows]
        after_NP = before_NP + weight_N1 * (theirs_NP - before_NP)
        blocks = torch.stack([self._world.own_blocks(round_, one) for _, one, *_ in asked])
        gain_N = self._stack.losses(before_NP, blocks) - self._stack.losses(after_NP, blocks)
        for (of, one, other, row), gain in zip(asked, gain_N.tolist(), strict=True):
            needed = self._needed(of, one)
            of.peers[one].gains.append(gain)
            if not gain >= needed:
                weights[row] = 0.0
                of.counts.refuse(is_liar=of.is_liar(other))
            of.counts.gain(gain, is_liar=of.is_liar(other))

    def _centre(
        self,
        met: Sequence[tuple[_Company, dict[int, int]]],
        own_RP: torch.Tensor,
        sent_RP: torch.Tensor,
        weights: list[float],
    ) -> None:
        """Clip what was sent around the centre that each keeps."""
        asked = self._rows(met, weights, "centred")
        if not asked:
            return
        rows = torch.tensor([row for *_, row in asked], device=own_RP.device)
        centre_RP = self._centre_RP.add_(self._course_RP)
        away_NP = sent_RP[rows] - centre_RP[rows]
        shares = []
        for (of, one, _, row), distance in zip(asked, lengths(away_NP).tolist(), strict=True):
            seen = of.peers[one].distances
            most = CLIP.largest * median(seen) if seen else distance
            seen.append(min(distance, most))
            shares.append(min(1.0, median(seen) / max(distance, 1e-30)))
            weights[row] = 0.5
        away_NP *= torch.tensor(shares, device=own_RP.device)[:, None]
        sent_RP[rows] = centre_RP[rows] + away_NP
        centre_RP[rows] += CENTRE_SHARE * away_NP

    def _trust(
        self,
        met: Sequence[tuple[_Company, dict[int, int]]],
        own_RP: torch.Tensor,
        sent_RP: torch.Tensor,
        weights: Sequence[float],
        new_RP: torch.Tensor,
    ) -> None:
        """A partner's move counts as its cosine with ours, at the length of ours."""
        asked = self._rows(met, weights, "trust")
        if not asked:
            return
        rows = torch.tensor([row for *_, row in asked], device=own_RP.device)
        phi_NP = self.phi_RP[rows]
        ours_NP, theirs_NP = own_RP[rows] - phi_NP, sent_RP[rows] - phi_NP
        ratio_N1 = (lengths(ours_NP) / lengths(theirs_NP).clamp(min=1e-30))[:, None]
        trust_N1 = torch.cosine_similarity(ours_NP, theirs_NP, dim=1).clamp(min=0)[:, None]
        new_RP[rows] = phi_NP + (ours_NP + trust_N1 * ratio_N1 * theirs_NP) / (1 + trust_N1)
        for (of, _, other, _), trust in zip(asked, trust_N1[:, 0].tolist(), strict=True):
            of.counts.gain(trust, is_liar=of.is_liar(other))
