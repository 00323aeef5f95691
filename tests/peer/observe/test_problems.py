"""What is wrong, in words: when each condition is told, and that a healthy peer has none."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from peer.facts import RECENT_ROUNDS, DiskFacts, Facts, HeldPart, PeerState, ReachFacts
from peer.observe.problems import (
    APART_S,
    CONDITIONS,
    DEATHS_S,
    NOTES,
    TURNED_AWAY_S,
    Observed,
    PeerProblem,
    problems_of,
)
from protocol.membership.dial_back import Reach
from protocol.membership.group import Group
from protocol.membership.view import Member, Progress
from protocol.names import corpus_unheld
from protocol.outcomes import SkipReason
from protocol.run.amendments import AmendedSpec
from protocol.run.run_spec import RunSpec
from protocol.run.sections import OptimizerSection, PipelineSection

NOW_S = 100_000.0
RUN = "ab" * 16
WHOLE, STAGES = Group(RUN, "model"), [Group(RUN, f"stage/{n}") for n in range(3)]
NOTHING: Any = None
WARM = OptimizerSection(warmup_steps=10)


def member(peer_id: str, group: Group = WHOLE) -> Member:
    progress = Progress("training", group=group.digest)
    return Member(peer_id, 1, alive=True, progress=progress, first_beat_s=0.0)


def healthy() -> Facts:
    """A peer that has trained for long, with all that befalls a peer in a day."""
    facts = Facts("12D3me", 1, RUN, PeerState.TRAINING)
    facts.spec = AmendedSpec(RunSpec(optimizer=WARM))
    facts.held = HeldPart(WHOLE, NOTHING, "int8", NOTHING)
    facts.recent.extend([True] * 48 + [False] * 2)
    facts.skipped[SkipReason.DEADLINE] = 2
    facts.reach = ReachFacts(reach=Reach.YES)
    facts.clock_ahead_s = -1.5
    facts.deaths.extend([(NOW_S - 10 * 3600, "died"), (NOW_S - 60, "died")])
    facts.micro_batches = 16, 16
    facts.train_loss, facts.validation_loss = 2.5, 2.4
    facts.losses.extend([2.6, 2.45, 2.4])
    facts.lowest_loss = 2.39
    facts.distances.extend((step, 1e-3 - 1e-6 * step) for step in range(100))
    facts.disk = DiskFacts(3e9, 10**9)
    facts.unlinked.unreached = {"12D3died": (NOW_S - 15, "dial: refused")}
    facts.unlinked.turned_away = NOW_S - 3600, "12D3aliceali", "another run"
    return facts


def found(
    facts: Facts, alive: tuple[Member, ...] = (member("12D3a"),), up: float = 0.5
) -> dict[str, str]:
    return {each.name: each.words for each in problems_of(Observed(facts, alive, (up, 0.0), NOW_S))}


def test_nothing_is_wrong_at_a_healthy_peer() -> None:
    assert found(healthy()) == {}


@pytest.mark.parametrize("state", PeerState)
def test_nothing_is_wrong_at_a_peer_that_knows_nothing_yet(state: PeerState) -> None:
    assert found(Facts("12D3me", 1, state=state), ()) == {}


def averages(facts: Facts, *recent: bool) -> None:
    facts.recent.clear()
    facts.recent.extend(recent)


def out_of_memory(facts: Facts) -> None:
    facts.micro_batches = 16, 4
    facts.restarts["out_of_memory"] = 2


def non_finite(facts: Facts) -> None:
    facts.deaths.append((NOW_S - 60, "non_finite"))
    facts.deaths.popleft()
    facts.deaths.popleft()


def grown(facts: Facts) -> None:
    facts.distances.extend((step, 1e-3 * 1.05**step) for step in range(100))


STRAY = NOW_S - 30, "12D3thestray", "versions differ"
Change = Callable[[Facts], object]
CASES: list[tuple[str, str, Change]] = [
    (
        "bootstrap-failing",
        "nobody was reached at 10.0.0.1:1: dial: no answer",
        lambda f: f.unlinked.failing.update({"10.0.0.1:1": "dial: no answer"}),
    ),
    (
        "corpus-unheld",
        "none of 1 peers that were asked (12D3a) has 2 pieces of the corpus of the expert 'code'",
        lambda f: setattr(f.corpus, "unheld", corpus_unheld("2 pieces", "code", ["12D3a"])),
    ),
    (
        "refused",
        "this peer is refused by peerbbbb, peercccc, peerdddd and 1 more: no room",
        lambda f: f.unlinked.refusing.update({f"12D3peer{4 * p}": "no room" for p in "abcd"}),
    ),
    (
        "split",
        "no link with farpeers, which most of the peers that are linked know as alive: timeout",
        lambda f: f.unlinked.unreached.update({"12D3farpeers": (NOW_S - APART_S, "timeout")}),
    ),
    (
        "peer-refused",
        "thestray was not taken in 30 s ago: versions differ",
        lambda f: setattr(f.unlinked, "turned_away", STRAY),
    ),
    (
        "trainer-dies",
        "the trainer has died 3 times in 300 minutes, last for this reason: out_of_memory",
        lambda f: f.deaths.extend(
            (NOW_S - 3600 * hours, "out_of_memory") for hours in (5, 3, 1)
        ),
    ),
    (
        "loss-not-finite",
        "the training loss is not finite",
        lambda f: setattr(f, "train_loss", math.nan),
    ),
    ("loss-not-finite", "the loss was not finite 1 times; the trainer began again", non_finite),
    (
        "loss-rising",
        "the validation loss is 2.80, after 2.39 at its lowest",
        lambda f: f.losses.extend([2.5, 2.6, 2.8]),
    ),
    ("replicas-apart", "times as far as 50 averages ago", grown),
    (
        "few-averages",
        "40% of the last 10 rounds were averaged; most often: deadline (2 since the start)",
        lambda f: averages(f, *[True] * 4, *[False] * 6),
    ),
    (
        "disk",
        "1.5 GB are free on the disk; a checkpoint takes 1.0 GB",
        lambda f: setattr(f.disk, "free_bytes", 1.5e9),
    ),
    (
        "disk",
        "the disk has not taken what was to be kept: No space left on device",
        lambda f: setattr(f.disk, "refusal", "No space left on device"),
    ),
    (
        "clock-off",
        "the clocks of other peers are 7.0 s behind this machine's",
        lambda f: setattr(f, "clock_ahead_s", -7.0),
    ),
    (
        "undialable",
        "nobody can dial this peer: 2 peers relay for it",
        lambda f: setattr(f, "reach", ReachFacts(reach=Reach.NO, relays=("a", "b"))),
    ),
    (
        "undialable",
        "nobody can dial this peer, and no peer relays for it",
        lambda f: setattr(f, "reach", ReachFacts(reach=Reach.NO)),
    ),
    (
        "memory-lowered",
        "the trainer ran out of memory 2 times; it takes 4 sequences at a time now, 16 at first",
        out_of_memory,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words", "change"), CASES, ids=[case[0] for case in CASES])
def test_what_is_wrong_is_told_alone_and_with_its_figures(
    name: str, words: str, change: Change
) -> None:
    facts = healthy()
    change(facts)
    alive = () if name == "bootstrap-failing" else (member("12D3a"),)
    told = found(facts, alive)
    assert list(told) == [name]
    assert words in told[name]


def test_alone_for_some_rounds() -> None:
    facts = healthy()
    averages(facts, True, False, False, False)
    assert found(facts) == {}, "skipped, in company"
    assert found(facts, ()) == {"alone": "no other peer is linked; 3 rounds were trained alone"}
    averages(facts, True, False, False)
    assert found(facts, ()) == {}, "a peer that was just left"
    averages(facts, *[False] * RECENT_ROUNDS)
    assert found(facts, ())["alone"].endswith("at least 50 rounds were trained alone")
    facts.state = PeerState.PAUSED
    assert found(facts, ()) == {}


def test_a_line_at_its_cap() -> None:
    said = "the line has carried 95% of --max-upload-mbps in the last minute"
    assert found(healthy(), up=0.95) == {"line-at-cap": said}


def test_a_stage_that_nobody_holds() -> None:
    facts = healthy()
    facts.spec = AmendedSpec(RunSpec(pipeline=PipelineSection(stages=3), optimizer=WARM))
    facts.held = HeldPart(STAGES[0], NOTHING, "int8", NOTHING)
    others = member("12D3a", STAGES[1]), member("12D3b", STAGES[2])
    assert found(facts, others) == {}
    assert found(facts, others[:1]) == {"stage-unheld": "no peer that is linked holds stage 2"}


def test_distances_of_the_warm_up_are_not_compared() -> None:
    facts = healthy()
    facts.distances.extend((step - 60, 1e-3 * 1.05**step) for step in range(60))
    assert found(facts) == {}


def test_what_was_long_ago_is_over() -> None:
    facts = healthy()
    facts.deaths.extend((NOW_S - DEATHS_S - 3600 * hours, "non_finite") for hours in (2, 1, 0.1))
    facts.unlinked.turned_away = NOW_S - TURNED_AWAY_S - 1, "12D3a", "no room"
    assert found(facts) == {}


def test_rounds_of_a_time_without_company_are_not_held_against_it() -> None:
    facts = healthy()
    averages(facts, *[False] * 40, *[True] * 6, *[False] * 4)
    assert found(facts) == {}
    averages(facts, *[False] * 40, *[True] * 4, *[False] * 6)
    assert list(found(facts)) == ["few-averages"]
    facts.inner_steps_per_round, facts.steps_per_s = 60, 1.0
    newcomer = replace(member("12D3a"), first_beat_s=NOW_S - 599)
    assert found(facts, (newcomer,)) == {}, "it came nine rounds ago"


def test_one_bad_validation_is_chance() -> None:
    facts = healthy()
    facts.losses.extend([2.41, 2.4, 2.9])
    assert found(facts) == {}


def test_each_condition_has_a_case_and_names_a_section() -> None:
    tried = {case[0] for case in CASES} | {"alone", "line-at-cap", "stage-unheld"}
    assert tried == set(CONDITIONS) >= NOTES
    facts = healthy()
    facts.disk.refusal = "full"
    (problem,) = problems_of(Observed(facts, [member("12D3a")], (0.0, 0.0), NOW_S))
    assert problem == PeerProblem(
        "disk", "the disk has not taken what was to be kept: full", "troubleshooting.md#disk"
    )
