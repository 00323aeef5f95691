"""Audits: averages that are worked out again, and what follows for owners that lie.

Idea. An owner averages what all have sent it and signs the result. Each contribution is signed by
its sender, and a result names those that it was made of. So an owner can be asked to *open* its
result: to show what went in. One leaf of one chunk is enough (code_tree.py): a lie that moves a
chunk is in most of its leaves, and a leaf of all contributions is small beside the chunk itself.
The auditor works out the average of that leaf from the opening, bit for bit, and compares.

    owner     Result (signed; names the contributions) ------------> all
    auditor   GetOpening(chunk, leaf) -> owner;  Opening: contributions, each with its leaf
              the same: true | another: a lie, proved -> Proof to all | none: Doubt to all
    all       a Proof convinces whoever checks it;  after a Doubt each asks for itself

What is signed. A contribution: group, fragment, cycle, weight, the chunks with the states that they
stand on, and of each the root over its codes and its length. A result: the same of what came out,
its contributors, and the digest of each one's signed contribution. How much contributions count
follows from their lengths alone (protocol/plausible.py), which owners hold against the codes before
they take them: so nothing has to be known of a chunk beyond the leaf.

Rules
  1. Each peer that gets a result from its owner draws, with randomness of its own, whether to audit
     it, and which chunk and leaf of it; so that about AUDITS_PER_RESULT of all do. Nobody else can
     know beforehand. An owner keeps what it has averaged for as long as it is likely to be asked.
  2. A leaf that does not follow from the contributions that the result names is a *lie*, and the
     opening is its proof: all that is in it is signed by somebody. The proof goes to all, and to
     newcomers; whoever checks it convicts the owner: it is banned here, and what it has averaged
     is taken back (rule 4).
  3. An owner that is there, is asked and does not open, in time or at all, is not believed in that
     result. That proves nothing to others: they are told of the doubt, and ask for themselves. One
     that has gone proves nothing either way: the audit is inconclusive.
  4. What is not believed is not applied, and is undone where it was: until a fragment is sent again
     the state before its last step is there (chunk_ledger.py). The chunk has no step in that cycle
     then, as if its owner had died. Such a state is not taken back from others in that cycle.
  5. Nobody is blamed for a doubt: lines and processes fail. One peer's doubts are followed up once
     for each result, MAX_AUDITS at once.

  6. Two different results that one life of an owner has signed for a fragment and cycle are a proof
     too (evidence.py). Peers to which an owner has told different things see that they differ
     when they are through with the cycle, and ask each other for the results that they have: that
     is how both come together. Of each fragment and owner the newest two are kept for it. A result
     that an owner itself sends must name the life of it that we know.

Why nobody honest is convicted. An owner signs what it averages, and nothing twice in a life:
whatever it opens is what it has averaged. One that has started again has nothing to open, which is
no lie.
Views that differ make two owners of one chunk, each with its own contributions, each true.

Not seen: a lie in so few leaves that none is drawn; two results of an owner that tells each of two
peers another incarnation; and contributions that are longer than they say, where the owner is in
league with their sender. The first and the last move a chunk within what is plausible.
"""

from collections import OrderedDict
from typing import Any, Final

import blake3

from protocol.limits import MAX_AUDITS, MAX_CONVICTED, MAX_KEPT_EVIDENCE_BYTES
from protocol.outcomes import AuditOutcome
from protocol.wire.fragment_messages import Doubt, Proof, Result

from .commands import Audit, Convict, Parts
from .evidence import Contradiction, contradict
from .peers import Context

AUDITS_PER_RESULT: Final = 2.0
"""How many of the others audit a result, on the average: with one, two lies of five are not seen,
and what they cost in learning was measured (docs/results/hostile.md)."""
MAX_REMEMBERED: Final = 1024
"""Results that can be audited after a doubt of another peer, if they were not before."""

KEPT_OF_A_FRAGMENT: Final = 2
"""Results of one owner for one fragment that later ones are held against."""

Key = tuple[int, int, str]
"""Fragment, cycle and owner of a result."""


class Audits:
    """What one peer audits, and whom it believes no more.

    Args:
        seed: 32 bytes that nobody else knows.
    """

    def __init__(self, context: Context, seed: bytes) -> None:
        self._context = context
        self._group = context.plan.group
        self._peers = context.peers
        self._seed = seed
        self._under_way: set[Key] = set()
        self._results: OrderedDict[Key, tuple[Result, Parts]] = OrderedDict()
        self._doubted: OrderedDict[Key, None] = OrderedDict()
        self._proofs: OrderedDict[str, bytes] = OrderedDict()
        self._signed: OrderedDict[tuple[int, str], list[Result]] = OrderedDict()

    def is_convicted(self, owner: str) -> bool:
        """Whether an owner was proved to have lied."""
        return owner in self._proofs

    # --- what is audited --------------------------------------------------------------------------
    def arrived(self, result: Result, codes: Parts) -> None:
        """A result came from its owner, whom we believe so far (rule 1)."""
        key = result.fragment, result.cycle, result.owner
        if key in self._doubted or not codes:
            return
        # Of each fragment and owner the newest alone: the codes are kept until the next one.
        for older in [each for each in self._results if each[::2] == key[::2]]:
            del self._results[older]
        self._results[key] = result, codes
        _bound(self._results)
        draw, _ = self._draw(key)
        if draw * max(1, len(self._peers.others)) < AUDITS_PER_RESULT:
            self._audit(key)

    def doubted(self, doubt: Doubt) -> None:
        """Another peer was not shown what a result was made of: ask for ourselves (rule 3)."""
        self._audit((doubt.fragment, doubt.cycle, doubt.owner))

    def _audit(self, key: Key) -> None:
        kept = self._results.get(key)
        known = key in self._doubted or key in self._under_way
        if kept is None or known or len(self._under_way) >= MAX_AUDITS:
            return
        self._under_way.add(key)
        result, codes = kept
        _, number = self._draw(key)
        chunk = sorted(codes)[number % len(codes)]
        self._context.do(Audit(result, chunk, number // len(codes), codes[chunk]))

    def _draw(self, key: Key) -> tuple[float, int]:
        """A number between 0 and 1, and a large one; the same whenever this is asked."""
        digest = blake3.blake3(f"{key[0]}/{key[1]}/{key[2]}".encode(), key=self._seed).digest()
        return int.from_bytes(digest[:8], "big") / 2**64, int.from_bytes(digest[8:16], "big")

    def noted(self, result: Result) -> None:
        """Hold a result, which is genuine, against those that its owner has signed (rule 6)."""
        if result.owner not in self._peers.others:
            return
        key = result.fragment, result.owner
        kept = self._signed.pop(key, [])
        for each in kept:
            if contradict(each, result):
                self.proved(result.owner, Contradiction(each, result).packed())
                return
        if not any(_life(each) == _life(result) for each in kept):
            kept = sorted([*kept, result], key=_life)[-KEPT_OF_A_FRAGMENT:]
        self._signed[key] = kept
        _bound(self._signed)

    # --- what comes of it -------------------------------------------------------------------------
    def audited(self, result: Result, outcome: AuditOutcome, proof: bytes) -> None:
        """Note the end of an audit."""
        key = result.fragment, result.cycle, result.owner
        self._under_way.discard(key)
        if outcome is AuditOutcome.UNOPENED and result.owner not in self._peers.others:
            outcome = AuditOutcome.INCONCLUSIVE
        self._context.counts.audits[outcome] += 1
        if outcome is AuditOutcome.TRUE:
            self._results.pop(key, None)
        elif outcome is AuditOutcome.LIE:
            self.proved(result.owner, proof)
        elif outcome is AuditOutcome.UNOPENED and key not in self._doubted:
            self._doubted[key] = None
            _bound(self._doubted)
            self._results.pop(key, None)
            self._peers.note_unopened(*key)
            self._to_all(Doubt(self._group, *key))

    def proved(self, owner: str, proof: bytes) -> None:
        """It is proved, here or elsewhere, that an owner has lied (rule 2)."""
        if owner in self._proofs or owner == self._peers.own_id:
            return
        kept_bytes = sum(map(len, self._proofs.values())) + len(proof)
        self._proofs[owner] = proof if kept_bytes <= MAX_KEPT_EVIDENCE_BYTES else b""
        _bound(self._proofs, MAX_CONVICTED)
        self._results = OrderedDict(
            (key, kept) for key, kept in self._results.items() if key[2] != owner
        )
        self._peers.note_untrue(owner)
        self._context.do(Convict(owner, proof))
        self._to_all(Proof(self._group, owner), proof, but=owner)

    def tell(self, newcomer: str) -> None:
        """Tell a newcomer who has lied, as far as that can still be proved."""
        for owner, proof in self._proofs.items():
            if proof and owner != newcomer:
                self._context.tell(newcomer, Proof(self._group, owner), memoryview(proof))

    def _to_all(self, message: Doubt | Proof, proof: bytes = b"", but: str = "") -> None:
        for peer_id in sorted(self._peers.others - {but, message.owner}):
            self._context.tell(peer_id, message, memoryview(proof))


def _life(result: Result) -> tuple[int, int]:
    """The cycle that a result is of, and the life of its owner."""
    return result.cycle, result.incarnation


def _bound(kept: OrderedDict[Any, Any], most: int = MAX_REMEMBERED) -> None:
    """Forget the oldest."""
    while len(kept) > most:
        kept.popitem(last=False)
