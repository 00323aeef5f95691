"""What the ends of sends and of audits leave behind: counts, events, and who is banned.

Also whether the last sends were averaged.
"""

from collections.abc import Callable

from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.ports import PeerId
from protocol.diloco.fragment_events import SendEnded
from protocol.diloco.healing import HealingStatistics
from protocol.outcomes import AuditOutcome, SkipReason
from protocol.run.amendments import AmendedSpec

from .fragment_company import FragmentCompany


class FragmentRecord:
    """Implements `SendRecord` and `OwnersConduct` (surroundings.py).

    Args:
        convict: bans a peer.
    """

    def __init__(
        self,
        facts: Facts,
        events: EventLog,
        company: FragmentCompany,
        spec: AmendedSpec,
        convict: Callable[[PeerId], None],
    ) -> None:
        self._facts = facts
        self._events = events
        self._company = company
        self._spec = spec
        self._convict = convict
        self._last_averaged: list[bool] = []

    @property
    def ended_alone(self) -> bool:
        """Whether sends after the last inner step have ended, and no other peer was in them."""
        return bool(self._last_averaged) and not any(self._last_averaged)

    def audited(self, outcome: AuditOutcome) -> None:
        """An audit has ended."""
        self._facts.audits[outcome] += 1

    def convicted(self, owner: PeerId) -> None:
        """An owner was proved to have lied."""
        self._convict(owner)

    def returned(self, returned: SendEnded, healing: HealingStatistics) -> None:
        """A send has ended; so much was healed until now."""
        facts, averaged = self._facts, returned.contributors > 1
        facts.diverged, facts.healed = healing.diverged, healing.healed
        facts.healed_s = healing.healed_s
        if self._spec.is_last_round(returned.cycle):
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
