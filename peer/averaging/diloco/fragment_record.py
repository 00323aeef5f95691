"""What the ends of sends leave behind: counts, events, and whether the last ones were averaged."""

from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from protocol.diloco.fragment_commands import Returned
from protocol.diloco.healing import HealingStatistics
from protocol.outcomes import SkipReason

from .fragment_company import FragmentCompany


class FragmentRecord:
    """Implements `SendRecord` (surroundings.py)."""

    def __init__(
        self, facts: Facts, events: EventLog, company: FragmentCompany, total_rounds: int
    ) -> None:
        self._facts = facts
        self._events = events
        self._company = company
        self._total_rounds = total_rounds
        self._last_averaged: list[bool] = []

    def __repr__(self) -> str:
        return f"<FragmentRecord, of the last sends averaged: {self._last_averaged}>"

    @property
    def ended_alone(self) -> bool:
        """Whether sends after the last inner step have ended, and no other peer was in them."""
        return bool(self._last_averaged) and not any(self._last_averaged)

    def returned(self, returned: Returned, healing: HealingStatistics) -> None:
        """A send has ended; so much was healed until now."""
        facts, averaged = self._facts, returned.contributors > 1
        facts.diverged, facts.healed = healing.diverged, healing.healed
        facts.healed_s = healing.healed_s
        if returned.cycle >= self._total_rounds:
            self._last_averaged.append(averaged)
        if averaged:
            facts.count_averaged()
        else:
            alone = self._company.is_alone
            facts.count_skipped(SkipReason.NO_PARTNER if alone else SkipReason.DEADLINE)
        self._events.emit(
            EventName.FRAGMENT_RETURNED,
            round=returned.cycle,
            fragment=returned.fragment,
            contributors=returned.contributors,
            missing=returned.missing,
            moved=returned.moved,
            digest=returned.digest,
            seconds=returned.seconds,
        )
