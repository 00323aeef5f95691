"""The address that people are shown to join by: one choice for all who show it."""

from dataclasses import dataclass
from typing import Final

from peer.facts import Facts
from peer.network.reachability import Scope, address_to_join, scope_of
from peer.ports import Address, Network
from protocol.membership.dial_back import Reach

_CURES: Final = {
    Scope.NETWORK: (
        "from elsewhere: forward its port and give --announce HOST:PORT, or have a peer with an"
        " open port relay"
    ),
    Scope.MACHINE: "for others: --listen 0.0.0.0:PORT",
}


@dataclass(frozen=True, slots=True)
class JoinAddress:
    """An address of ours, with our peer id, and from where it can be dialled."""

    address: Address
    scope: Scope

    @property
    def note(self) -> str:
        """What its reader must know; empty where anybody can dial it."""
        if self.scope is Scope.ANYWHERE:
            return ""
        return f"only reachable from {self.scope}; {_CURES[self.scope]}"


def join_address(network: Network, facts: Facts) -> JoinAddress:
    """The best that is known at this moment."""
    reach = facts.reach
    address = address_to_join(
        network.addresses,
        given=reach.given,
        working=reach.working,
        needs_relay=reach.reach is Reach.NO,
    )
    return JoinAddress(address, scope_of(address))
