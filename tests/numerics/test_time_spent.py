"""Where the time of a trainer goes: every second is counted once, for what it went into."""

from collections import deque

from training_worlds import PAUSE, Script, back, build_world, order, tiny_spec

from peer.training.loop import InnerLoop
from peer.training.messages import Evaluate, Keep, Load, RoundClosed, TrainerProgress
from protocol.trainer_messages import FragmentSent, Merge, TrainerTime, Try

LASTS_S = {"step": 10.0, "send": 3.0, "merge": 2.0, "loss_of": 5.0}
WAITED_S = 1.0
"""Of Script, each time that it is waited for with nothing there."""


def spent_by(script, world):
    """The sums of what the trainer tells, by a clock that only what is done moves."""

    def lasting(thing, name):
        done = getattr(thing, name)

        def slowly(*arguments):
            script.now_s += LASTS_S[name]
            return done(*arguments)

        setattr(thing, name, slowly)

    for thing, name in (
        (world.stepper, "step"),
        (world.stepper, "loss_of"),
        (world.values, "send"),
        (world.values, "merge"),
    ):
        lasting(thing, name)
    spec, corpus, stepper, values = world.spec, world.corpus, world.stepper, world.values
    InnerLoop(spec, "me", corpus, stepper, values, script, script.clock_s).run()
    told = script.of(TrainerProgress | RoundClosed)
    return {into: sum(each.spent_s[into] for each in told) for into in TrainerTime}


def test_a_whole_model_in_pairs(tmp_path):
    def answer(event):
        if not isinstance(event, RoundClosed) or event.round:
            return []
        kept = Keep(str(tmp_path / "kept"))
        return [PAUSE, Try(0, 0, 2), back(0), Evaluate(0), kept, order(1)]

    script = Script(deque([Load(), order(0)]), answer)
    spent = spent_by(script, build_world(tiny_spec()))
    assert spent[TrainerTime.TRAIN] == 8 * LASTS_S["step"]
    assert spent[TrainerTime.ENCODE] == 2 * LASTS_S["send"]
    assert spent[TrainerTime.MERGE] == LASTS_S["merge"]
    # A trial measures twice, and merges between.
    assert spent[TrainerTime.MEASURE] == 3 * LASTS_S["loss_of"] + LASTS_S["merge"]
    assert spent[TrainerTime.STALLED] == WAITED_S
    assert spent[TrainerTime.DATA] == 0
    told_until_s = script.now_s - WAITED_S  # it waits once more, for the end
    assert sum(spent.values()) == told_until_s


def test_fragments_among_all():
    def answer(event):
        return [back_of(event)] if isinstance(event, FragmentSent) else []

    def back_of(sent):
        return Merge(sent.fragment, sent.cycle, (0,), ())

    spec = tiny_spec(method="diloco", diloco={"overlap_steps": 1})
    script = Script(deque([Load(), order(0), order(1)]), answer)
    spent = spent_by(script, build_world(spec))
    sent = len(script.of(FragmentSent))
    assert spent[TrainerTime.TRAIN] == 8 * LASTS_S["step"]
    assert spent[TrainerTime.ENCODE] == sent * LASTS_S["send"]
    assert 0 < spent[TrainerTime.MERGE] <= sent * LASTS_S["merge"]
