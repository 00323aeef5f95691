"""Validation of the slow weights: when it is due, and that nothing moves them meanwhile.

One validation at a time is under way, from the command to the trainer's answer; a slow peer, which
has to keep up, validates less often than the run asks for. In a run with experts it is of one
domain after another (domains.py), and others may have a text scored by the same trainer.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy.typing as npt
import trio

from peer.observe.event_names import EventName
from peer.training.messages import Evaluate, Evaluated

from .domains import HeldOutBlocks, MeasuredDomains, ToldLogProbs, told_by
from .services import Services
from .way import TrainerLine

MAX_VALIDATION_SHARE: Final = 0.1
"""Largest part of a peer's time that goes into validation; and as much into texts of others."""
FIRST_VALIDATIONS: Final = 16
"""The first ones may come as often as asked: a short run has losses to show, too."""
LATER_VALIDATION_SHARE: Final = 0.02
"""Largest part that goes into validation from then on."""


@dataclass(eq=False)
class _Asked:
    """A question to the trainer: a domain, or a text of somebody's; neither is the fixed blocks."""

    domain: HeldOutBlocks | None = None
    is_text: bool = False
    stamp: str = ""
    step: int = 0
    told: ToldLogProbs | None = None
    over: trio.Event = field(default_factory=trio.Event)


class Validation:
    """Asks the trainer for the loss of held-out blocks.

    Attributes:
        answers: how often it has told the loss of our own domain, which the run uses.
    """

    def __init__(
        self, every_rounds: int, services: Services, domains: MeasuredDomains | None = None
    ) -> None:
        self._every_rounds = every_rounds
        self._facts, self._events = services.facts, services.events
        self._domains = domains
        self._asked: deque[_Asked] = deque()
        self._idle = trio.Event()
        self._idle.set()
        self._not_before_s = -math.inf
        self.answers = 0

    @property
    def is_idle(self) -> bool:
        return self._idle.is_set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def is_due(self, round_: int, before: int | None = None) -> bool:
        """Whether to validate after this round; `before` is the one after which this was asked."""
        before = round_ - 1 if before is None else before
        due = round_ // self._every_rounds > before // self._every_rounds
        return due and self.is_idle and trio.current_time() >= self._not_before_s

    async def begin(self, line: TrainerLine, round_: int) -> None:
        """Have the slow weights measured; they must lie still from now on until it is idle."""
        own = None if self._domains is None else self._domains.in_turn[0]
        await self._ask(line, round_, own)

    async def begin_next(self, line: TrainerLine, round_: int) -> None:
        """Measure the domain whose turn it is."""
        domain = None if self._domains is None else self._domains.next()
        await self._ask(line, round_, domain)

    async def begin_all(self, line: TrainerLine, round_: int) -> None:
        """Measure every domain."""
        domains = (None,) if self._domains is None else self._domains.in_turn
        for domain in domains:
            await self._ask(line, round_, domain)

    async def score(
        self, line: TrainerLine, round_: int, tokens: npt.NDArray[Any]
    ) -> ToldLogProbs | None:
        """Score a text with the slow weights, which must lie still.

        None: the trainer has died, or the weights have diverged.
        """
        asked = await self._send(line, round_, _Asked(is_text=True), tokens.reshape(1, -1))
        await asked.over.wait()
        return asked.told

    async def _ask(self, line: TrainerLine, round_: int, domain: HeldOutBlocks | None) -> None:
        tokens_BT = None if domain is None else domain.tokens_BT
        await self._send(line, round_, _Asked(domain), tokens_BT)

    async def _send(
        self, line: TrainerLine, round_: int, asked: _Asked, tokens_BT: npt.NDArray[Any] | None
    ) -> _Asked:
        if self.is_idle:
            self._idle = trio.Event()
        self._asked.append(asked)
        if self._domains is not None:
            asked.stamp, asked.step = self._domains.stamp(), self._facts.step
        if tokens_BT is None:
            await line.send(Evaluate(round_))
        else:
            await line.send(Evaluate(round_, tokens_BT.astype("<u4").tobytes(), len(tokens_BT)))
        return asked

    def ended(self, result: Evaluated) -> None:
        asked = self._asked.popleft()
        if result.log_probs:
            asked.told = told_by(asked.stamp, asked.step, result.log_probs)
        if not asked.is_text:
            is_first = self.answers < FIRST_VALIDATIONS
            share = MAX_VALIDATION_SHARE if is_first else LATER_VALIDATION_SHARE
            self._not_before_s = trio.current_time() + result.seconds / share
            self._note(asked, result)
        asked.over.set()
        if not self._asked:
            self._idle.set()

    def _note(self, asked: _Asked, result: Evaluated) -> None:
        facts, domain, domains = self._facts, asked.domain, self._domains
        is_own = domain is None or domains is None or domain.number == domains.own
        if is_own:
            self.answers += 1
        if result.loss is None:
            return
        if is_own:
            facts.count_validation(result.loss)
            self._events.emit(
                EventName.VALIDATED, round=result.round, loss=result.loss, seconds=result.seconds
            )
        if domain is not None and domains is not None and asked.told is not None:
            domains.told[domain.digest] = asked.told
            facts.losses_of_domains[domain.number] = result.loss
            if not is_own:
                self._events.emit(
                    EventName.DOMAIN_VALIDATED,
                    domain=domain.name,
                    round=result.round,
                    loss=result.loss,
                    seconds=result.seconds,
                )

    def forget(self) -> None:
        """Give up what was asked: its trainer is gone."""
        for asked in self._asked:
            asked.over.set()
        self._asked.clear()
        self._idle.set()
