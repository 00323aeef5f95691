"""What the exchange of fragments asks of its surroundings."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from peer.ports import Network, PeerId, Work
from protocol.diloco.fragment_events import Changes, GroupSeen, HoldOutcome, SendEnded
from protocol.diloco.healing import HealingStatistics
from protocol.membership.records import Sign
from protocol.outcomes import AuditOutcome, RefusalReason


class FragmentTrainer(Protocol):
    """What is asked of the trainer."""

    @property
    def can_write(self) -> bool:
        """Whether nobody reads the whole outer copy."""

    async def may_write(self) -> None:
        """Wait until `can_write`."""

    async def merge(self, fragment: int, cycle: int, changes: Changes) -> None:
        """The send is over; this has changed."""

    async def hold(self, fragment: int) -> HoldOutcome:
        """Make it read nothing of the fragment until `amend`."""

    async def amend(self, fragment: int, changes: Changes) -> None:
        """This has changed; go on."""


class CycleCompany(Protocol):
    """The other peers of the group, as the exchange of fragments sees them."""

    def seen(self) -> GroupSeen:
        """How the group looks now."""

    def is_linked(self, peer_id: PeerId) -> bool:
        """Whether we have a live link with a peer of the group."""


class SendRecord(Protocol):
    """Where the ends of sends are written down."""

    def returned(self, returned: SendEnded, healing: HealingStatistics) -> None:
        """A send has ended; so much was healed until now."""


class OwnersConduct(Protocol):
    """Where it is told how owners keep their word."""

    def audited(self, outcome: AuditOutcome) -> None:
        """An audit has ended."""

    def convicted(self, owner: PeerId) -> None:
        """An owner was proved to have lied: from now on nobody here has to do with it."""


class KeptProofs(Protocol):
    """Proofs that outlive the process. Blocking."""

    def read(self) -> Sequence[tuple[PeerId, bytes]]:
        """Owners, each with what was a proof when it was kept."""

    def keep(self, owner: PeerId, proof: bytes) -> None:
        """Keep one more, if there is room."""


@dataclass(frozen=True, slots=True)
class FragmentSurroundings:
    """The peers with which fragments are averaged, and the means.

    Attributes:
        group: digest of ours.
        incarnation: which life of ours this is.
        proofs: those that this home keeps.
        lock: held while the outer state moves or is read as a whole.
        refused: counts contributions and results of others that were not taken, streams of those
            that we are not linked with, and whatever is meant for another group, by reason.
        trims: whether averages are trimmed means (trimmed_mean.py).
        last_sent: the last cycle of each fragment that was sent before our first round; -1 before
            the first.
        inner_steps: H, the steps of a peer of median speed between two sends of a fragment.
    """

    group: str
    incarnation: int
    network: Network
    work: Work
    sign: Sign
    company: CycleCompany
    trainer: FragmentTrainer
    record: SendRecord
    conduct: OwnersConduct
    proofs: KeptProofs
    lock: trio.Lock
    refused: Counter[RefusalReason]
    trims: bool
    last_sent: Sequence[int]
    inner_steps: int
