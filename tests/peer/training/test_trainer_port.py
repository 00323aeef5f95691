"""What every trainer promises, checked on the simulated and on the real one.

A promise is a function of a life. Simulated lives are cheap: each promise has one of its own. A
real one takes seconds to begin: it keeps all the promises of its kind of run, one after another,
for `Load` begins anew; and then it ends in one of the ways in which lives end.
"""

import pytest
from existing import existing
from trainer_worlds import (
    H,
    Life,
    assert_steps,
    digest_of,
    real_life,
    simulated_life,
    spec_of,
)

from peer.training.corpus.folder import prepare_corpus
from peer.training.messages import (
    CloseRound,
    Evaluate,
    Evaluated,
    Failed,
    RoundClosed,
    Stop,
    TrainerProgress,
)
from peer.training.ports import TrainerDied
from peer.training.schedule import learning_rate
from protocol.run.run_spec import DataSection, RunSpec
from protocol.trainer_messages import (
    FragmentMerged,
    FragmentSent,
    Merge,
    Yield,
    Yielded,
)

FOREVER = 10**6
"""Steps that are never done."""


# --- promises of every trainer --------------------------------------------------------------------
async def a_round_is_told_until_it_closes(life: Life) -> None:
    await life.load()
    closed = await life.train_on(0, quota=6)
    told = life.of(TrainerProgress)
    steps = [event.steps for event in told]
    assert steps == sorted(set(steps))
    assert 3 in steps  # half the quota
    assert_steps([*told, closed], 0.0, H / 6)
    assert (closed.round, closed.steps, closed.step) == (0, 6, H)
    assert closed.tokens == 6 * life.spec.tokens_per_step
    assert (closed.epoch, closed.position) == life.place_after(6)
    following = await life.train_on(1, quota=6)
    assert (following.epoch, following.position) == life.place_after(12)


async def the_stride_and_not_the_quota_tells_the_nominal_step(life: Life) -> None:
    """A quota may be shorter than what is owed: no round's length is a measure of it."""
    await life.load()
    await life.order_at(0, quota=4, start_step=30.5, stride=0.75)
    closed = await life.until(RoundClosed)
    assert_steps([*life.of(TrainerProgress), closed], 30.5, 0.75)
    assert (closed.steps, closed.step) == (4, 33.5)


async def a_round_closes_when_asked_to(life: Life) -> None:
    await life.load()
    await life.order(0, quota=FOREVER, start_step=4.5)
    told = await life.until(TrainerProgress)
    await life.trainer.send(CloseRound(0))
    closed = await life.until(RoundClosed)
    assert told.steps <= closed.steps < FOREVER
    assert_steps([told, closed], 4.5, H / FOREVER)
    await life.trainer.send(CloseRound(0))  # that has crossed the close
    await life.trainer.send(Evaluate(0))
    assert isinstance(await life.until(Evaluated), Evaluated)


async def a_round_of_no_steps_closes_where_it_begins(life: Life) -> None:
    await life.load()
    closed = await life.train(0, quota=0, start_step=12.5)
    assert (closed.steps, closed.tokens, closed.step) == (0, 0, 12.5)
    assert (closed.epoch, closed.position) == (0, 0)
    assert life.of(TrainerProgress) == []


async def validation_says_of_which_round_and_leaves_the_slow_weights(life: Life) -> None:
    await life.load()
    found = []
    for round_ in (7, 8):
        await life.trainer.send(Evaluate(round_))
        found.append(await life.until(Evaluated))
    assert [event.round for event in found] == [7, 8]
    assert existing(found[0].loss) == existing(found[1].loss) > 0


async def after_each_load_the_learning_rate_warms_up(life: Life) -> None:
    """To the schedule's at the nominal step: the rounds lie behind the run's own warm-up."""
    optimizer, total_steps = life.spec.optimizer, 20 * H
    for first in (3, 7):
        await life.load()
        await life.train_on(first, first + 1, quota=20)
        told = life.of(TrainerProgress)
        assert {event.round for event in told} == {first, first + 1}
        for event in told:
            begun = H * event.round + H * (event.steps - 1) / 20
            own_steps = 20 * (event.round - first) + event.steps - 1
            expected = learning_rate(optimizer, begun, total_steps, own_steps)
            assert event.learning_rate == pytest.approx(expected, rel=1e-9)


# --- promises of averaging in pairs ---------------------------------------------------------------
async def a_whole_model_is_sent_with_the_end_of_each_round(life: Life) -> None:
    await life.load()
    for round_ in range(3):
        closed = await life.train(round_, quota=4)
        sent = life.of(FragmentSent)[-1]
        assert life.seen[-2:] == [sent, closed]
        assert (sent.fragment, sent.cycle, sent.step) == (0, round_, closed.step)
        assert (sent.steps, sent.tokens) == (closed.steps, closed.tokens)
        assert digest_of(life.trainer.codes(0)) == sent.digest
        await life.merge()
        assert (await life.until(FragmentMerged)).cycle == round_


async def a_round_that_is_held_up_trains_on_at_rising_nominal_steps(life: Life) -> None:
    await life.load()
    await life.train(0, quota=4)
    stride = 1.75
    await life.order_at(1, 4, float(H), stride)
    while (await life.until(TrainerProgress)).steps <= 8:
        pass
    await life.merge()
    kinds = [type(await life.until(FragmentMerged)), type(await life.until(RoundClosed))]
    assert kinds == [FragmentMerged, RoundClosed]
    told = [event for event in life.of(TrainerProgress) if event.round == 1]
    closed = life.of(RoundClosed)[-1]
    assert_steps([*told, closed], float(H), stride)
    assert closed.step >= told[-1].step > H + 8 * stride
    assert (closed.epoch, closed.position) == life.place_after(4 + closed.steps)


async def an_order_may_wait_for_the_round_before(life: Life) -> None:
    await life.load()
    await life.order(0, quota=4)
    await life.order(1, quota=4)
    assert (await life.until(RoundClosed)).round == 0
    await life.merge()
    assert (await life.until(RoundClosed)).round == 1


async def a_round_of_no_steps_sends_the_weights_as_they_are(life: Life) -> None:
    await life.load()
    closed = await life.train(0, quota=0)
    (sent,) = life.of(FragmentSent)
    assert (sent.steps, sent.tokens, closed.steps) == (0, 0, 0)
    assert digest_of(life.trainer.codes(0)) == sent.digest
    await life.merge()
    await life.until(FragmentMerged)


async def without_overlap_nothing_is_trained_before_the_merge(life: Life) -> None:
    await life.load()
    await life.train(0, quota=4)
    await life.order(1, quota=4)
    for _ in range(3):
        await life.trainer.send(Evaluate(0))
        assert isinstance(await life.receive(), Evaluated)
    await life.merge()
    assert isinstance(await life.receive(), FragmentMerged)
    closed = await life.until(RoundClosed)
    assert (closed.round, closed.steps, closed.step) == (1, 4, 2 * H)


# --- promises of averaging fragments --------------------------------------------------------------
async def fragments_are_sent_and_merged_at_their_steps(life: Life) -> None:
    await life.load()
    for round_ in range(2):
        closed = await life.train(round_)
        assert closed.steps == H
    moments = [(e.fragment, e.cycle, e.steps) for e in life.of(FragmentSent)]
    assert moments == [(1, 0, 5), (0, 1, 10), (1, 1, 10), (0, 2, 10)]
    assert [(e.fragment, e.cycle) for e in life.of(FragmentMerged)] == [(1, 0), (0, 1), (1, 1)]
    ends = [type(e) for e in life.seen if isinstance(e, FragmentSent | RoundClosed)]
    assert ends == 2 * [FragmentSent, FragmentSent, RoundClosed]
    for sent in life.of(FragmentSent)[-2:]:
        assert digest_of(life.trainer.codes(sent.fragment)) == sent.digest


async def fragments_follow_the_number_of_the_round(life: Life) -> None:
    """Wherever its nominal steps begin."""
    await life.load()
    closed = await life.train(4, start_step=47.0)
    assert closed.step == 57.0
    assert [(e.fragment, e.cycle) for e in life.of(FragmentSent)] == [(1, 4), (0, 5)]


async def a_round_of_no_steps_sends_the_fragments_that_are_left(life: Life) -> None:
    await life.load()
    assert (await life.train(0, quota=0)).steps == 0
    assert [(e.fragment, e.cycle, e.steps) for e in life.of(FragmentSent)] == [(1, 0, 0)]
    await life.until(FragmentMerged)


async def a_fragment_can_be_yielded_and_amended(life: Life) -> None:
    await life.load()
    await life.trainer.send(Yield(1))
    assert await life.receive() == Yielded(1)
    await life.trainer.send(Merge(1, None, (), (0,), ()))
    await life.train(0)
    assert (1, 0) in {(e.fragment, e.cycle) for e in life.of(FragmentSent)}


async def a_late_merge_is_waited_for(life: Life) -> None:
    """Training stands still; commands are obeyed."""
    await life.load()
    await life.order(0)
    while not isinstance(sent := await life.receive(), FragmentSent):
        pass
    for _ in range(3):
        await life.trainer.send(Evaluate(0))
        await life.until(Evaluated)
    tau = 1
    assert max(event.steps for event in life.of(TrainerProgress)) <= sent.steps + tau
    await life.trainer.send(Merge(sent.fragment, sent.cycle, (0,), ()))
    assert (await life.until(FragmentMerged)).cycle == sent.cycle
    assert (await life.until(RoundClosed)).steps == H


# --- promises of averaging fragments in pairs -----------------------------------------------------
async def fragments_leave_at_their_nominal_steps(life: Life) -> None:
    await life.load()
    for round_ in range(2):
        closed = await life.train(round_)
        assert closed.steps == H
    sent = life.of(FragmentSent)
    assert [(e.fragment, e.cycle, e.step) for e in sent] == [
        (1, 0, 5.0), (0, 0, 10.0), (1, 1, 15.0), (0, 1, 20.0),
    ]  # fmt: skip
    assert [e.steps for e in sent] == [5, 10, 10, 10]
    merged = {(e.fragment, e.cycle) for e in life.of(FragmentMerged)}
    assert {(e.fragment, e.cycle) for e in sent[:3]} <= merged
    for event in sent[-2:]:
        assert digest_of(life.trainer.codes(event.fragment)) == event.digest


async def fragments_follow_the_nominal_step_and_not_the_round(life: Life) -> None:
    await life.load()
    closed = await life.train(4, start_step=47.0)
    assert closed.step == 57.0
    assert [(e.fragment, e.step) for e in life.of(FragmentSent)] == [(0, 50.0), (1, 55.0)]


async def a_fragment_in_flight_holds_up_nothing(life: Life) -> None:
    await life.load()
    for round_ in range(2):
        await life.order(round_)
        while not isinstance(closed := await life.receive(), RoundClosed):
            pass  # and nothing is answered
        assert closed.steps == H
    assert len(life.of(FragmentSent)) == 2
    await life.trainer.send(Merge(1, 0, (0,), ()))
    merged = await life.receive()
    assert isinstance(merged, FragmentMerged)
    assert (merged.fragment, merged.cycle) == (1, 0)
    await life.order(2)
    late = await life.receive()
    assert isinstance(late, FragmentSent)
    assert (late.fragment, late.cycle, late.steps, late.step) == (1, 1, 15, 20.0)


async def a_round_of_no_steps_sends_every_fragment(life: Life) -> None:
    await life.load()
    assert (await life.train(0, quota=0)).steps == 0
    assert [(e.fragment, e.cycle, e.steps) for e in life.of(FragmentSent)] == [
        (0, 0, 0), (1, 0, 0),
    ]  # fmt: skip


ALWAYS = [
    a_round_is_told_until_it_closes,
    the_stride_and_not_the_quota_tells_the_nominal_step,
    a_round_closes_when_asked_to,
    a_round_of_no_steps_closes_where_it_begins,
    validation_says_of_which_round_and_leaves_the_slow_weights,
    after_each_load_the_learning_rate_warms_up,
]
PAIRS = [
    *ALWAYS,
    a_whole_model_is_sent_with_the_end_of_each_round,
    a_round_that_is_held_up_trains_on_at_rising_nominal_steps,
    an_order_may_wait_for_the_round_before,
    a_round_of_no_steps_sends_the_weights_as_they_are,
]
BLOCKING = [without_overlap_nothing_is_trained_before_the_merge]
FRAGMENTS = [
    *ALWAYS,
    fragments_are_sent_and_merged_at_their_steps,
    fragments_follow_the_number_of_the_round,
    a_round_of_no_steps_sends_the_fragments_that_are_left,
    a_fragment_can_be_yielded_and_amended,
    a_late_merge_is_waited_for,
]
FRAGMENTS_IN_PAIRS = [
    *ALWAYS,
    fragments_leave_at_their_nominal_steps,
    fragments_follow_the_nominal_step_and_not_the_round,
    a_fragment_in_flight_holds_up_nothing,
    a_round_of_no_steps_sends_every_fragment,
]
SPECS = {
    "pairs": spec_of(),
    "blocking": spec_of(overlap=False),
    "fragments": spec_of(method="diloco"),
    "fragments-in-pairs": spec_of(method="streaming"),
}
PROMISES = {
    "pairs": PAIRS,
    "blocking": BLOCKING,
    "fragments": FRAGMENTS,
    "fragments-in-pairs": FRAGMENTS_IN_PAIRS,
}
ONE_BY_ONE = [
    pytest.param(way, promise, id=f"{way}-{promise.__name__}")
    for way, promises in PROMISES.items()
    for promise in promises
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(30):
        (folder / f"{i}.txt").write_text("to be or not to be " * 40)
    spec = RunSpec(data=DataSection(source=f"text:{folder}/*.txt", validation_blocks=4))
    return str(prepare_corpus(spec, folder / "cache").folder)


@pytest.mark.parametrize(("way", "promise"), ONE_BY_ONE)
async def test_a_simulated_trainer_keeps(way, promise, autojump_clock):
    async with simulated_life(SPECS[way]) as life:
        await promise(life)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("way", PROMISES)
async def test_a_real_trainer_keeps_the_same(way, corpus):
    async with real_life(SPECS[way], corpus) as life:
        for promise in PROMISES[way]:
            await promise(life)
        if way in ENDED_BY:
            await ENDED_BY[way](life)


# --- how a life ends ------------------------------------------------------------------------------
async def _failure(life: Life) -> Failed:
    while not isinstance(event := await life.receive(), Failed):
        pass
    with pytest.raises(TrainerDied, match="exited with 1"):
        await life.receive()
    return event


async def an_order_before_load_is_refused(life: Life) -> None:
    await life.order(0)
    failed = await _failure(life)
    assert failed.reason == "error"
    assert "before Load" in failed.detail


async def a_merge_of_the_wrong_send_is_refused(life: Life) -> None:
    await life.load()
    await life.train(0, quota=4)
    await life.trainer.send(Merge(0, 1, (0,), ()))
    failed = await _failure(life)
    assert failed.reason == "error"
    assert "Merge(fragment=0, cycle=1" in failed.detail


async def a_killed_trainer_says_so(life: Life) -> None:
    await life.load()
    await life.order(0, quota=FOREVER)
    await life.until(TrainerProgress)
    life.kill()
    with pytest.raises(TrainerDied, match="signal 9"):
        await life.until(RoundClosed)
    with pytest.raises(TrainerDied, match="signal 9"):
        await life.trainer.send(Evaluate(0))


async def stop_ends_it_after_what_was_told_before(life: Life) -> None:
    await life.load()
    await life.order(0, quota=4)
    await life.until(TrainerProgress)
    await life.trainer.send(Evaluate(0))
    await life.trainer.send(Stop())
    with pytest.raises(TrainerDied, match="exited with 0"):
        while True:
            await life.receive()
    assert len(life.of(Evaluated)) == 1


ENDINGS = [
    an_order_before_load_is_refused,
    a_merge_of_the_wrong_send_is_refused,
    a_killed_trainer_says_so,
    stop_ends_it_after_what_was_told_before,
]
ENDED_BY = {
    "pairs": a_merge_of_the_wrong_send_is_refused,
    "fragments": a_killed_trainer_says_so,
    "fragments-in-pairs": stop_ends_it_after_what_was_told_before,
}
"""How the real lives that have kept their promises end; each way to end is there."""


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
async def test_a_simulated_life_ends(ending, autojump_clock):
    async with simulated_life(SPECS["pairs"], die_at_step=50) as life:
        await ending(life)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
async def test_a_real_life_ends(ending, corpus):
    """Long: a refusal, a signal and `Stop` end lives above; the others end as a refusal does."""
    async with real_life(SPECS["pairs"], corpus) as life:
        await ending(life)
