"""The peers that hold the same outer copy: who is there, and how far each is.

Rules
  1. Peers contribute to a cycle that is within LATE_ROUNDS of their round and of ours. A peer that
     says it has finished a cycle is not expected to it.
  2. Owners are chosen among those that are expected, except owners that brought nothing until our
     patience ended, or until they were stuck. One of these is chosen again when anything but a
     question comes from it. Peers that depend on relays are chosen only where there are no others.
  3. Whatever is remembered of a peer goes with it, except that it has lied.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from protocol.limits import MAX_CONVICTED, MAX_REMEMBERED, forget_oldest
from protocol.outcomes import AuditOutcome, RefusalReason
from protocol.wire.fragment_messages import Doubt, FragmentSettled, NoResult, Proof, Result

from .commands import NO_CODES, FragmentCommand, GroupSeen, SendMessage


@dataclass(frozen=True, slots=True)
class SendPlan:
    """The sends of one group, which all peers know before a run begins.

    Attributes:
        group: its digest.
        is_last: whether a cycle is that of the sends after the run's last inner step.
    """

    group: str
    num_fragments: int
    is_last: Callable[[int], bool]

    def owners_key(self, fragment: int, cycle: int) -> str:
        return f"{self.group}/{fragment}/{cycle}"

    def sends_at_once(self, cycle: int) -> int:
        """Fragments that are on their way together: all of them after the run's last step."""
        return self.num_fragments if self.is_last(cycle) else 1


BEGUN_FROM: Final = 2
"""In this round every chunk has had its first step, wherever all went well."""
LATE_ROUNDS: Final = 3
"""A peer that is further from a cycle than this, by what was last heard, is not waited for."""


class Peers:
    """The peers as far as they are known, and the owners that are no longer believed.

    Attributes:
        late: those that let the deadline of a collection of ours pass, and have not contributed
            since (collecting.py, rule 1).
        own_cycles: the last cycle of each fragment that we have sent; -1 before the first.
        liars: owners that have lied, each with a proof; an empty one where no more are kept.
        unopened: fragment, cycle and owner of results that were not opened.
        withdrawn: owners of which something is no longer believed, until it is undone.
    """

    def __init__(self, own_id: str, num_fragments: int) -> None:
        self.own_id = own_id
        self.late: set[str] = set()
        self.withdrawn: list[str] = []
        self.seen = GroupSeen(round=-1, present=frozenset({own_id}), rounds={})
        self.own_cycles = [-1] * num_fragments
        self._brought_nothing: set[str] = set()
        self._settled: dict[tuple[int, str], tuple[int, bytes]] = {}
        self.liars: dict[str, bytes] = {}
        self.unopened: dict[tuple[int, int, str], None] = {}

    @property
    def others(self) -> frozenset[str]:
        return self.seen.present - {self.own_id}

    @property
    def known(self) -> frozenset[str]:
        return self.seen.known | self.seen.present

    def contributors(self, cycle: int) -> set[str]:
        """The peers that should contribute to a cycle about now, we too (rule 1)."""
        near = range(cycle - LATE_ROUNDS, cycle + LATE_ROUNDS)
        if self.seen.round not in near:
            return set()
        rounds = self.seen.rounds
        return {self.own_id, *(peer_id for peer_id in rounds if rounds[peer_id] in near)}

    def expected(self, fragment: int, cycle: int) -> set[str]:
        """The contributors of a cycle that have not finished it."""
        finished = {
            peer_id
            for (of, peer_id), (at, _) in self._settled.items()
            if of == fragment and at >= cycle
        }
        return self.contributors(cycle) - finished

    def possible_owners(self, cycle: int) -> list[str]:
        """The peers among which owners are chosen (rule 2)."""
        able = (self.contributors(cycle) - self._brought_nothing) | {self.own_id}
        return sorted(able - self.seen.relayed or able)

    def reached(self, fragment: int, without: str) -> int:
        """The newest cycle of a fragment that anybody but one peer has come to."""
        heard = (
            cycle
            for (of, peer_id), (cycle, _) in self._settled.items()
            if of == fragment and peer_id != without
        )
        return max([self.seen.round, self.own_cycles[fragment], *heard])

    def settled(self, fragment: int, peer_id: str) -> tuple[int, bytes] | None:
        """The last cycle that a peer, perhaps we, has finished, and its digest."""
        return self._settled.get((fragment, peer_id))

    def all_settled(self, fragment: int) -> bool:
        """Whether all who are present have finished the same cycle as we."""
        told = [self._settled.get((fragment, peer_id)) for peer_id in self.seen.present]
        return None not in told and len({each[0] for each in told if each is not None}) == 1

    def believes(self, result: Result) -> bool:
        """Whether a result is neither of an owner that has lied, nor one that was not opened."""
        key = result.fragment, result.cycle, result.owner
        return result.owner not in self.liars and key not in self.unopened

    def is_of_its_life(self, result: Result, sender: str) -> bool:
        """Whether a result that comes from its own owner names the owner's current incarnation."""
        known = self.seen.lives.get(result.owner)
        return sender != result.owner or known in (None, result.incarnation)

    def note_settled(self, fragment: int, peer_id: str, cycle: int, digest: bytes) -> None:
        """A peer, perhaps we, has finished a cycle; the digest is of where that led it."""
        self._settled[fragment, peer_id] = (cycle, digest)

    def note_heard(self, peer_id: str) -> None:
        self._brought_nothing.discard(peer_id)

    def note_brought_nothing(self, owners: set[str]) -> None:
        self._brought_nothing |= owners - {self.own_id}

    def note_untrue(self, owner: str, proof: bytes) -> None:
        self.liars[owner] = proof
        self.withdrawn.append(owner)
        forget_oldest(self.liars, MAX_CONVICTED)

    def note_unopened(self, fragment: int, cycle: int, owner: str) -> None:
        """An owner does not show what its result was made of."""
        self.unopened[fragment, cycle, owner] = None
        self.withdrawn.append(owner)
        forget_oldest(self.unopened, MAX_REMEMBERED)

    def forget_absent(self) -> None:
        """Forget every peer that is not there (rule 3)."""
        present = self.seen.present | {self.own_id}
        self._brought_nothing &= present | self.seen.rounds.keys()  # also of those that are stuck
        self.late &= self.seen.present
        self._settled = {key: at for key, at in self._settled.items() if key[1] in present}


@dataclass(slots=True)
class FragmentCounts:
    """Counts since the start.

    Attributes:
        diverged: chunks found to differ from a better state of another peer; `healed`: those that
            were fetched; `healed_s`: what that took, all together.
        refused: contributions and results of others that were not taken.
    """

    diverged: int = 0
    healed: int = 0
    healed_s: float = 0.0
    refused: Counter[RefusalReason] = field(default_factory=Counter)
    audits: Counter[AuditOutcome] = field(default_factory=Counter)


@dataclass(slots=True)
class Context:
    """Shared by the parts of the core.

    Attributes:
        do: has a command carried out.
        others_s: how long the other owners took in the last send, of any fragment, in which one
            was waited for in vain.
    """

    plan: SendPlan
    peers: Peers
    do: Callable[[FragmentCommand], None]
    counts: FragmentCounts = field(default_factory=FragmentCounts)
    now_s: float = 0.0
    others_s: float = math.inf

    def tell(
        self,
        peer_id: str,
        message: Result | NoResult | FragmentSettled | Doubt | Proof,
        codes: memoryview = NO_CODES,
    ) -> None:
        self.do(SendMessage(peer_id, message, codes))
