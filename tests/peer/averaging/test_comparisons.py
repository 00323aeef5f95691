"""A comparison that is never answered: nothing waits for it, and it is not begun anew at once."""

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peer.averaging.gossip.comparisons import MAX_SHARE, Comparisons
from peer.observe.facts import Facts
from peer.ports.simulated import SimulatedWork

STEP_S = 0.01
FIRST_S = STEP_S / MAX_SHARE
RESTART_S = 3.0


class Line:
    """A trainer, and the commands that it was sent."""

    def __init__(self, *, has_memory: bool = True) -> None:
        self.commands: list[Any] = []
        self.trainer = SimpleNamespace(lay_partner=self._lay)
        self._has_memory = has_memory

    def _lay(self, _codes: memoryview) -> None:
        if not self._has_memory:
            raise OSError("no memory")

    async def send(self, command: Any) -> None:
        self.commands.append(command)


def comparisons() -> Comparisons:
    facts = Facts("own", 1)
    facts.steps_per_s = 1 / STEP_S
    events: Any = SimpleNamespace(emit=lambda *_, **__: None)
    made = Comparisons(facts, SimulatedWork(), events)
    made.began()
    return made


async def offer(made: Comparisons, line: Any) -> int:
    """Offer a partner's codes; how often the trainer was asked so far."""
    await made.offer(line, 1, "other", memoryview(b""))
    return len(line.commands)


async def test_one_that_kills_the_trainer_is_not_repeated_by_the_next_life(
    autojump_clock: MockClock,
) -> None:
    made, line = comparisons(), Line()
    await trio.sleep(FIRST_S)
    assert await offer(made, line) == 1
    await trio.sleep(RESTART_S)
    made.began()
    assert await offer(made, line) == 1
    await trio.sleep(0.9 * RESTART_S / MAX_SHARE)
    assert await offer(made, line) == 1
    await trio.sleep(0.2 * RESTART_S / MAX_SHARE)
    assert await offer(made, line) == 2


@pytest.mark.parametrize("has_memory", [True, False])
async def test_where_there_is_no_memory_for_it_nothing_else_fails(
    autojump_clock: MockClock, has_memory: bool
) -> None:
    made, line = comparisons(), Line(has_memory=has_memory)
    await trio.sleep(FIRST_S)
    assert await offer(made, line) == has_memory
