"""A trainer that stays silent is dead, unless its steps take long."""

import pytest
import trio

from peer.training.fragments import regions_of
from peer.training.messages import Ready, RoundClosed, TrainerProgress, Waiting
from peer.training.ports import TrainerDied
from peer.training.process import SILENCE_FLOOR_S, START_TIMEOUT_S, ProcessTrainer
from peer.training.shared import CodeRegions, code_memory
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


async def test_one_that_compiles_is_waited_for_as_at_the_start(autojump_clock):
    child = SilentChild(READY, CLOSED)
    spec = RunSpec(training=TrainingSection(compile=True))
    trainer = _trainer(child, START_TIMEOUT_S - 1, spec)
    assert await trainer.receive() == READY
    assert await trainer.receive() == CLOSED
    with pytest.raises(TrainerDied, match="hung"):
        await trainer.receive()
    assert child.killed
