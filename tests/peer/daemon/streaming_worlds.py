"""Swarms that average fragments: small ones, and the means to look at them."""

from collections import Counter
from typing import Any, Final

import numpy as np
from swarm_worlds import STEP_S, toy_spec

from peer.averaging.diloco.fragment_exchange import TICK_S
from peer.observe.event_names import EventName
from protocol.diloco.collecting import MIN_COLLECT_S
from protocol.run.run_spec import RunSpec
from simulation.swarm import SimulatedPeer, SwarmOptions

MIN_RETURN_S: Final = 2 * MIN_COLLECT_S

ROUNDS: Final = 6
ROUND_S: Final = 20 * STEP_S
DEADLINE_S: Final = MIN_COLLECT_S + TICK_S
"""Of an owner that has seen all contributions come at once, and looks at its watch now and then."""
LONGEST_ROUND_S: Final = ROUND_S + DEADLINE_S + MIN_RETURN_S
"""A round in which a contribution was waited for in vain, and after that an owner. It is far below
the silence after which a peer is gone: nobody is waited for until then."""
OPTIONS: Final = SwarmOptions(padded_parameters=6 * 16384)
"""A fragment of one chunk (0), and three of three chunks; with `whole` one of twelve."""
PLAIN_MEAN: Final = {"learning_rate": 1.0, "momentum": 0.0}
"""An outer step takes the average itself: phi' = phi - D."""


def fragment_spec(rounds: int = ROUNDS, codec: str = "int8", **diloco: object) -> RunSpec:
    """Four fragments in rounds of 20 steps."""
    section = {"blocks_per_fragment": 2} | diloco
    return toy_spec(rounds, method="diloco", codec=codec, diloco=section)


def returned(peer: SimulatedPeer, after: int = -1) -> list[dict[str, Any]]:
    """Ends of its sends in cycles after that one."""
    return [e for e in peer.events(EventName.FRAGMENT_RETURNED) if e["round"] > after]


def has_returned(peer: SimulatedPeer, fragment: int, cycle: int) -> bool:
    """Whether this send has ended."""
    return any((e["fragment"], e["round"]) == (fragment, cycle) for e in returned(peer))


def returned_in(peer: SimulatedPeer, fragment: int, cycle: int) -> dict[str, Any]:
    """The end of this send."""
    ends = [e for e in returned(peer) if (e["fragment"], e["round"]) == (fragment, cycle)]
    return ends[0]


def contributors(peer: SimulatedPeer, after: int = -1) -> Counter[int]:
    """How many contributed, and how often."""
    return Counter(event["contributors"] for event in returned(peer, after))


def longest_round_s(peer: SimulatedPeer) -> float:
    return max(event["seconds"] for event in peer.events(EventName.ROUND_CLOSED))


def assert_equal(*peers: SimulatedPeer) -> None:
    """All have the same outer copy."""
    first, *others = peers
    for other in others:
        np.testing.assert_array_equal(first.slow_weights(), other.slow_weights())


def spoil(peer: SimulatedPeer, by: float = 1.0, place: int = 5) -> None:
    """As a bit that flips in memory does: in one chunk of the outer copy."""
    assert peer.provision.slow_P is not None
    peer.provision.slow_P[place] += by
