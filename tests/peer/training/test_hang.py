"""A trainer that stays silent while it has something to do is dead."""

import pytest
import trio

from peer.training.messages import Load, Ready, TrainRound
from peer.training.ports import TrainerDied
from peer.training.process import SILENCE_FLOOR_S, START_TIMEOUT_S, ProcessTrainer, Watchdog
from peer.training.shared import CodeRegions
from protocol.run.run_spec import RunSpec

READY = Ready(1, 128, "", "cpu", "fp32", 1, 10.0)


class SilentChild:
    """Says what it is given, then nothing."""

    def __init__(self, *events):
        self.events = list(events)
        self.killed = False

    async def send(self, message):
        await trio.lowlevel.checkpoint()

    async def receive(self):
        if not self.events:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return self.events.pop(0)

    def kill(self):
        self.killed = True


def _trainer(child):
    regions = CodeRegions.create((128, 128))
    return ProcessTrainer(child, lambda _: (regions, None), Watchdog(RunSpec()))


async def test_a_start_that_never_ends_is_a_hang(autojump_clock):
    child = SilentChild()
    with pytest.raises(TrainerDied, match="hung"):
        await _trainer(child).receive()
    assert trio.current_time() >= START_TIMEOUT_S
    assert child.killed


async def test_silence_counts_from_the_order_even_if_we_waited_before(autojump_clock):
    child = SilentChild(READY)
    trainer = _trainer(child)
    await trainer.receive()
    async with trio.open_nursery() as nursery:

        async def order_later():
            await trio.sleep(10_000)  # nothing to do: no hang
            assert not child.killed
            await trainer.send(Load(0))
            await trainer.send(TrainRound(0, 5, (("a", 1),), 0, 0, 0.0, 1.0))

        nursery.start_soon(order_later)
        with pytest.raises(TrainerDied, match="hung"):
            await trainer.receive()
    assert child.killed
    assert 10_000 + SILENCE_FLOOR_S <= trio.current_time() < 10_000 + 3 * SILENCE_FLOOR_S
