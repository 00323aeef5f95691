"""What `loco-peer invite`, `admit`, `ban` and `delegate` ask of the daemon of their home."""

from typing import Any

from peer.network.identity import SEED_BYTES
from peer.observe.control import Handler
from peer.ports import Entropy, Network
from protocol.admission.rulings import Verdict

from .door import Door
from .passing_on import PassingOn


class AdmissionRequests:
    """See the top of the file."""

    def __init__(
        self, door: Door, passing_on: PassingOn, network: Network, entropy: Entropy
    ) -> None:
        self._door = door
        self._passing_on = passing_on
        self._network = network
        self._entropy = entropy

    def __repr__(self) -> str:
        return f"<AdmissionRequests to {self._door!r}>"

    def handlers(self) -> dict[str, Handler]:
        """The handler of each request, by its name."""
        return {"invite": self.invite, "rule": self.rule}

    async def invite(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """A new invitation, and where its holder can join."""
        seed = self._entropy.token_bytes(SEED_BYTES)
        token = self._door.invite(seed, float(wanted["lasts_s"]), int(wanted["uses"]))
        return {"token": token.text, "address": self._network.addresses[0]}

    async def rule(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Rule on a peer, and tell all."""
        self._passing_on.tell(self._door.rule(Verdict(wanted["verdict"]), wanted["peer"]))
        return {}
