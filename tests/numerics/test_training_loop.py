"""The inner loop's numbers, against straight-line code."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional
from training_worlds import (
    MEMBERS,
    PAUSE,
    VOCABULARY,
    back,
    build_world,
    next_order,
    order,
    run,
    tiny_corpus,
    tiny_spec,
)

from peer.training.fragments import FragmentDeltas
from peer.training.messages import (
    CloseRound,
    Evaluate,
    Evaluated,
    Keep,
    Kept,
    Load,
    RoundClosed,
    StepChosen,
    TrainerProgress,
    Waiting,
)
from peer.training.model import FlatModel, initial_module
from peer.training.ports import NonFinite, WrongCommand
from peer.training.schedule import learning_rate
from peer.training.step import Stepper
from protocol.run.sections import OptimizerSection
from protocol.schedule.data_plan import DataPlan
from protocol.trainer_messages import FragmentMerged, FragmentSent, Merge, Tried, Try

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("codec", ["int8", "fp32"])
@pytest.mark.parametrize("steps_between", [0, 3])
def test_a_merge_is_the_line_of_the_architecture(codec, steps_between):
    world = build_world(tiny_spec(codec=codec))
    seen = {}

    def answer(event):
        if isinstance(event, RoundClosed) and event.round == 0:
            seen["theta_s"] = world.theta.copy()
            seen["decoded"] = world.decoded()
            world.slow += np.random.default_rng(1).normal(0, 0.1, world.slow.size).astype("f4")
            return [order(1), *[PAUSE] * steps_between, back(0)]
        if isinstance(event, FragmentMerged):
            seen["after"] = world.theta.copy()
        return []

    def before(command):
        if isinstance(command, Merge):
            seen["before"] = world.theta.copy()

    script = run(world, order(0), answer=answer, before=before)
    assert len(script.of(FragmentMerged)) == 1
    move = world.slow - seen["decoded"]
    rounding = seen["decoded"] - seen["theta_s"]
    expected = seen["before"] + move
    np.testing.assert_allclose(seen["after"], expected, rtol=0, atol=1e-6)
    assert (codec == "int8") == bool(np.abs(rounding).max() > 1e-6)
    assert (steps_between > 0) == bool(np.abs(seen["before"] - seen["theta_s"]).max() > 1e-6)


def test_with_an_exact_code_the_slow_weights_replace_the_snapshot():
    world = build_world(tiny_spec(codec="fp32", overlap=False))

    def answer(event):
        if isinstance(event, RoundClosed):
            world.slow[:] = 0.25
            return [back(0)]
        return []

    run(world, order(0), answer=answer)
    np.testing.assert_allclose(world.theta, world.slow, atol=1e-6)


def _plain_training(steps):
    """AdamW on an ordinary module, tensor by tensor."""
    spec = tiny_spec()
    module = initial_module(spec, VOCABULARY)
    parameters = list(module.parameters())
    section = spec.optimizer
    adamw = torch.optim.AdamW(
        [
            {
                "params": [p for p in parameters if p.dim() > 1],
                "weight_decay": section.weight_decay,
            },
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=section.betas,
        foreach=False,
        fused=False,
    )
    corpus, position = tiny_corpus(spec), 0
    plan = DataPlan(spec.seed, corpus.num_blocks)
    losses = []
    for step in range(steps):
        taken = plan.take(0, position, 4, "me", MEMBERS)
        position = taken.position
        tokens = torch.from_numpy(corpus.blocks(taken.blocks))
        logits = module(input_ids=tokens[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, section.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(section, step, 40)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return dict(module.named_parameters()), losses


@pytest.mark.parametrize("micro_batch", [4, 2, 3, 1])
def test_alone_and_exactly_coded_it_is_plain_training(micro_batch):
    world = build_world(tiny_spec(codec="fp32", overlap=False), micro_batch)

    def answer(event):
        if isinstance(event, RoundClosed):
            world.slow[:] = world.theta
            again = [next_order(event)] if event.round < 2 else []
            return [back(event.round), *again]
        return []

    script = run(world, order(0), answer=answer)
    expected, losses = _plain_training(12)
    for entry in world.model.layout.entries:
        part = world.theta[entry.offset : entry.offset + entry.size].reshape(entry.shape)
        np.testing.assert_allclose(part, expected[entry.name].detach(), rtol=1e-3, atol=2e-5)
    mean_losses = [event.loss for event in script.of(RoundClosed)]
    np.testing.assert_allclose(mean_losses, np.reshape(losses, (3, 4)).mean(1), rtol=1e-4)


def _digests(*extra, seed=7):
    spec = tiny_spec().model_copy(update={"seed": seed})
    world = build_world(spec)

    def answer(event):
        if isinstance(event, RoundClosed) and event.round < 2:
            return [next_order(event), PAUSE, PAUSE, *extra, back(event.round)]
        return []

    return [event.digest for event in run(world, order(0), answer=answer).of(FragmentSent)]


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    first = _digests()
    assert len(first) == 3
    assert first == _digests()
    assert set(first).isdisjoint(_digests(seed=8))


def test_evaluation_leaves_no_trace_and_measures_the_slow_weights():
    assert _digests(PAUSE) == _digests(Evaluate(0), PAUSE)
    world = build_world(tiny_spec())
    expected = world.stepper.loss_of(world.corpus.validation_blocks(4))
    script = run(world, order(0), *[PAUSE] * 3, Evaluate(0))
    (evaluated,) = script.of(Evaluated)
    assert evaluated.loss == pytest.approx(expected, rel=1e-6)


def test_a_compiler_that_fails_at_a_measurement_is_done_without_and_that_is_told(monkeypatch):
    """Without gradients a model is compiled anew, and so it is for each length of a text."""
    monkeypatch.setattr(torch, "compile", _compiled_for_training)
    world = build_world(tiny_spec())
    model = world.stepper._model
    expected = world.stepper.loss_of(world.corpus.validation_blocks(4))
    whole = FlatModel(model._module, model.device, compile=True)
    model._forward, model._may_forgo = whole._forward, True  # as 'auto' on a GPU
    script = run(world, order(0), *[PAUSE] * 3, Evaluate(0))
    (evaluated,), (told,) = script.of(Evaluated), script.of(StepChosen)
    assert evaluated.loss == pytest.approx(expected, rel=1e-6)
    assert told.notes == ("the model is not compiled: it failed: no such kernel",)
    (closed,) = script.of(RoundClosed)
    assert closed.steps == 4
    assert not model.is_compiled


@pytest.mark.parametrize(("auto", "error"), [(False, ValueError), (True, MemoryError)])
def test_one_that_is_signed_or_lacks_memory_is_not_done_without(monkeypatch, auto, error):
    monkeypatch.setattr(torch, "compile", partial(_compiled_for_training, error=error))
    model = FlatModel(initial_module(tiny_spec(), VOCABULARY), torch.device("cpu"), compile=True)
    model._may_forgo = auto
    with pytest.raises(error), torch.no_grad():
        model.loss(torch.zeros((1, 9), dtype=torch.int64))
    assert model.is_compiled


def _compiled_for_training(module, error=ValueError):
    def forward(**given):
        if not torch.is_grad_enabled():
            raise error("no such kernel")
        return module(**given)

    return forward


def test_log_probabilities_of_a_text_are_those_that_the_loss_is_made_of():
    assert _digests(PAUSE) == _digests(Evaluate(0), PAUSE)
    world = build_world(tiny_spec())
    blocks_BT = world.corpus.validation_blocks(4)
    expected = world.stepper.loss_of(blocks_BT)
    question = Evaluate(0, blocks_BT.astype("<u4").tobytes(), len(blocks_BT))
    before = world.theta.copy()
    (evaluated,) = run(world, question).of(Evaluated)
    assert (world.theta == before).all()
    told = np.frombuffer(evaluated.log_probs, "<f4")
    assert told.size == blocks_BT.size - len(blocks_BT)
    assert -told.mean(dtype=float) == evaluated.loss == pytest.approx(expected, rel=1e-6)
    (alone,) = run(world, Evaluate(0, blocks_BT[1, :7].astype("<u4").tobytes(), 1)).of(Evaluated)
    rows = told.reshape(len(blocks_BT), -1)
    assert np.frombuffer(alone.log_probs, "<f4") == pytest.approx(rows[1, :6], abs=1e-5)


def test_padding_stays_zero():
    world = build_world(tiny_spec())
    run(world, order(0))
    used = np.zeros(world.theta.size, bool)
    for entry in world.model.layout.entries:
        used[entry.offset : entry.offset + entry.size] = True
    assert not used.all()
    assert not world.theta[~used].any()


def test_a_round_waits_for_apply_and_trains_on_meanwhile():
    world = build_world(tiny_spec())

    def answer(event):
        if isinstance(event, RoundClosed) and event.round == 0:
            return [next_order(event), *[PAUSE] * 9, back(0)]
        return []

    script = run(world, order(0), answer=answer)
    assert [event.steps for event in script.of(RoundClosed)] == [4, 9]
    sent = [(event.fragment, event.cycle, event.steps) for event in script.of(FragmentSent)]
    assert sent == [(0, 0, 4), (0, 1, 9)]


def test_close_round_ends_it_after_at_least_one_step():
    world = build_world(tiny_spec())
    script = run(world, order(0, quota=100), CloseRound(0))
    assert [event.steps for event in script.of(RoundClosed)] == [1]
    script = run(
        build_world(tiny_spec()), order(0, quota=6), *[PAUSE] * 3, CloseRound(0), CloseRound(0)
    )
    assert [event.steps for event in script.of(RoundClosed)] == [3]


def test_half_the_quota_is_reported():
    script = run(build_world(tiny_spec()), order(0, quota=6))
    halves = [event for event in script.of(TrainerProgress) if event.steps == 3]
    assert [(event.round, event.steps) for event in halves] == [(0, 3)]
    assert halves[0].learning_rate == learning_rate(tiny_spec().optimizer, 4 * 2 / 6, 40)


def test_load_begins_anew():
    world = build_world(tiny_spec())
    script = run(world, order(5, quota=50), PAUSE, PAUSE, Load(), order(0))
    assert [(event.round, event.steps) for event in script.of(RoundClosed)] == [(0, 4)]
    fresh = build_world(tiny_spec())
    assert script.of(FragmentSent)[0].digest == run(fresh, order(0)).of(FragmentSent)[0].digest


def test_who_begins_late_or_again_warms_up(monkeypatch):
    spec = tiny_spec()
    spec = spec.model_copy(update={"optimizer": OptimizerSection(warmup_steps=4)})
    world, rates, step = build_world(spec), [], Stepper.step
    stepper = world.stepper
    assert isinstance(stepper, Stepper)

    def noted(blocks_BT, rate):
        rates.append(rate)
        return step(stepper, blocks_BT, rate)

    monkeypatch.setattr(world.stepper, "step", noted)
    run(world, order(3, quota=4), order(4, quota=4), *[PAUSE] * 6, Load(), order(5, quota=4))
    begun = [(12, done) for done in range(6)] + [(20, done) for done in range(4)]
    assert rates == [learning_rate(spec.optimizer, first + own, 40, own) for first, own in begun]
    assert rates[0] == learning_rate(spec.optimizer, 12, 40) / 4


class NotedResult:
    """The numbers of a step; notes when they are looked at."""

    def __init__(self, step, log):
        self.step, self.log = step, log

    def settled(self):
        self.log.append(f"look {self.step}")
        return 1.0, 0.5


def test_numbers_are_looked_at_when_the_next_step_has_begun_but_before_anything_is_told(
    monkeypatch,
):
    world = build_world(tiny_spec())
    log: list[str] = []

    def noted(blocks_BT, rate):
        step = sum(entry.startswith("step") for entry in log) + 1
        log.append(f"step {step}")
        return NotedResult(step, log)

    def answer(event):
        log.append(type(event).__name__)
        return []

    monkeypatch.setattr(world.stepper, "step", noted)
    run(world, order(0, quota=6), answer=answer)
    assert log == [
        *["step 1", "step 2", "look 1", "step 3", "look 2", "look 3", "TrainerProgress"],
        *["step 4", "step 5", "look 4", "step 6", "look 5", "look 6"],
        *["FragmentSent", "RoundClosed"],
    ]


@pytest.mark.parametrize(
    ("command", "told"),
    [(back(0), "FragmentMerged"), (Evaluate(1), "Evaluated"), (Try(0, 0, 2), "Tried")],
    ids=["merge", "loss", "trial"],
)
def test_the_rest_of_a_step_under_way_is_no_part_of_the_pause(monkeypatch, command, told):
    """A GPU still computes it; merging or measuring would wait for that."""
    world = build_world(tiny_spec())
    log: list[str] = []

    def noted(blocks_BT, rate):
        log.append("step")
        return NotedResult(log.count("step"), log)

    def answer(event):
        log.append(type(event).__name__)
        first = isinstance(event, RoundClosed) and event.round == 0
        return [order(1), PAUSE, command] if first else []

    monkeypatch.setattr(world.stepper, "step", noted)
    run(world, order(0, quota=2), answer=answer)
    after = log[log.index("RoundClosed") + 1 :]
    assert after[:3] == ["step", "look 3", told]


@pytest.mark.parametrize("where", [0, 700])
def test_a_nan_never_gets_into_a_snapshot(where):
    world = build_world(tiny_spec())
    world.slow[where] = np.nan
    script = None
    with pytest.raises(NonFinite, match="nan"):
        script = run(world, order(0))
    assert script is None


def test_infinite_weights_are_refused_by_the_snapshot():
    world = build_world(tiny_spec())
    world.model.theta_P[3] = torch.inf
    values = world.values
    assert isinstance(values, FragmentDeltas)
    with pytest.raises(NonFinite, match="send 3 of fragment 0"):
        values.send(0, 3)


@pytest.mark.parametrize(
    "commands",
    [
        [back(0)],
        [order(0, quota=-1)],
        [CloseRound(3)],
        [order(1), order(2), order(3)],
        [order(1), order(1)],
    ],
)
def test_commands_that_make_no_sense_are_refused(commands):
    with pytest.raises(WrongCommand):
        run(build_world(tiny_spec()), *commands)


@pytest.mark.parametrize("wrong", [back(1), order(0)])
def test_after_a_close_only_what_fits_is_obeyed(wrong):
    def answer(event):
        return [wrong] if isinstance(event, RoundClosed) else []

    with pytest.raises(WrongCommand):
        run(build_world(tiny_spec()), order(0), answer=answer)


def test_a_round_of_no_steps_is_closed_at_once_with_the_weights_as_they_are():
    world = build_world(tiny_spec(codec="fp32"))
    before = world.slow.copy()
    script = run(world, order(0, quota=0), answer=lambda _: [])
    (closed,) = script.of(RoundClosed)
    assert (closed.steps, closed.tokens) == (0, 0)
    np.testing.assert_array_equal(world.decoded(), before)


def test_a_trainer_that_writes_or_reads_a_large_file_says_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr("peer.training.tensor_file.TILE", 1 << 10)
    path = tmp_path / "kept"

    def answer(event):
        return [Keep(str(path))] if isinstance(event, RoundClosed) else []

    script = run(build_world(tiny_spec()), order(0), answer=answer)
    (kept,), waiting = script.of(Kept), script.of(Waiting)
    tiles = path.stat().st_size // (4 << 10)
    assert kept.error is None
    assert len(waiting) >= tiles > 1
    assert script.events.index(waiting[0]) < script.events.index(kept)
    again = run(build_world(tiny_spec()), Load(str(path)))
    assert len(again.of(Waiting)) >= tiles


@pytest.mark.parametrize("fragments", ["whole", "strided"])
def test_a_trial_says_what_a_merge_does_and_leaves_the_weights_as_they_were(fragments):
    world = build_world(tiny_spec(noloco={"fragments": fragments}))
    blocks = world.corpus.validation_blocks(4)
    noise = np.random.default_rng(1).standard_normal(world.slow.size).astype(np.float32)
    thetas: list[np.ndarray] = []
    losses: list[float] = []

    def before(command):
        if isinstance(command, Try | Merge):
            if not thetas:
                world.slow += 0.05 * noise
            thetas.append(world.theta.copy())
            losses.append(world.stepper.loss_of(blocks))

    def answer(event):
        if isinstance(event, FragmentSent) and event.fragment == 0:
            return [Try(0, event.cycle, 64), Merge(0, event.cycle, (0,), ())]
        if isinstance(event, FragmentMerged) and event.fragment == 0:
            losses.append(world.stepper.loss_of(blocks))
        return []

    script = run(world, order(0), answer=answer, before=before)
    (told,) = script.of(Tried)
    assert np.array_equal(thetas[0], thetas[1])
    assert np.abs(world.theta - thetas[1]).max() > 0.01
    assert told.gain == pytest.approx(losses[1] - losses[2], abs=1e-5)
    assert abs(told.gain) > 1e-4
    assert not world.model.gradient_P.any()


@pytest.mark.parametrize("together", [False, True])
def test_a_trial_without_memory_says_nothing_and_costs_no_weights(monkeypatch, together):
    """Of ranks that measure together it is the end: the others would wait in the middle."""
    monkeypatch.setattr(Stepper, "measures_together", together)
    world = build_world(tiny_spec())
    thetas: list[np.ndarray] = []

    def before(command):
        if isinstance(command, Try):
            thetas.append(world.theta.copy())
            monkeypatch.setattr(world.stepper, "loss_of", out_of_memory)

    def out_of_memory(blocks_BT):
        if np.array_equal(world.theta, thetas[0]):
            return 1.0
        raise torch.OutOfMemoryError("out of memory")

    def answer(event):
        if isinstance(event, FragmentSent):
            world.slow += 0.05
            return [Try(0, event.cycle, 4)]
        return []

    if together:
        with pytest.raises(torch.OutOfMemoryError):
            run(world, order(0), answer=answer, before=before)
    else:
        script = run(world, order(0), answer=answer, before=before)
        assert [told.gain for told in script.of(Tried)] == [None]
    assert np.array_equal(thetas[0], world.theta)
    assert not world.model.gradient_P.any()
