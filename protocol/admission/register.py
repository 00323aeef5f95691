"""The register: which peers belong to the run, as one of them knows it.

There is no list of members that all agree on. Each member keeps the signed statements that it has
seen, tells new ones to all that it is linked with, and judges by what it has; statements only add
up, so members that have seen the same ones judge alike, in whatever order they came.

Rules
  1. The founder's key is in the run spec's signature. A *delegate* is a peer of which the founder's
     newest ruling says so. Founder and delegates are *signers*; nothing else that anybody signs
     counts, nor what a former delegate has signed.
  2. Of all rulings of signers on a peer one holds: the founder's before a delegate's, whatever its
     serial, then the highest serial, then a ban. Nobody but the founder rules on a delegate.
  3. A peer that a ruling holds for is banned or admitted, as it says. For all others the run's
     mode decides: `open` admits everybody, `list` those whom the run spec names, `invite` those
     and the holders of passes.
  4. A pass that its own peer shows is taken until its invitation expires, while fewer than `uses`
     others have one of the same invitation. A pass that a member passes on is taken in any case:
     it was shown to somebody in time. One that was taken stays good.
  5. The founder's statements are told first, so that a delegate is known before what it signed.

Invariants: the register grows by what signers and guests have signed, and by nothing else; it holds
MAX_RULINGS and MAX_PASSES at most, and always has room for the founder's; a ban by the founder
holds in every register that has seen it until the founder takes it back.
"""

from collections.abc import Iterable
from enum import StrEnum

from protocol.address.peer_id import peer_id_from_public_key
from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_PASSES, MAX_RULINGS

from .statements import MAX_SERIAL, Pass, Ruling, Verdict, opened


class Mode(StrEnum):
    """Which peers may join, where no ruling says it."""

    OPEN = "open"
    INVITE = "invite"
    LIST = "list"


class Register:
    """The rulings and invitations that one peer knows, and whom they let in.

    Args:
        founder: the key that signed the run spec.
        listed: peer ids that the run spec names.
    """

    def __init__(self, mode: Mode, run_id: str, founder: bytes, listed: Iterable[str]) -> None:
        self.mode = mode
        self.run_id = run_id
        self._founder = founder
        self._listed = frozenset(listed)
        self._rulings: dict[tuple[str, bytes], Ruling] = {}
        self._passes: dict[str, Pass] = {}
        self._known: set[bytes] = set()

    @property
    def statements(self) -> tuple[bytes, ...]:
        """All statements, the founder's first (rule 5)."""
        rulings = sorted(self._rulings.values(), key=lambda ruling: ruling.signer != self._founder)
        passes = self._passes.values()
        return (*(ruling.sealed for ruling in rulings), *(own.sealed for own in passes))

    @property
    def known_peers(self) -> frozenset[str]:
        """Peers that a ruling or a pass is about."""
        return frozenset({peer_id for peer_id, _ in self._rulings} | self._passes.keys())

    def next_serial(self, signer: bytes, peer_id: str) -> int | None:
        """With which serial a new ruling of this signer on this peer holds; None where none does.

        Serials are compared on one peer alone, the founder's with the founder's: so whoever takes
        the highest one takes nobody's word on anybody else, and never the founder's.
        """
        own = self._rulings.get((peer_id, signer))
        before = own if signer == self._founder else self._holding(peer_id)
        serial = 1 if before is None else before.serial + 1
        outranked = before is not None and before.signer == self._founder != signer
        return None if outranked or serial > MAX_SERIAL else serial

    def is_founder(self, key: bytes) -> bool:
        return key == self._founder

    def is_signer(self, key: bytes) -> bool:
        return key == self._founder or self._is_delegate(peer_id_from_public_key(key))

    def ruling_in(self, statement: bytes) -> Ruling | None:
        """The ruling that this statement is, if it is kept."""
        kept = self._rulings.values()
        return next((ruling for ruling in kept if ruling.sealed == statement), None)

    def is_banned(self, peer_id: str) -> bool:
        ruling = self._holding(peer_id)
        return ruling is not None and ruling.verdict is Verdict.BAN

    def refusal_of(self, peer_id: str) -> str | None:
        """Why a peer is not admitted, in a sentence; None where it is."""
        if self._holding(peer_id) is not None:
            return "this peer is banned from the run" if self.is_banned(peer_id) else None
        if self.mode is Mode.OPEN or peer_id in self._listed:
            return None
        if self.mode is Mode.LIST:
            return "this run takes the peers on its list alone; its founder can admit this one"
        shown = self._passes.get(peer_id)
        if shown is not None and self.is_signer(shown.invitation.signer):
            return None
        return "this run takes invited peers alone; join it with --invite @FILE, or LOCO_INVITE"

    def knows(self, data: bytes) -> bool:
        """Spares signatures, which take time: new links bring all statements."""
        return data in self._known

    def take(self, data: bytes) -> bool:
        """Whether a forwarded statement was new, and is kept. Raises RemoteProtocolError."""
        if self.knows(data):
            return False
        if opened(data)[0][:1] == ["pass"]:
            return self._keep_pass(Pass.read(data, self.run_id))
        return self._keep_ruling(Ruling.read(data, self.run_id))

    def shown(self, data: bytes, peer_id: str, now_s: float) -> str | None:
        """A fault of a pass that a peer shows itself (rule 4); `now_s` is the swarm's Unix time."""
        if peer_id in self._passes or self.mode is not Mode.INVITE:
            return None
        try:
            own = Pass.read(data, self.run_id)
        except RemoteProtocolError as error:
            return f"the invitation cannot be used: {error}"
        fault = self._pass_fault(own, peer_id, now_s)
        if fault is None and not self._keep_pass(own):
            fault = "this run has as many invited peers as can be kept track of"
        return fault

    def _pass_fault(self, own: Pass, peer_id: str, now_s: float) -> str | None:
        invitation = own.invitation
        if own.peer_id != peer_id:
            return "the pass was made for another peer"
        if not self.is_signer(invitation.signer):
            return "the invitation was signed by nobody who may invite; ask for a new one"
        if invitation.expires_s <= now_s:
            return "the invitation has expired; ask for a new one"
        guests = sum(other.invitation.guest == invitation.guest for other in self._passes.values())
        if guests >= invitation.uses:
            return f"{guests} peers have used the invitation, as many as may; ask for a new one"
        return None

    def _keep_ruling(self, ruling: Ruling) -> bool:
        if ruling.verdict is Verdict.DELEGATE and ruling.signer != self._founder:
            return False
        place = ruling.peer_id, ruling.signer
        before = self._rulings.get(place)
        if before is not None and _rank(before) >= _rank(ruling):
            return False
        if not self.is_signer(ruling.signer) or (before is None and not self._has_room(ruling)):
            return False
        if before is not None:
            self._known.discard(before.sealed)
        self._rulings[place] = ruling
        self._known.add(ruling.sealed)
        return True

    def _has_room(self, ruling: Ruling) -> bool:
        """Whether one more ruling fits; one of the founder takes the place of another's."""
        if len(self._rulings) < MAX_RULINGS:
            return True
        others = [place for place in self._rulings if place[1] != self._founder]
        if ruling.signer != self._founder or not others:
            return False
        self._known.discard(self._rulings.pop(others[0]).sealed)
        return True

    def _keep_pass(self, own: Pass) -> bool:
        known = own.peer_id in self._passes
        if known or len(self._passes) >= MAX_PASSES or not self.is_signer(own.invitation.signer):
            return False
        self._passes[own.peer_id] = own
        self._known.add(own.sealed)
        return True

    def _is_delegate(self, peer_id: str) -> bool:
        ruling = self._rulings.get((peer_id, self._founder))
        return ruling is not None and ruling.verdict is Verdict.DELEGATE

    def _holding(self, peer_id: str) -> Ruling | None:
        own = self._rulings.get((peer_id, self._founder))
        if own is not None:
            return own
        counting = (
            ruling
            for (about, signer), ruling in self._rulings.items()
            if about == peer_id and self.is_signer(signer)
        )
        return max(counting, key=_rank, default=None)


def _rank(ruling: Ruling) -> tuple[int, bool, bytes]:
    return ruling.serial, ruling.verdict is Verdict.BAN, ruling.sealed
