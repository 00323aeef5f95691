"""A trainer that stays silent is dead, unless its steps take long."""

import pytest
import trio
from msgspec.structs import replace

from peer.training.child_process import SpareChild
from peer.training.fragments import regions_of
from peer.training.messages import (
    Ready,
    RoundClosed,
    TrainerProgress,
    TrainerSettings,
    Waiting,
)
from peer.training.ports import TrainerDied
from peer.training.process import (
    SILENCE_FLOOR_S,
    START_TIMEOUT_S,
    ProcessTrainer,
    trainer_starter,
)
from peer.training.shared import CodeRegions, SharedVector, code_memory
from protocol.run.run_spec import RunSpec, TrainingSection

READY = Ready("cpu", "fp32", 1, 10.0, (("a", (128,)),))
CLOSED = RoundClosed(0, 1, 1, 0.0, 0, 0, 0.0, 0.0)


class SilentChild:
    """Says what it is given, then nothing."""

    def __init__(self, *events):
        self.events = list(events)
        self.pause_s = 0.0
        self.killed = False

    async def send(self, message):
        await trio.lowlevel.checkpoint()

    async def receive(self):
        if not self.events:
            await trio.sleep_forever()
        await trio.sleep(self.pause_s)
        return self.events.pop(0)

    def kill(self):
        self.killed = True


def _trainer(child, pause_s=0.0, spec=None):
    child.pause_s = pause_s
    spec, memory = spec or RunSpec(), code_memory()
    CodeRegions(memory, regions_of(spec, READY.layout), writable=True)
    return ProcessTrainer(child, spec, [memory])


async def test_a_start_that_never_ends_is_a_hang(autojump_clock):
    child = SilentChild()
    with pytest.raises(TrainerDied, match="hung"):
        await _trainer(child).receive()
    assert trio.current_time() >= START_TIMEOUT_S
    assert child.killed


async def test_one_that_says_that_it_waits_lives(autojump_clock):
    child = SilentChild(READY, *[Waiting()] * 1000, CLOSED)
    trainer = _trainer(child, pause_s=SILENCE_FLOOR_S - 1)
    assert await trainer.receive() == READY
    assert await trainer.receive() == CLOSED
    assert trio.current_time() > 1000 * (SILENCE_FLOOR_S - 1)
    with pytest.raises(TrainerDied, match="hung"):
        await trainer.receive()
    assert child.killed


@pytest.mark.parametrize("step_s", [0.1, 30.0])
async def test_slow_steps_stretch_the_bound(step_s, autojump_clock):
    child = SilentChild(READY, TrainerProgress(0, 1, 0.0, 0.0, 0.0, step_s, 1.0))
    trainer = _trainer(child)
    await trainer.receive()
    await trainer.receive()
    begun_s = trio.current_time()
    with pytest.raises(TrainerDied, match="hung"):
        await trainer.receive()
    silent_s = trio.current_time() - begun_s
    assert SILENCE_FLOOR_S + 50 * step_s < silent_s < 3 * SILENCE_FLOOR_S + 100 * step_s


@pytest.mark.parametrize("compiled", [True, False])
async def test_one_that_compiles_is_waited_for_as_at_the_start(autojump_clock, compiled):
    """It says whether it does: 'auto' may not."""
    ready = replace(READY, compiled=compiled)
    child = SilentChild(ready, *[CLOSED] * compiled)
    spec = RunSpec(training=TrainingSection(compile="auto"))
    trainer = _trainer(child, START_TIMEOUT_S - 1, spec)
    assert await trainer.receive() == ready
    if compiled:
        assert await trainer.receive() == CLOSED
    with pytest.raises(TrainerDied, match="hung"):
        await trainer.receive()
    assert child.killed
    assert (trio.current_time() > 2 * START_TIMEOUT_S) == compiled


class Ended:
    async def wait(self):
        await trio.lowlevel.checkpoint()


class ToldChild(SilentChild):
    """Keeps the settings that it begins with."""

    told: list[TrainerSettings]
    process = Ended()

    async def begin(self, task, settings, descriptors):
        self.told.append(settings)

    async def aclose(self):
        await trio.lowlevel.checkpoint()


class ToldSpare(SpareChild):
    def __init__(self, told):
        self._told = told

    async def take(self):
        child = ToldChild()
        child.told = self._told
        return child


MIXTURE = {"family": "mixtral", "experts": 2, "experts_per_token": 1}


@pytest.mark.parametrize(("model", "shards"), [({}, True), (MIXTURE, False)])
async def test_where_not_even_one_sequence_fitted_less_is_kept_from_then_on(
    autojump_clock, model, shards
):
    """Also where the cap of a later life is above nothing again; then less of the weights, too."""
    told: list[TrainerSettings] = []
    spec = RunSpec.model_validate({"model": model})
    with SharedVector(128) as slow:
        settings = TrainerSettings(spec.to_bytes(), "me", "", 256)
        start = trainer_starter(settings, slow, ToldSpare(told))
        for cap in (None, 1, 0, 4, 0, 4):
            async with start(slow.array, cap):
                pass
    chosen = [
        (each.micro_batch_cap, each.checkpoint_activations, each.shard_weights) for each in told
    ]
    assert chosen == [
        (0, False, False),
        (1, False, False),
        (0, True, False),
        (4, True, False),
        (0, True, shards),
        (4, True, shards),
    ]
