"""Comparing our outputs with a partner's: the health of a swarm that averages in pairs.

When a pair has exchanged vectors, both snapshots are here for a moment. Now and then, so seldom
that it takes at most MAX_SHARE of the time (protocol/schedule/seldom.py), the partner's codes are
laid beside our own for the trainer, which runs both on the probe batch and says how far their
outputs are apart (peer/training/divergence.py). It does so before it follows the outer step, for
our snapshot is gone then.

Only vectors that were averaged with are compared: their codes are valid, and they are not
implausibly far away. So a liar can at most make this number larger than it is. A trainer that
computes no number of it says so, and nothing depends on what it says.

Rules:
    1. One comparison at a time is under way, from the laying of the codes to the trainer's answer.
       One that was not answered, for the trainer died, or that the machine had no memory for, has
       cost all the time since its beginning: the next one waits accordingly.
    2. Nothing waits for it but `Apply`, for as long as copying the codes takes.
    3. In the final averaging nothing is compared: there all weights become the same.

Stages of a pipeline average in pairs too, but a stage by itself has no outputs to compare: nothing
is compared there. Nor is it with streaming gossip, where each fragment has a partner of its own and
no partner's model is ever here; nor with fragments that all average, where all hold one model.
"""

from typing import Final

import trio

from peer.observe.event_names import EventName
from peer.observe.events import Events
from peer.observe.facts import Facts
from peer.ports import Work
from peer.rounds.way import TrainerLine
from peer.training.comparison_messages import Compare, Compared
from peer.training.ports import Trainer
from protocol.schedule.seldom import Seldom

MAX_SHARE: Final = 0.005
"""Largest part of a peer's time that goes into comparisons."""


class Comparisons:
    """See the top of the file."""

    def __init__(self, facts: Facts, work: Work, events: Events) -> None:
        self._facts = facts
        self._work = work
        self._events = events
        self._seldom: Seldom | None = None
        self._shown: Trainer | None = None
        self._started_s = self._laid_s = 0.0
        self._partner_id = ""

    def __repr__(self) -> str:
        return f"<Comparisons {'idle' if self._shown is None else 'under way'}, {self._seldom!r}>"

    def began(self) -> None:
        """A life of the trainer begins: what the one before was asked is not answered."""
        if self._seldom is None:
            self._seldom = Seldom(MAX_SHARE, trio.current_time())
        if self._shown is not None:
            self._given_up()

    def _given_up(self) -> None:
        assert self._seldom is not None
        self._shown = None
        now_s = trio.current_time()
        self._seldom.made(now_s, now_s - self._started_s)

    async def offer(
        self, line: TrainerLine, round_: int, partner_id: str, codes: memoryview
    ) -> None:
        """Compare with a partner's theta, if that is due; our snapshot must be pending."""
        if self._shown is not None or not self._is_due:
            return
        self._shown, self._partner_id = line.trainer, partner_id
        self._started_s = trio.current_time()
        try:
            await self._work.run(line.trainer.lay_partner, codes)
        except OSError:
            self._given_up()
            return
        self._laid_s = trio.current_time() - self._started_s
        await line.send(Compare(round_))

    @property
    def _is_due(self) -> bool:
        """At first a comparison is taken to cost as much as a step, which has more to compute."""
        steps_per_s = self._facts.steps_per_s
        if self._seldom is None or not steps_per_s:
            return False
        return self._seldom.is_due(trio.current_time(), 1 / steps_per_s)

    def ended(self, compared: Compared) -> None:
        """The trainer's answer is here."""
        if self._shown is None or self._seldom is None:
            return
        self._shown.clear_partner()
        self._shown = None
        outputs, cost_s = self._facts.outputs, self._laid_s + compared.seconds
        self._seldom.made(trio.current_time(), cost_s)
        outputs.divergence, outputs.partner = compared.divergence, self._partner_id
        outputs.comparisons += 1
        outputs.spent_s += cost_s
        self._events.emit(
            EventName.OUTPUTS_COMPARED,
            round=compared.round,
            partner=self._partner_id,
            divergence=compared.divergence,
            seconds=cost_s,
        )
