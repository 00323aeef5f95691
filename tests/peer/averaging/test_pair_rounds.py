"""Flights of fragments beside validation, the final averaging and the end: who waits for whom."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import trio
from trio.testing import MockClock

from peer.averaging.gossip.lane import Trial
from peer.averaging.gossip.noloco import MEETINGS_AT_ONCE, PairRounds
from peer.facts import Facts
from peer.observe.events import EventLog
from peer.rounds.validation import Validation
from peer.rounds.way import TrainerLine
from peer.training.messages import (
    Evaluate,
    Evaluated,
    Ready,
    RoundClosed,
)
from protocol.gossip.final_averaging import Meeting
from protocol.run.run_spec import RunSpec, SyncSection, TrainingSection
from protocol.run.sections import NolocoSection
from protocol.schedule.rounds import OwnRounds
from protocol.trainer_messages import FragmentSent, Merge, Tried, Try

H, ROUNDS, FRAGMENTS = 10, 4, 6
EXCHANGE_S, STEP_S = 1.0, 0.25
BATCH_SIZE = 256
READY = Ready("cpu", "fp32", 1, 1.0, (("a", (128,)),))
MEASURES = Ready("cpu", "fp32", 1, 1.0, (("a", (128,)),), measures=True)


class Steps:
    """The outer steps of one fragment, which take their time and note when."""

    def __init__(self, fragment: int, log: list[tuple[float, str, int]]) -> None:
        self.outer = SimpleNamespace(round=-1)
        self.gain: float | None = -1.0
        self._fragment = fragment
        self._log = log

    async def contribution(self, own: Any) -> Any:
        return own

    async def average(
        self, own: Any, meeting: Meeting | None, meanwhile: float, on_paired: Any
    ) -> Any:
        self._log.append((trio.current_time(), "exchange", self._fragment))
        await trio.sleep(EXCHANGE_S)
        return own

    async def apply(
        self, settled: Any, meeting: Meeting | None, train_s: float, trial: Trial
    ) -> float:
        self._log.append((trio.current_time(), "step", self._fragment))
        await trio.sleep(STEP_S)
        self.gain = await trial(settled)
        return STEP_S


class World:
    """PairRounds between a trainer that notes what it is told, and steps that note theirs."""

    def __init__(self, nursery: trio.Nursery, fragments: Any, ready: Ready) -> None:
        self.others = [SimpleNamespace(progress=SimpleNamespace(step=0.0))]
        self.began_s = trio.current_time()
        self.log: list[tuple[float, str, int]] = []
        self.told: list[tuple[float, Any]] = []
        self.facts = Facts("me", 1, steps_per_s=1.0)
        events = EventLog(lambda _: None, peer="me", wall_time_s=lambda: 0.0, stream=None)
        services: Any = SimpleNamespace(facts=self.facts, events=events)
        self.validation = Validation(1, services)
        averaging: Any = SimpleNamespace(
            lanes=[Steps(fragment, self.log) for fragment in range(FRAGMENTS)]
        )
        finale: Any = SimpleNamespace(meeting=None, has_begun=False)
        self.finale = finale
        sync = SyncSection(noloco=NolocoSection(fragments=fragments), inner_steps=H)
        parts: Any = SimpleNamespace(
            spec=RunSpec(sync=sync, training=TrainingSection(batch_size=BATCH_SIZE)),
            amended=SimpleNamespace(total_steps_at=lambda _: ROUNDS * H),
            services=services,
            held=SimpleNamespace(view=None),
            candidates_of=lambda _: None,
        )
        self.rounds = PairRounds(parts, averaging, self.validation)
        self.rounds._rounds = OwnRounds("me", H, lambda _: ROUNDS * H, 0, 0.0, varied=0.0)
        self.rounds._finale = finale
        trainer: Any = self
        self.lanes = averaging.lanes
        self.rounds.on_trainer_started(TrainerLine(trainer, nursery), ready)

    async def send(self, command: Any) -> None:
        self.told.append((self.now_s, command))

    def codes(self, fragment: int) -> memoryview:
        return memoryview(bytes([fragment]))

    @property
    def now_s(self) -> float:
        return trio.current_time() - self.began_s

    async def sent(self, *fragments: int) -> None:
        for fragment in fragments:
            await self.rounds.on_event(FragmentSent(fragment, 0, H, H, "ab", 0.0, float(H)))

    async def closed(self, round_: int, step: float) -> None:
        others: Any = self.others
        await self.rounds.on_round_closed(
            RoundClosed(round_, H, H, 1.0, 0, 0, float(H), step), others
        )

    def when(self, what: str) -> list[tuple[int, float]]:
        return [
            (fragment, at_s - self.began_s) for at_s, name, fragment in self.log if name == what
        ]

    def of(self, kind: type) -> list[float]:
        return [at_s for at_s, command in self.told if isinstance(command, kind)]


@asynccontextmanager
async def world(fragments: str = "strided", ready: Ready = READY) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        yield World(nursery, fragments, ready)
        nursery.cancel_scope.cancel()


async def test_fragments_fly_side_by_side_and_are_stepped_one_after_the_other(
    autojump_clock: MockClock,
) -> None:
    async with world() as here:
        await here.sent(2, 0)
        assert here.rounds.averages_under_way == 2
        await here.rounds.on_trainer_died()  # which waits for both
        assert [at_s for _, at_s in here.when("exchange")] == [0.0, 0.0]
        assert sorted(at_s for _, at_s in here.when("step")) == [EXCHANGE_S, EXCHANGE_S + STEP_S]
        assert len(here.of(Merge)) == 2
        assert here.rounds.averages_under_way == 0


async def test_slow_weights_lie_still_while_they_are_validated(autojump_clock: MockClock) -> None:
    async with world() as here:
        await here.sent(1)
        await trio.sleep(EXCHANGE_S / 2)
        await here.closed(0, float(H))
        await trio.sleep(5.0)
        assert len(here.of(Evaluate)) == 1
        assert here.when("step") == []
        here.validation.ended(Evaluated(0, 1.0, 0.0))
        await trio.sleep(5.0)
        ((_, stepped_s),) = here.when("step")
        assert stepped_s == EXCHANGE_S / 2 + 5.0


async def test_no_validation_begins_while_a_step_is_taken(autojump_clock: MockClock) -> None:
    async with world() as here:
        await here.sent(1)
        await trio.sleep(EXCHANGE_S + STEP_S / 2)
        await here.closed(0, float(H))  # at once
        assert here.now_s == EXCHANGE_S + STEP_S / 2
        await trio.sleep(5.0)
        assert here.of(Evaluate) == [EXCHANGE_S + STEP_S]


async def test_the_last_round_waits_for_all_flights_and_is_not_validated_here(
    autojump_clock: MockClock,
) -> None:
    async with world() as here:
        await here.sent(*range(FRAGMENTS))
        await here.closed(0, float(ROUNDS * H))
        assert here.now_s == EXCHANGE_S + FRAGMENTS * STEP_S
        assert here.of(Evaluate) == []
        assert here.rounds.next_round(()) is None


async def test_planned_meetings_are_held_a_few_at_a_time_and_in_order(
    autojump_clock: MockClock,
) -> None:
    async with world() as here:
        here.finale.meeting = Meeting(1, "you", asks=True, own_share=0.5)
        await here.sent(*range(FRAGMENTS))
        await here.rounds.on_trainer_died()
        begun = here.when("exchange")
        assert sorted(fragment for fragment, at_s in begun if at_s == 0) == [0, 1, 2, 3]
        assert MEETINGS_AT_ONCE == 4
        assert {fragment for fragment, at_s in begun if at_s == EXCHANGE_S} == {4, 5}


async def test_nothing_flies_off_once_the_peer_leaves(autojump_clock: MockClock) -> None:
    async with world() as here:
        await here.sent(0)
        here.rounds.leave()
        await here.rounds.wait_idle()
        assert here.now_s == EXCHANGE_S + STEP_S
        await here.sent(1)
        assert here.rounds.averages_under_way == 0


async def test_flights_go_on_after_a_checkpoint_has_waited_for_them(
    autojump_clock: MockClock,
) -> None:
    async with world() as here:
        await here.sent(0)
        await here.rounds.wait_idle()
        await here.sent(1)
        assert here.rounds.averages_under_way == 1


async def test_a_whole_model_leaves_with_its_round_and_is_validated_when_it_was_stepped(
    autojump_clock: MockClock,
) -> None:
    async with world("whole") as here:
        await here.sent(0)
        assert here.rounds.averages_under_way == 0
        await here.closed(0, float(H))
        assert here.now_s == 0.0  # the next round may begin at once
        await here.rounds.wait_idle()
        assert here.of(Merge) == here.of(Evaluate) == [EXCHANGE_S + STEP_S]


async def test_a_whole_model_alone_is_stepped_before_the_next_round(
    autojump_clock: MockClock,
) -> None:
    async with world("whole") as here:
        here.others = []
        await here.sent(0)
        await here.closed(0, float(H))
        assert here.now_s == EXCHANGE_S + STEP_S


async def test_a_step_is_tried_before_it_is_merged(autojump_clock: MockClock) -> None:
    async with world(ready=MEASURES) as here:
        await here.sent(1)
        await trio.sleep(EXCHANGE_S + STEP_S + 1.0)
        ((_, asked),) = here.told
        assert asked == Try(1, 0, 9)
        await here.rounds.on_event(Tried(1, 0, 0.5, 0.0))
        await here.rounds.wait_idle()
        assert here.lanes[1].gain == 0.5
        assert len(here.of(Merge)) == 1


async def test_a_trainer_that_dies_over_a_trial_holds_up_no_flight(
    autojump_clock: MockClock,
) -> None:
    async with world(ready=MEASURES) as here:
        await here.sent(0, 1)
        await trio.sleep(EXCHANGE_S + STEP_S + 1.0)
        assert len(here.of(Try)) == 1
        await here.rounds.on_trainer_died()
        assert len(here.of(Try)) == 1
        assert [here.lanes[fragment].gain for fragment in (0, 1)] == [None, None]


async def test_a_trainer_without_a_loss_is_not_asked(autojump_clock: MockClock) -> None:
    async with world() as here:
        await here.sent(0)
        await here.rounds.wait_idle()
        assert here.of(Try) == []
