"""Checks of what relays make: one microbatch through several relays of a stage, compared.

Idea. A data peer cannot compute what a stage makes of a microbatch, but the replicas of a stage
make nearly the same of it. So of one microbatch in CHECKED two copies set out over the same path,
each with another relay of one stage, and what the three bring to the loss is compared. One that is
far from both others, while those are near each other, is odd.

Rules
  1. A check is drawn when its microbatch has come to the loss, from a seed that nobody else knows:
     a relay has answered before anybody can know that the answer is checked. The copies are scores:
     they cost a forward, belong to no iteration, and no stage adds anything of them. Relays can
     tell them from other microbatches; that helps no liar, because it has lied before.
  2. The distance of two boundaries is the length of their difference in lengths of the longer, in
     each of the codec's blocks, and the mean over these: a few huge tokens do not hide the others.
  3. Far is beyond FLOOR, and beyond FACTOR times the usual distance. That is the middle over the
     last PAIRS pairs of relays, each with one voice: its distance when it was last the nearest pair
     of a check. Of three relays those are two honest ones, unless two lie. What is far of two
     relays is not remembered.
  4. A relay is left out when it was odd STRIKES times, and no other was on the path each time. That
     other may have done it: it may know a copy by what is in it, and lie in some and not in
     others. So one that lies alone has nobody else left out, whatever it does. A relay that holds
     its stage alone is not counted among those others, else it would cover for all liars.
  5. While somebody is suspected, for SUSPECTED checks, all paths are drawn: a plan has the same
     relays together always.
  6. One that is left out is used again after a pause, which is twice as long each time; at once
     where its stage has nobody else.
  7. Of two relays nobody can say which is odd. So a stage of two is not checked; where one copy of
     two is lost, it is told that the others differ, and nothing follows.

Not seen: lies within the bound; lies of most relays of a stage; lies in gradients. To compare those
a second relay would have to compute one, and would add it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median_high
from typing import Final

from msgspec.structs import replace

from protocol.limits import MAX_LINKS, forget_oldest
from protocol.membership.book import BackOff, Pauses
from protocol.pipeline.problem import Draws
from protocol.wire.stage_messages import Microbatch, Path, RelaysByStage

CHECKED: Final = 40
"""A microbatch costs a forward, and a backward of two; its check two forwards. So checks cost 1.7%
of the relays' work, and 2.5% of the bytes."""
COPIES: Final = 2
FLOOR: Final = 0.2
"""Replicas of a fresh model, at its highest rate, were 0.15 apart at most, 0.07 in the middle; a
relay that leaves out its layer is 0.2 to 0.7 from others (docs/log.md)."""
FACTOR: Final = 4.0
PAIRS: Final = 16
STRIKES: Final = 2
SUSPECTED: Final = 16
PAUSES: Final = Pauses(1800.0, 86_400.0)


@dataclass(slots=True, eq=False)
class Check:
    """A microbatch that is checked.

    Attributes:
        path: its own.
        place: in the path, of the relay that the copies replace.
        companions: the others of the path that could be replaced (rule 4).
        awaited: outputs that are here or may still come.
        outputs: what came to the loss, by the relay at that place.
    """

    path: Path
    place: int
    companions: frozenset[str]
    awaited: int = 1
    outputs: dict[str, bytes] = field(default_factory=dict)

    @property
    def is_due(self) -> bool:
        return len(self.outputs) == self.awaited > 1


@dataclass(frozen=True, slots=True)
class Read:
    """Copy what lies in this inbound slot, at once: it is what came by that relay."""

    check: Check
    relay: str
    slot: int


@dataclass(frozen=True, slots=True)
class Compare:
    """Find the distances of all pairs of the check's outputs, in the order of `combinations`."""

    check: Check


@dataclass(frozen=True, slots=True)
class Differing:
    """The relays of a stage make different things of one microbatch.

    Attributes:
        remotes: the relays that were compared.
        odd: the one that the others say is wrong; None where that cannot be said.
        distance: the largest of two of them.
        bound: what it may be.
        left_out: whether the odd one is left out from now on.
    """

    stage: int
    remotes: tuple[str, ...]
    odd: str | None
    distance: float
    bound: float
    left_out: bool


class Checks:
    """The checks of one data peer.

    Args:
        seed: of the draws; nothing is checked without.
    """

    def __init__(self, seed: str | None = None) -> None:
        self._seed = seed
        self._usual: dict[frozenset[str], float] = {}  # pairs, the one heard last at the end
        self._odd: dict[str, tuple[int, frozenset[str]]] = {}  # times, and who was there each time
        self._pauses = BackOff(*PAUSES)
        self._suspected = 0

    @property
    def is_suspecting(self) -> bool:
        return self._suspected > 0

    def left_out(self, relays: Iterable[str], now_s: float) -> set[str]:
        return {relay for relay in relays if not self._pauses.is_due(relay, now_s)}

    def draw(
        self, microbatch: Microbatch, path: Path, relays: RelaysByStage
    ) -> tuple[Check, list[Path]] | None:
        """Whether a microbatch is checked, and over which paths its copies set out."""
        numbers = [len(relays[stage - 1]) for stage in path.stages]
        places = [i for i, number in enumerate(numbers) if number > COPIES]
        if self._seed is None or not places:
            return None
        draws = Draws(f"{self._seed}/{microbatch.iteration}/{microbatch.index}")
        if draws.below(CHECKED):
            return None
        place = draws.of(places)
        others = [each for each in relays[path.stages[place] - 1] if each != path.relays[place]]
        chosen = [others.pop(draws.below(len(others))) for _ in range(COPIES)]
        replaceable = (i for i, number in enumerate(numbers) if number > 1 and i != place)
        companions = frozenset(path.relays[i] for i in replaceable)
        before, after = path.relays[:place], path.relays[place + 1 :]
        copies = [replace(path, relays=(*before, other, *after)) for other in chosen]
        return Check(path, place, companions, 1 + COPIES), copies

    def judge(self, check: Check, distances: Sequence[float], now_s: float) -> Differing | None:
        """Judge the outputs of a check by the distances of all pairs."""
        apart = dict(zip(combinations(check.outputs, 2), distances, strict=True))
        usual = median_high(self._usual.values()) if self._usual else 0.0
        bound = max(FLOOR, FACTOR * usual)
        far = [pair for pair, distance in apart.items() if not distance <= bound]
        if len(apart) > 1 or not far:
            self._remember(apart)
        self._suspected = max(0, self._suspected - 1)
        if not far:
            return None
        odd = _odd_one(check.outputs, far)
        is_left_out = odd is not None and self._note_odd(odd, check.companions, now_s)
        stage, relays = check.path.stages[check.place], tuple(check.outputs)
        return Differing(stage, relays, odd, max(distances), bound, is_left_out)

    def _remember(self, apart: dict[tuple[str, str], float]) -> None:
        nearest = min(apart, key=lambda pair: apart[pair])
        self._usual.pop(frozenset(nearest), None)
        self._usual[frozenset(nearest)] = apart[nearest]
        forget_oldest(self._usual, PAIRS)

    def _note_odd(self, relay: str, companions: frozenset[str], now_s: float) -> bool:
        """Whether the relay is left out from now on (rule 4), and was not before."""
        if not self._pauses.is_due(relay, now_s):
            return False
        times, common = self._odd.pop(relay, (0, companions))
        times, common = times + 1, common & companions
        if times >= STRIKES and not common:
            self._pauses.failed(relay, now_s)
            self._suspected = 0
            return True
        self._odd[relay], self._suspected = (times, common), SUSPECTED
        forget_oldest(self._odd, MAX_LINKS)
        return False


def _odd_one(relays: Iterable[str], far: Sequence[tuple[str, str]]) -> str | None:
    """The relay that is far from both others, which are near each other; None where none is."""
    times = {relay: sum(relay in pair for pair in far) for relay in relays}
    is_clear = sorted(times.values()) == [1, 1, 2]
    return max(times, key=lambda relay: times[relay]) if is_clear else None
