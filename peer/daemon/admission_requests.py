"""What `loco-peer invite`, `admit`, `ban` and `delegate` ask of the daemon of their home."""

from collections.abc import Collection
from typing import Any, Final

from peer.network.identity import SEED_BYTES
from peer.observe.control import Handler
from peer.ports import Entropy, Network, PeerId
from protocol.address.peer_id import peer_id_to_bytes
from protocol.admission.statements import Verdict
from protocol.errors import LocoError, RemoteProtocolError

from .join_address import join_address
from .peer_parts import PeerParts

MOST_NAMED: Final = 8
"""Peers that are named to somebody whose short id is not clear."""


class AdmissionRequests:
    """Answers the control requests of `invite`, `admit`, `ban` and `delegate`."""

    def __init__(self, parts: PeerParts, network: Network, entropy: Entropy) -> None:
        self._parts = parts
        self._door = parts.standing.door
        self._network = network
        self._entropy = entropy

    def handlers(self) -> dict[str, Handler]:
        """The handler of each request, by its name."""
        return {"invite": self.invite, "rule": self.rule}

    async def invite(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """A new invitation, and where its holder can join."""
        seed = self._entropy.token_bytes(SEED_BYTES)
        token = self._door.invite(seed, float(wanted["lasts_s"]), int(wanted["uses"]))
        best = join_address(self._network, self._parts.facts)
        return {"token": token.text, "address": best.address, "note": best.note}

    async def rule(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Rule on a peer, and tell all; which peer that was."""
        peer_id = named_peer(wanted["peer"], self._known())
        verdict = Verdict(wanted["verdict"])
        is_own = peer_id == self._parts.facts.peer_id
        if verdict is Verdict.BAN and is_own and self._door.may_sign:
            raise LocoError("that is this peer itself; to end it: loco-peer leave")
        statements = self._door.rule(verdict, peer_id)
        self._parts.links.passing_on.tell(statements)
        return {"peer": peer_id}

    def _known(self) -> frozenset[PeerId]:
        """Peers that were here, and those that were ruled on: one that is banned is not here."""
        members = {member.peer_id for member in self._parts.roster.members()}
        return frozenset(members | self._door.known_peers | {self._parts.facts.peer_id})


def named_peer(text: str, known: Collection[PeerId]) -> PeerId:
    """The peer that a user means: a whole id, or the end of the one known id that ends so.

    Raises:
        LocoError: no peer is known by that end, or several are.
    """
    try:
        peer_id_to_bytes(text)
    except RemoteProtocolError:
        pass
    else:
        return text
    meant = sorted(peer_id for peer_id in known if peer_id.endswith(text))
    if len(meant) == 1:
        return meant[0]
    if not meant:
        raise LocoError(
            f"no peer is known here whose id ends in {text}; `loco-peer status --verbose` shows"
            " whole ids, and a whole id is taken of peers that are not here, too"
        )
    named = ", ".join(meant[:MOST_NAMED])
    raise LocoError(f"{len(meant)} peers have ids that end in {text}; give more of one: {named}")
