"""What this peer knows of how others reach it, for `status`, metrics and `doctor`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.membership.dial_back import NatKind, Reach
from protocol.names import short_id


@dataclass(slots=True)
class ReachFacts:
    """Whether and how others can reach this peer now.

    Attributes:
        reach: whether others can dial us at all; `v4` and `v6` by family of addresses.
        given: addresses that the user has named.
        working: those of ours where others get through.
        observed: the IP addresses that others see.
        relays: peers that relay for us.
        answers: peers that have told us.
        relayed_peers: those that we are connected to through relays alone.
        reservations, circuits, carried_bytes: of our own relay.
    """

    reach: Reach = Reach.UNKNOWN
    v4: Reach = Reach.UNKNOWN
    v6: Reach = Reach.UNKNOWN
    nat: NatKind = NatKind.UNKNOWN
    given: tuple[str, ...] = ()
    working: tuple[str, ...] = ()
    observed: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    answers: int = 0
    relayed_peers: int = 0
    reservations: int = 0
    circuits: int = 0
    carried_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "reachable": str(self.reach),
            "v4": str(self.v4),
            "v6": str(self.v6),
            "nat": str(self.nat),
            "observed": list(self.observed),
            "relays": list(self.relays),
            "answers": self.answers,
            "relayed_peers": self.relayed_peers,
            "reservations": self.reservations,
            "circuits": self.circuits,
            "carried_bytes": self.carried_bytes,
        }


def reach_line(told: Mapping[str, Any]) -> str:
    """What `to_json` gave, in a line for people."""
    families = ", ".join(f"IP{name} {told[name]}" for name in ("v4", "v6"))
    line = f"{told['reachable']} ({families}; router: {told['nat']})"
    if told["relays"]:
        line += f"; relayed by {', '.join(map(short_id, told['relays']))}"
    if told["relayed_peers"]:
        line += f"; {told['relayed_peers']} peers through relays"
    if told["circuits"] or told["reservations"]:
        line += f"; relays {told['circuits']} connections for {told['reservations']} peers"
    return line
