"""Fragments among all, of many runs at once: the daemon's averages and steps, and others."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, median_low
from typing import Final

import torch

from peer.averaging.diloco.nesterov import num_trimmed
from peer.averaging.diloco.outer_fragments import FIRST_RESULTS
from protocol.diloco.owners import owners_of_chunks
from protocol.fragment.fragments import fragments_of_run, sends_between
from protocol.plausible import CLIP, Plausibility, contribution_shares
from protocol.run.sections import DilocoSection

from .arms import NONE
from .liars import JUST_BELOW
from .long_arms import MEASURING, SLY, LongArm
from .long_pairs import NAMES, SCALES
from .long_world import Counts, LongWorld
from .stack import Stack, lengths, of_length, quantised

LEFT_OUT_OF: Final = 3
"""An owner leaves out one of so many, at most."""
SLY_LENGTHS: Final = (1.5, 1.2, 1.0, 0.8, 0.6, 0.45, 0.3, 0.2, 0.12, 0.06, 0.0)
FAR: Final = 4.0


@dataclass(slots=True)
class _Company:
    """One run: its arm, its number, and the rows of its peers."""

    arm: LongArm
    index: int
    rows: slice
    counts: Counts = field(default_factory=Counts)
    seen: defaultdict[tuple[int, int], Plausibility] = field(
        default_factory=partial(defaultdict, Plausibility)
    )
    directions: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    fragment: int
    cycle: int
    due_step: int
    sent_RC: torch.Tensor


class LongFragments:
    """Averages; training is the caller's."""

    def __init__(self, stack: Stack, arms: Sequence[LongArm], world: LongWorld) -> None:
        self._stack, self._world, device = stack, world, stack.device
        self._diloco = DilocoSection()
        self.companies: list[_Company] = []
        first = 0
        for index, arm in enumerate(arms):
            rows = slice(first, first + arm.peers)
            self.companies.append(_Company(arm, index, rows))
            first += arm.peers
        of_rows = [of.index for of in self.companies for _ in range(of.arm.peers)]
        self._company_R = torch.tensor(of_rows, device=device)
        firsts = [of.rows.start for of in self.companies]
        self._firsts_J = torch.tensor(firsts, device=device)
        self.phi_JP = stack.theta_RP[self._firsts_J].clone()
        self._v_JP = torch.zeros_like(self.phi_JP)
        self._momentum_RP = torch.zeros_like(stack.theta_RP)
        centred = [of.arm.defence == "centred" for of in self.companies]
        self._centred_J1 = torch.tensor(centred, device=device)[:, None]
        self._fragments = fragments_of_run(self._diloco, stack.layout)
        self._columns = [
            torch.cat([torch.arange(*span) for span in fragment.spans]).to(device)
            for fragment in self._fragments
        ]
        self._last_cycle = world.world.setting.steps // world.inner_steps
        self._on_their_way: list[_OnItsWay] = []

    def after_step(self, step: int) -> None:
        """Send what is due after this inner step (the first is 1), and take in what is back."""
        count = len(self._fragments)
        for fragment, cycle in sends_between(step - 1, step, count, self._world.inner_steps):
            due_step = step + self._diloco.overlap_steps
            sent_RC = self._sent(fragment, is_last=cycle == self._last_cycle)
            self._on_their_way.append(_OnItsWay(fragment, cycle, due_step, sent_RC))
        self._take_in(step)

    def settle(self) -> None:
        """Take in what is on its way, then send all once more: the plain average at the end."""
        self._take_in(None)
        for fragment in range(len(self._fragments)):
            sent_RC = self._sent(fragment, is_last=True)
            self._average(fragment, self._last_cycle, sent_RC)

    def judged(self, company: int) -> torch.Tensor:
        """Slow weights of its honest peers: all have the same."""
        return self.phi_JP[company : company + 1]

    def _take_in(self, step: int | None) -> None:
        for sent in tuple(self._on_their_way):
            if step is None or sent.due_step <= step:
                self._on_their_way.remove(sent)
                self._average(sent.fragment, sent.cycle, sent.sent_RC)

    def _sent(self, fragment: int, *, is_last: bool) -> torch.Tensor:
        """What each would take away from the slow weights; with `centred` its momentum."""
        columns = self._columns[fragment]
        own_RC = self.phi_JP[self._company_R][:, columns] - self._stack.theta_RP[:, columns]
        if not is_last:
            memory_RC = self._momentum_RP[:, columns].lerp(own_RC, 1 - self._diloco.momentum)
            self._momentum_RP[:, columns] = memory_RC
            own_RC = torch.where(self._centred_J1[self._company_R], memory_RC, own_RC)
        return quantised(own_RC)

    def _average(self, fragment: int, cycle: int, sent_RC: torch.Tensor) -> None:
        own_RC, is_last = sent_RC, cycle == self._last_cycle
        sent_RC = self._with_lies(fragment, cycle, sent_RC, is_last=is_last)
        chunks = self._fragments[fragment].chunks
        owners = {
            peers: owners_of_chunks(f"long/{fragment}/{cycle}", len(chunks), NAMES[:peers])
            for peers in {of.arm.peers for of in self.companies}
        }
        for chunk, (start, stop) in enumerate(chunks):
            columns = self._columns[fragment][start:stop]
            values_RC = sent_RC[:, start:stop]
            owner = {peers: NAMES.index(names[chunk]) for peers, names in owners.items()}
            moment = (cycle * len(self._fragments) + fragment) * len(chunks) + chunk
            mean_JC = quantised(self._mean(values_RC, columns, owner, moment, is_last=is_last))
            firsts_JC = own_RC[self._firsts_J][:, start:stop]
            found = torch.stack((lengths(mean_JC), lengths(firsts_JC))).T.tolist()
            stepped = []
            for of, (length, ours) in zip(self.companies, found, strict=True):
                scale = FIRST_RESULTS * ours
                share = of.seen[fragment, chunk].share("", length, scale, expected=scale)
                stepped.append(share is not None or of.arm.defence == "none")
            self._step(columns, mean_JC, stepped, is_last=is_last)

    # --- lies -------------------------------------------------------------------------------------
    def _with_lies(
        self, fragment: int, cycle: int, sent_RC: torch.Tensor, *, is_last: bool
    ) -> torch.Tensor:
        """The same with what liars send in the place of theirs; as in liars.py."""
        found, lied_RC = lengths(sent_RC).tolist(), sent_RC.clone()
        for of in self.companies:
            if not of.arm.liars:
                continue
            honest = slice(of.rows.start, of.rows.start + of.arm.honest)
            liars = slice(honest.stop, of.rows.stop)
            mean_C, usual = -sent_RC[honest].mean(0), median_low(sorted(found[honest]))
            if of.arm.attack == "inner":
                lied_RC[liars] = -of_length(-mean_C, median(found[honest]))
            elif of.arm.attack == "collude":
                push_C = of.directions.setdefault(fragment, -mean_C)
                if of.arm.defence == "centred" and not is_last:
                    # What is beyond the centre is clipped: far in one direction is all the way.
                    centre_C = self._v_JP[of.index, self._columns[fragment]]
                    lied_RC[liars] = centre_C - of_length(push_C, FAR * usual)
                else:
                    lied_RC[liars] = -of_length(push_C, JUST_BELOW * CLIP.largest * usual)
            elif of.arm.attack == SLY:
                push_C = of.directions.setdefault(fragment, -mean_C)
                lied_RC[liars] = -self._sly(of, fragment, cycle, -sent_RC[honest], push_C, usual)
            else:
                lied_RC[liars] = SCALES[of.arm.attack] * sent_RC[liars]
        return quantised(lied_RC)

    def _sly(
        self,
        of: _Company,
        fragment: int,
        cycle: int,
        honest_NC: torch.Tensor,
        push_C: torch.Tensor,
        usual: float,
    ) -> torch.Tensor:
        """The mean of the honest, and as far against them as it still helps enough."""
        mean_C, push_C = honest_NC.mean(0), of_length(push_C, usual)
        lies_LC = torch.stack([mean_C + length * push_C for length in SLY_LENGTHS])
        tried_NC = torch.cat((torch.zeros_like(lies_LC[:1]), lies_LC, honest_NC))
        weights_NP = self.phi_JP[of.index].repeat(len(tried_NC), 1)
        weights_NP[:, self._columns[fragment]] += tried_NC
        blocks = self._world.own_blocks(cycle, len(NAMES) - 1)  # the liars' own
        losses = self._stack.losses(weights_NP, blocks.expand(len(tried_NC), -1, -1)).tolist()
        gains = [losses[0] - loss for loss in losses[1:]]
        middle = median(gains[len(lies_LC) :])
        needed = middle / 2 if of.arm.defence == "half" else min(0.0, middle)
        measured = zip(gains, lengths(lies_LC).tolist(), strict=False)
        for number, (gain, length) in enumerate(measured):
            if gain >= needed + 0.0005 and length <= CLIP.largest * usual:
                return lies_LC[number]
        return mean_C

    # --- defences ---------------------------------------------------------------------------------
    def _mean(
        self,
        values_RC: torch.Tensor,
        columns: torch.Tensor,
        owner: dict[int, int],
        moment: int,
        *,
        is_last: bool,
    ) -> torch.Tensor:
        """What owners make of the contributions to a chunk."""
        found = lengths(values_RC).tolist()
        gains = self._gains(values_RC, columns, owner, moment)
        course_RC = self._v_JP[:, columns][self._company_R]
        away = lengths(values_RC - course_RC).tolist()
        trust = self._trust(values_RC, course_RC, owner)
        weights: list[float] = []
        kept: list[float] = []
        for of in self.companies:
            of_lengths, defence = found[of.rows], of.arm.defence
            shares = contribution_shares(of_lengths)
            if defence == "none":
                shares = [1.0] * len(shares)
            elif defence == "centred" and not is_last:
                middle = median_low(sorted(away[of.rows]))
                shares = [min(1.0, middle / max(each, 1e-30)) for each in away[of.rows]]
            shares = [share / len(shares) for share in shares]
            kept.append(1 - sum(shares) if defence == "centred" and not is_last else 0.0)
            if defence in MEASURING:
                left_out = self._left_out(of, gains[of.rows], owner[of.arm.peers])
                shares = [0.0 if i in left_out else share for i, share in enumerate(shares)]
                shares = [share * len(shares) / (len(shares) - len(left_out)) for share in shares]
            if defence in ("trust", "course") and not is_last and sum(trust[of.rows]) > 0:
                length = median_low(sorted(of_lengths))
                if defence == "trust":
                    length = of_lengths[owner[of.arm.peers]]
                shares = _trusted(trust[of.rows], of_lengths, length)
            weights += shares
            self._note(of, shares)
        device = values_RC.device
        weight_R1 = torch.tensor(weights, device=device)[:, None]
        mean_JC = torch.tensor(kept, device=device)[:, None] * self._v_JP[:, columns]
        mean_JC.index_add_(0, self._company_R, weight_R1 * values_RC)
        for of in self.companies:
            if of.arm.defence == "trim":
                mean_JC[of.index] = _trimmed(values_RC[of.rows], found[of.rows])
        return mean_JC

    def _trust(
        self, values_RC: torch.Tensor, course_RC: torch.Tensor, owner: dict[int, int]
    ) -> list[float]:
        """The cosine with what each is held against, no less than 0."""
        by_owner, owners = [], []
        for of in self.companies:
            by_owner += [of.arm.defence == "trust"] * of.arm.peers
            owners += [of.rows.start + owner[of.arm.peers]] * of.arm.peers
        by_owner_R1 = torch.tensor(by_owner, device=values_RC.device)[:, None]
        owners_R = torch.tensor(owners, device=values_RC.device)
        reference_RC = torch.where(by_owner_R1, values_RC[owners_R], course_RC)
        found = torch.cosine_similarity(values_RC, reference_RC, dim=1).clamp(min=0)
        return found.nan_to_num(0.0).tolist()

    @staticmethod
    def _note(of: _Company, shares: Sequence[float]) -> None:
        of.counts.means += 1
        for peer, share in enumerate(shares):
            of.counts.note(share, is_liar=peer >= of.arm.honest)

    def _gains(
        self, values_RC: torch.Tensor, columns: torch.Tensor, owner: dict[int, int], moment: int
    ) -> list[float]:
        """What each contribution to a chunk brings by the owner's own blocks, where it is asked."""
        gains = [0.0] * len(values_RC)
        asked = [of for of in self.companies if of.arm.defence in MEASURING]
        if not asked:
            return gains
        rows = torch.cat([torch.arange(of.rows.start, of.rows.stop) for of in asked])
        index = torch.tensor([of.index for of in asked], device=values_RC.device)
        rows = rows.to(values_RC.device)
        weights_NP = self.phi_JP[self._company_R[rows]].clone()
        weights_NP[:, columns] -= values_RC[rows]
        own = [self._world.own_blocks(moment, owner[of.arm.peers]) for of in asked]
        before_J = self._stack.losses(self.phi_JP[index], torch.stack(own)).tolist()
        blocks = [each for of, each in zip(asked, own, strict=True) for _ in range(of.arm.peers)]
        after = iter(self._stack.losses(weights_NP, torch.stack(blocks)).tolist())
        for of, before in zip(asked, before_J, strict=True):
            for peer in range(of.arm.peers):
                gain = before - next(after)
                gains[of.rows.start + peer] = gain
                of.counts.gain(gain, is_liar=peer >= of.arm.honest)
        return gains

    @staticmethod
    def _left_out(of: _Company, gains: Sequence[float], owner: int) -> set[int]:
        """Those whom the owner says not to help. A liar says it of the honest."""
        most = len(gains) // LEFT_OUT_OF
        if owner >= of.arm.honest and of.arm.attack != NONE:
            return set(range(most))
        middle = median(gains)
        needed = middle / 2 if of.arm.defence == "half" else min(0.0, middle)
        odd = [peer for peer in range(len(gains)) if not gains[peer] >= needed]
        return set(sorted(odd, key=lambda peer: gains[peer])[:most])

    # --- the outer step ---------------------------------------------------------------------------
    def _step(
        self,
        columns: torch.Tensor,
        mean_JC: torch.Tensor,
        stepped: Sequence[bool],
        *,
        is_last: bool,
    ) -> None:
        """Nesterov's; the momentum of `centred` lies with the peers, which makes the same step."""
        rate, momentum = self._diloco.learning_rate, self._diloco.momentum
        v_JC = self._v_JP[:, columns]
        if is_last:
            move_JC, new_JC = mean_JC, v_JC
        else:
            new_JC = torch.where(self._centred_J1, mean_JC, momentum * v_JC + mean_JC)
            plain_JC = rate * (mean_JC + momentum * new_JC)
            ahead_JC = (1 + momentum) * mean_JC - momentum * v_JC
            move_JC = torch.where(self._centred_J1, rate / (1 - momentum) * ahead_JC, plain_JC)
        is_stepped = torch.tensor(stepped, device=mean_JC.device)[:, None]
        phi_JC = self.phi_JP[:, columns]
        phi_JC = torch.where(is_stepped, phi_JC - move_JC, phi_JC)
        self.phi_JP[:, columns] = phi_JC
        self._v_JP[:, columns] = torch.where(is_stepped, new_JC, v_JC)
        theta_RC = self._stack.theta_RP[:, columns]
        merged_RC = theta_RC.lerp(phi_JC[self._company_R], 1 - self._diloco.merge)
        is_merged_R1 = is_stepped[self._company_R]
        self._stack.theta_RP[:, columns] = torch.where(is_merged_R1, merged_RC, theta_RC)


def _trusted(trust: Sequence[float], found: Sequence[float], length: float) -> list[float]:
    """Weights of vectors of these lengths, each made as long as the reference."""
    pairs = zip(trust, found, strict=True)
    return [each * length / max(own, 1e-30) / sum(trust) for each, own in pairs]


def _trimmed(values_NC: torch.Tensor, found: Sequence[float]) -> torch.Tensor:
    shares = torch.tensor(contribution_shares(found), device=values_NC.device)[:, None]
    out = num_trimmed(len(found))
    return (shares * values_NC).sort(0).values[out : len(found) - out].mean(0)
