"""Problems of a peer, in words: one list, for the status, the metrics and those who are told.

A condition is a function of what the peer knows already: a sentence with the figures, or nothing.
Its name is that of a section in docs/troubleshooting.md, and a label of the metric `loco_problem`.
What comes and goes in a healthy swarm is no problem: conditions want several rounds, or a minute.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from peer.facts import RECENT_DEATHS, RECENT_LOSSES, RECENT_ROUNDS, Facts, PeerState
from protocol.membership.dial_back import Reach
from protocol.membership.group import Group
from protocol.membership.view import Member
from protocol.names import NAMED, short_id, size_text
from protocol.run.layout import part_of_stage

ALONE_ROUNDS: Final = 3
FEW_ROUNDS: Final = RECENT_ROUNDS // 5
"""The share of averages is judged from so many rounds on."""
LOW_SHARE: Final = 0.5
CLOCK_OFFSET_S: Final = 2.0
"""Less is usual, and costs nothing."""
APART_S: Final = 60.0
"""A peer that has just died is named by others for some seconds more."""
TURNED_AWAY_S: Final = 600.0
DEATHS_S: Final = 6 * 3600.0
"""A trainer that runs out of memory each hour makes no picture of a healthy run."""
RISEN: Final = 0.1
"""Nats by which the loss has risen."""
GROWN: Final = 3.0
"""Times the distance of replicas that they had a while ago; a falling rate makes it smaller."""
FULL_LINE: Final = 0.9
CHECKPOINTS_LEFT: Final = 2


@dataclass(frozen=True, slots=True)
class PeerProblem:
    """One thing that is wrong now.

    Attributes:
        name: stable; metrics and alerts use it.
        words: one sentence, with the figures.
        help: page and section of the documentation.
    """

    name: str
    words: str
    help: str

    @property
    def line(self) -> str:
        return f"{self.words} (docs/{self.help})"


class Observed(NamedTuple):
    """The figures that conditions are judged by.

    Attributes:
        alive: the other peers of the run.
        loads: shares of the limits that the line has carried recently, up and down.
    """

    facts: Facts
    alive: Sequence[Member]
    loads: tuple[float, float]
    now_s: float

    @property
    def trains(self) -> bool:
        return self.facts.state is PeerState.TRAINING


def problems_of(seen: Observed) -> tuple[PeerProblem, ...]:
    found = ((name, condition(seen)) for name, condition in CONDITIONS.items())
    return tuple(PeerProblem(name, words, help_of(name)) for name, words in found if words)


def help_of(name: str) -> str:
    return f"troubleshooting.md#{name}"


# --- company --------------------------------------------------------------------------------------


def _alone(seen: Observed) -> str:
    latest = reversed(seen.facts.recent)
    rounds = len(list(itertools.takewhile(lambda averaged: not averaged, latest)))
    if seen.alive or not seen.trains or rounds < ALONE_ROUNDS:
        return ""
    many = "at least " * (rounds == RECENT_ROUNDS)
    return f"no other peer is linked; {many}{rounds} rounds were trained alone"


def _bootstrap_failing(seen: Observed) -> str:
    return "" if seen.alive else _named("nobody was reached at {}", seen.facts.unlinked.failing)


def _split(seen: Observed) -> str:
    unreached = seen.facts.unlinked.unreached
    long_ago = {
        p: why for p, (since_s, why) in unreached.items() if seen.now_s - since_s >= APART_S
    }
    what = "no link with {}, which most of the peers that are linked know as alive"
    return _named(what, {short_id(peer_id): why for peer_id, why in long_ago.items()})


def _refused(seen: Observed) -> str:
    refusing = seen.facts.unlinked.refusing
    whys = {short_id(peer_id): why for peer_id, why in refusing.items()}
    return _named("this peer is refused by {}", whys)


def _peer_refused(seen: Observed) -> str:
    last = seen.facts.unlinked.turned_away
    if last is None or seen.now_s - last[0] > TURNED_AWAY_S:
        return ""
    return f"{short_id(last[1])} was not taken in {seen.now_s - last[0]:.0f} s ago: {last[2]}"


def _named(what: str, whys: dict[str, str]) -> str:
    """A sentence about all that are named in `whys`, with the last one's why."""
    if not whys:
        return ""
    shown = ", ".join(list(whys)[-NAMED:])
    more = f" and {len(whys) - NAMED} more" if len(whys) > NAMED else ""
    return f"{what.format(shown + more)}: {list(whys.values())[-1]}"


def _stage_unheld(seen: Observed) -> str:
    facts = seen.facts
    if facts.spec is None or facts.held is None or not (facts.holds_stage and seen.trains):
        return ""
    run_id, held = facts.held.group.run_id, {member.progress.group for member in seen.alive}
    held.add(facts.group)
    stages = range(facts.spec.founding.pipeline.stages)
    missing = [n for n in stages if Group(run_id, part_of_stage(n)).digest not in held]
    return f"no peer that is linked holds stage {' or '.join(map(str, missing))}" * bool(missing)


# --- the network ----------------------------------------------------------------------------------


def _undialable(seen: Observed) -> str:
    reach = seen.facts.reach
    if reach.reach is not Reach.NO:
        return ""
    if reach.relays:
        return f"nobody can dial this peer: {len(reach.relays)} peers relay for it"
    return "nobody can dial this peer, and no peer relays for it"


def _line_at_cap(seen: Observed) -> str:
    limits = zip(("--max-upload-mbps", "--max-download-mbps"), seen.loads, strict=True)
    full = [f"{load:.0%} of {limit}" for limit, load in limits if load >= FULL_LINE]
    return f"the line has carried {' and '.join(full)} in the last minute" * bool(full)


def _clock_off(seen: Observed) -> str:
    ahead_s = seen.facts.clock_ahead_s
    where = "ahead of" if ahead_s > 0 else "behind"
    says = f"the clocks of other peers are {abs(ahead_s):,.1f} s {where} this machine's"
    return says * (abs(ahead_s) > CLOCK_OFFSET_S)


# --- this machine ---------------------------------------------------------------------------------


def _disk(seen: Observed) -> str:
    disk = seen.facts.disk
    if disk.refusal:
        return f"the disk has not taken what was to be kept: {disk.refusal}"
    if disk.free_bytes >= CHECKPOINTS_LEFT * disk.checkpoint_bytes:
        return ""
    each = size_text(disk.checkpoint_bytes)
    return f"{size_text(disk.free_bytes)} are free on the disk; a checkpoint takes {each}"


def _trainer_dies(seen: Observed) -> str:
    deaths = seen.facts.deaths
    since_s = seen.now_s - deaths[0][0] if len(deaths) == RECENT_DEATHS else math.inf
    says = f"the trainer has died {len(deaths)} times in {since_s / 60:.0f} minutes"
    return f"{says}, last for this reason: {deaths[-1][1]}" if since_s <= DEATHS_S else ""


def _memory_lowered(seen: Observed) -> str:
    first, newest = seen.facts.micro_batches or (0, 0)
    if newest >= first:
        return ""
    died = seen.facts.restarts["out_of_memory"]
    return (
        f"the trainer ran out of memory {died} times; it takes {newest} sequences at a time now,"
        f" {first} at first"
    )


# --- learning -------------------------------------------------------------------------------------


def _few_averages(seen: Observed) -> str:
    facts, share = seen.facts, seen.facts.averaged_share
    newest = list(facts.recent)[-FEW_ROUNDS:]  # those before may be of a time without company
    low = max(share or 0.0, sum(newest) / FEW_ROUNDS) < LOW_SHARE
    company_s = seen.now_s - min((m.first_beat_s for m in seen.alive), default=math.inf)
    in_company = company_s >= FEW_ROUNDS * facts.own_round_s
    if not (low and len(newest) == FEW_ROUNDS and in_company and seen.trains):
        return ""
    why, count = max(facts.skipped.items(), key=lambda skipped: skipped[1], default=("", 0))
    often = f"; most often: {why} ({count} since the start)" if why else ""
    return f"{share:.0%} of the last {len(facts.recent)} rounds were averaged{often}"


def _replicas_apart(seen: Observed) -> str:
    """Distances grow while the learning rate does, and until all replicas differ as they do."""
    facts = seen.facts
    if facts.spec is None:
        return ""
    warm = facts.spec.founding.optimizer.warmup_steps
    distances = [distance for step, distance in facts.distances if step >= warm]
    if len(distances) < RECENT_ROUNDS:
        return ""
    before, now = median(distances[:FEW_ROUNDS]), median(distances[-FEW_ROUNDS:])
    says = f"replicas are {now:.2g} apart, {now / max(before, 1e-30):.1f} times as far as"
    return f"{says} {RECENT_ROUNDS} averages ago" if now > GROWN * before else ""


def _loss_not_finite(seen: Observed) -> str:
    facts = seen.facts
    losses = {"training": facts.train_loss, "validation": facts.validation_loss}
    wrong = [name for name, loss in losses.items() if loss is not None and not math.isfinite(loss)]
    if wrong:
        return f"the {' and the '.join(wrong)} loss is not finite"
    times = [at_s for at_s, why in facts.deaths if why == "non_finite"]
    recent = [at_s for at_s in times if seen.now_s - at_s <= DEATHS_S]
    return f"the loss was not finite {len(recent)} times; the trainer began again" * bool(recent)


def _loss_rising(seen: Observed) -> str:
    facts, losses = seen.facts, seen.facts.losses
    if len(losses) < RECENT_LOSSES or not min(losses) > facts.lowest_loss + RISEN:
        return ""
    return f"the validation loss is {losses[-1]:.2f}, after {facts.lowest_loss:.2f} at its lowest"


CONDITIONS: Final[dict[str, Callable[[Observed], str]]] = {
    "alone": _alone,
    "bootstrap-failing": _bootstrap_failing,
    "refused": _refused,
    "split": _split,
    "stage-unheld": _stage_unheld,
    "corpus-unheld": lambda seen: seen.facts.corpus.unheld,
    "trainer-dies": _trainer_dies,
    "loss-not-finite": _loss_not_finite,
    "loss-rising": _loss_rising,
    "replicas-apart": _replicas_apart,
    "few-averages": _few_averages,
    "disk": _disk,
    "clock-off": _clock_off,
    "undialable": _undialable,
    "line-at-cap": _line_at_cap,
    "memory-lowered": _memory_lowered,
    "peer-refused": _peer_refused,
}
NOTES: Final = frozenset({"undialable", "line-at-cap", "memory-lowered", "peer-refused"})
"""Conditions in which a peer works, with something to know."""
