"""Stages of a pipeline compute what the whole model computes."""

from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from peer.codec import get_codec
from peer.training.model import FlatModel, model_config
from peer.training.optimizer import inner_optimizer
from peer.training.shared import code_memory
from peer.training.stages.channel import BoundaryCoder, StageChannel
from peer.training.stages.compute import StageCompute
from peer.training.stages.module import StageModule, initial_stage
from peer.training.stages.steppers import DataPeerStepper, RelayStepper, stage_clip_norm
from peer.training.step import Stepper
from protocol.microbatch.trainer_messages import (
    Begun,
    Drop,
    Filled,
    Finish,
    Freed,
    GradientAdded,
    Resend,
    StageCommand,
    Stepped,
)
from protocol.run.families import WITH_STAGES
from protocol.run.layout import Layout, stage_layouts
from protocol.run.run_spec import RunSpec
from protocol.wire.stage_messages import Direction

CPU = torch.device("cpu")
STAGES = 3
VOCABULARY = 64
SLOTS = 4


def run_spec(**training):
    return RunSpec.model_validate(
        {
            "model": {
                "family": training.pop("family", "llama"),
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_layers": 4,
                "num_heads": 4,
                "num_kv_heads": 2,
                "context_length": 16,
                "tie_embeddings": training.pop("tied", False),
            },
            "optimizer": {"name": training.pop("optimizer", "adamw")},
            "training": {"batch_size": 6, "micro_batch": 2, **training},
            "pipeline": {"stages": STAGES, "visited": STAGES, "codec": "fp32"},
        }
    )


class Stage:
    """A stage without a process: its model, and the slots that boundaries go through."""

    def __init__(self, spec, stage, codec="fp32", clip_norm=None):
        self.module = initial_stage(model_config(spec, VOCABULARY), spec.seed, stage, STAGES)
        self.model = FlatModel(self.module, CPU)
        norm = spec.optimizer.clip_norm if clip_norm is None else clip_norm
        section = spec.optimizer.model_copy(update={"clip_norm": norm})
        self.optimizer = inner_optimizer(self.model, section, "fp32")
        self.coder = BoundaryCoder(get_codec(codec), (2, 16, 32), CPU)
        self.ring = self.coder.ring(code_memory(), SLOTS)
        self.compute = StageCompute(self.module, CPU, "fp32")


class Path:
    """Plays all relays of one path for a data peer's trainer, in its own thread and order.

    Its `next_command` is asked when the trainer has nothing to do: what the trainer has produced is
    then taken through the relays, and comes back.
    """

    def __init__(self, home, relays, lost=()):
        self.home = home
        self.relays = relays
        self.lost = lost
        self.events = []
        self._produced: deque[Filled] = deque()
        self._commands: deque[StageCommand] = deque()
        self._free = deque(home.ring.inbound)

    def emit(self, event):
        self.events.append(event)
        if isinstance(event, Filled):
            self._produced.append(event)
        elif isinstance(event, Freed):
            self._free.append(event.slot)

    def next_command(self, *, wait):
        while self._produced and not self._commands:
            self._walk(self._produced.popleft())
        return self._commands.popleft() if self._commands else None

    def _walk(self, produced):
        self._commands.append(Freed(produced.slot))
        if produced.number in self.lost and produced.direction == Direction.FORWARD:
            self._commands.append(Drop(produced.number))
            return
        boundary = self.home.coder.read(self.home.ring.slot(produced.slot))
        for relay in (
            self.relays if produced.direction != Direction.BACKWARD else reversed(self.relays)
        ):
            match produced.direction:
                case "forward":
                    boundary = relay.compute.forward(produced.number, boundary)
                case "backward":
                    boundary = relay.compute.backward(produced.number, boundary)
                    relay.compute.add_weights()
                case "score":
                    boundary = relay.compute.score_through(boundary)
        slot = self._free.popleft()
        self.home.coder.write(boundary, self.home.ring.slot(slot))
        self._commands.append(Filled(produced.direction, produced.number, slot, produced.loss))


def data_peer(stage, path, in_flight=3):
    channel = StageChannel(path, stage.ring, stage.coder)
    return DataPeerStepper(
        stage.compute, channel, stage.model, stage.optimizer, sequences=2, in_flight=in_flight
    )


def whole_model(stages, spec):
    """The model that these stages are."""
    module = AutoModelForCausalLM.from_config(model_config(spec, VOCABULARY)).float()
    named = {n: p.detach() for stage in stages for n, p in stage.module.named_parameters()}
    module.load_state_dict(named, strict=False)
    return FlatModel(module, CPU)


def blocks(count=6, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, (count, 17))


def gradients(stages):
    return {
        name: parameter.grad.clone()
        for stage in stages
        for name, parameter in stage.module.named_parameters()
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", WITH_STAGES)
def test_stages_put_together_are_the_whole_model(tied, family):
    spec = run_spec(tied=tied, family=family)
    config = model_config(spec, VOCABULARY)
    whole = Layout.from_shapes(shapes_of(AutoModelForCausalLM.from_config(config)))
    modules = [StageModule(config, stage, STAGES) for stage in range(STAGES)]
    cut = tuple(Layout.from_shapes(shapes_of(module)) for module in modules)
    assert stage_layouts(whole, STAGES) == cut
    assert sum(part.parameters for part in cut) == whole.parameters


def shapes_of(module):
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def test_a_first_holder_makes_the_same_weights_every_time():
    spec = run_spec()
    config = model_config(spec, VOCABULARY)
    torch.manual_seed(5)
    first = FlatModel(initial_stage(config, 7, 1, STAGES), CPU).theta_P
    torch.manual_seed(6)
    again = FlatModel(initial_stage(config, 7, 1, STAGES), CPU).theta_P
    other = FlatModel(initial_stage(config, 7, 2, STAGES), CPU).theta_P
    assert torch.equal(first, again)
    assert not torch.equal(first[: other.numel()], other[: first.numel()])


@pytest.mark.parametrize(
    ("tied", "family"), [(True, "llama"), *((False, family) for family in WITH_STAGES)]
)
def test_loss_and_gradients_are_those_of_the_whole_model(tied, family):
    spec = run_spec(tied=tied, family=family)
    stages = [Stage(spec, number) for number in range(STAGES)]
    whole = whole_model(stages, spec)
    path = Path(stages[0], stages[1:])
    stepper = data_peer(stages[0], path)
    kept = []

    class Keeping:
        def step(self, learning_rate):
            kept.append(gradients(stages))
            return torch.zeros(())

    stepper.optimizer = Keeping()
    result = stepper.step(blocks(), 1e-3)
    loss = whole.loss(torch.from_numpy(blocks()))
    loss.backward()
    assert float(result.loss) == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, parameter in whole._module.named_parameters():
        of_stage = kept[0][name]
        if name not in dict(stages[0].module.named_parameters()):
            of_stage = of_stage / 3  # a relay divides when it steps, by its three microbatches
        torch.testing.assert_close(of_stage, parameter.grad, rtol=1e-5, atol=2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_ten_steps_of_an_optimizer_follow_the_whole_model(name):
    """Without clipping, whose norms are of a stage each, the losses stay within 1e-4."""
    spec = run_spec(optimizer=name)
    stages = [Stage(spec, number, clip_norm=1e6) for number in range(STAGES)]
    whole = whole_model(stages, spec)
    section = spec.optimizer.model_copy(update={"clip_norm": 1e6})
    straight = Stepper(whole, inner_optimizer(whole, section, "fp32"), "fp32", 2)
    stepper = data_peer(stages[0], Path(stages[0], stages[1:]))
    for step in range(10):
        theirs = straight.step(blocks(seed=step), 1e-3)
        ours = stepper.step(blocks(seed=step), 1e-3)
        for relay in stages[1:]:
            relay.model.gradient_P.div_(3)
            relay.optimizer.step(1e-3)
        assert float(ours.loss) == pytest.approx(float(theirs.loss), abs=1e-4)


@pytest.mark.parametrize(("codec", "tolerance"), [("bf16", 0.02), ("int8", 0.05)])
def test_coarse_boundaries_change_the_gradient_a_little(codec, tolerance):
    """Relative distance of the first layers' gradient, with the tolerance stated beforehand."""
    found = []
    for name in ("fp32", codec):
        stages = [Stage(run_spec(), number, codec=name) for number in range(STAGES)]
        stepper = data_peer(stages[0], Path(stages[0], stages[1:]))

        class Keeping:
            def __init__(self, model):
                self.model = model

            def step(self, learning_rate):
                found.append(self.model.gradient_P.clone())
                return torch.zeros(())

        stepper.optimizer = Keeping(stages[0].model)
        stepper.step(blocks(), 1e-3)
    exact, coarse = found
    assert 0 < float((coarse - exact).norm() / exact.norm()) < tolerance


def test_a_microbatch_that_is_lost_is_left_out_of_the_mean():
    spec = run_spec()
    stages = [Stage(spec, number) for number in range(STAGES)]
    path = Path(stages[0], stages[1:], lost={1})
    stepper = data_peer(stages[0], path)
    stepper.step(blocks(), 1e-3)
    assert [e.number for e in path.events if isinstance(e, GradientAdded)] == [0, 2]
    assert Begun(3) in path.events
    assert Stepped(2) in path.events
    assert not stages[0].compute._held


class CheckedPath(Path):
    """Has two copies of each microbatch produced when it has come to the loss, and scores them."""

    def __init__(self, home, relays):
        super().__init__(home, relays)
        self.outputs = {}

    def next_command(self, *, wait):
        """A gradient takes its time: the copies are produced before it is back."""
        late = [
            e for e in self._produced if e.direction == Direction.BACKWARD and self._lacks(e.number)
        ]
        for each in late:
            self._produced.remove(each)
        command = super().next_command(wait=wait)
        self._produced.extend(late)
        return command

    def _lacks(self, number):
        return len(self.outputs[number]) < 3

    def _walk(self, produced):
        if produced.direction == Direction.FORWARD and produced.number in self.outputs:
            boundary = self.home.coder.read(self.home.ring.slot(produced.slot))
            for relay in self.relays:
                boundary = relay.compute.score_through(boundary)
            self.outputs[produced.number].append(boundary)
            self._commands.append(Freed(produced.slot))
            return
        super()._walk(produced)
        if produced.direction == Direction.FORWARD:
            (slot,) = [each.slot for each in self._commands if isinstance(each, Filled)]
            self.outputs[produced.number] = [self.home.coder.read(self.home.ring.slot(slot))]
            self._commands += [Resend(produced.number)] * 2


def test_copies_for_a_check_are_what_set_out_and_change_no_gradient():
    plain, checked = ([Stage(run_spec(), stage) for stage in range(STAGES)] for _ in range(2))
    data_peer(plain[0], Path(plain[0], plain[1:])).step(blocks(), 1e-3)
    path = CheckedPath(checked[0], checked[1:])
    data_peer(checked[0], path).step(blocks(), 1e-3)
    assert [len(outputs) for outputs in path.outputs.values()] == [3, 3, 3]
    for original, *copies in path.outputs.values():
        assert all(torch.allclose(original, copy) for copy in copies)
    theirs = gradients(checked)
    assert all(torch.allclose(each, theirs[name]) for name, each in gradients(plain).items())


def test_a_step_without_any_gradient_moves_nothing():
    spec = run_spec()
    stages = [Stage(spec, number) for number in range(STAGES)]
    before = stages[0].model.theta_P.clone()
    path = Path(stages[0], stages[1:], lost={0, 1, 2})
    data_peer(stages[0], path).step(blocks(), 1e-3)
    assert Stepped(0) in path.events
    assert torch.equal(stages[0].model.theta_P, before)


def test_the_loss_of_blocks_is_that_of_the_whole_model():
    spec = run_spec()
    stages = [Stage(spec, number) for number in range(STAGES)]
    whole = whole_model(stages, spec)
    path = Path(stages[0], stages[1:])
    loss = data_peer(stages[0], path).loss_of(blocks())
    assert loss == pytest.approx(float(whole.loss(torch.from_numpy(blocks())).detach()), rel=1e-5)
    assert {e.direction for e in path.events if isinstance(e, Filled)} == {Direction.SCORE}


class Script:
    """Gives a relay's trainer these commands, one after another."""

    def __init__(self, commands):
        self.commands = deque(commands)
        self.events = []

    def emit(self, event):
        self.events.append(event)

    def next_command(self, *, wait):
        while self.commands:
            command = self.commands.popleft()
            if command is not None or not wait:
                return command
        return None


def relay(stage, commands):
    script: Any = Script(commands)
    channel = StageChannel(script, stage.ring, stage.coder)
    stepper = RelayStepper(stage.compute, channel, stage.model, stage.optimizer)
    return stepper, script


def fill(stage, slot, seed):
    generator = torch.Generator().manual_seed(seed)
    stage.coder.write(torch.randn(2, 16, 32, generator=generator), stage.ring.slot(slot))


def test_a_relay_sends_gradients_before_it_begins_new_forwards():
    stage = Stage(run_spec(), 1)
    for slot in range(3):
        fill(stage, slot, slot)
    commands = [Filled(Direction.FORWARD, 0, 0, None)]
    stepper, script = relay(stage, commands)
    stage.compute.forward(9, torch.zeros(2, 16, 32))
    script.commands = deque(
        [
            Filled(Direction.FORWARD, 0, 0, None),
            Filled(Direction.BACKWARD, 9, 1, 2.5),
            Freed(4),
            Finish(),
        ]
    )
    result = stepper.step(blocks(), 1e-3)
    directions = [(e.direction, e.number) for e in script.events if isinstance(e, Filled)]
    assert directions == [(Direction.BACKWARD, 9), (Direction.FORWARD, 0)]
    assert Stepped(1) in script.events
    assert float(result.loss) == 2.5


def test_a_score_that_comes_with_the_end_of_a_step_does_not_wait_for_the_next():
    stage = Stage(run_spec(), 1)
    fill(stage, 0, 0)
    stepper, script = relay(stage, [Finish(), Filled(Direction.SCORE, 5, 0, None)])
    stepper.step(blocks(), 1e-3)
    assert [(e.direction, e.number) for e in script.events if isinstance(e, Filled)] == [
        (Direction.SCORE, 5)
    ]


def test_a_gradient_that_nobody_waits_for_is_not_looked_at():
    stage = Stage(run_spec(), 1)
    stepper, script = relay(stage, [Filled(Direction.BACKWARD, 5, 2, 1.0), Finish()])
    before = stage.model.theta_P.clone()
    stepper.step(blocks(), 1e-3)
    assert [e for e in script.events if isinstance(e, Freed)] == [Freed(2)]
    assert Stepped(0) in script.events
    assert torch.equal(stage.model.theta_P, before)


def test_stages_clip_so_that_equal_ones_clip_as_the_whole():
    assert stage_clip_norm(1.0, 4) == 0.5


def test_an_unsound_boundary_is_refused():
    stage = Stage(run_spec(), 1)
    slot = stage.ring.slot(0)
    slot[:4] = np.float32(np.nan).tobytes()
    with pytest.raises(ValueError, match="not finite"):
        stage.coder.read(slot)


def test_slots_beyond_the_ring_do_not_exist():
    ring = Stage(run_spec(), 1).ring
    assert (list(ring.inbound), list(ring.outbound)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    with pytest.raises(IndexError, match="no slot 8"):
        ring.slot(8)


def test_messages_of_stages_are_plain_data():
    assert msgspec.to_builtins(Filled(Direction.FORWARD, 1, 2, None))["leg"] == "forward"
