"""A table of all pairs that a peer has heard of: who averages with whom, and how long it takes.

A peer tells those that it is linked with of each of its averages in pairs (`AveragedWith` in
protocol/wire/messages.py). A row is what one peer says; another may say otherwise of the same pair.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from peer.facts import Facts, Meetings

MOST_PEERS: Final = 32
"""Beside each other: more would be too small to be read, and too much to be asked for."""
Told = Mapping[str, Meetings]


def pairs_json(facts: Facts, alive: Sequence[str]) -> dict[str, Any]:
    """Tables with a row for each teller and a column for each partner, this peer first.

    Peers that are not linked do not stand there, whoever tells of them.
    """
    shown = [facts.peer_id, *alive][:MOST_PEERS]
    told: Mapping[str, Told] = {**facts.others_meetings, facts.peer_id: facts.meetings}
    never = Meetings()
    rows = [[told.get(a, {}).get(b, never) for b in shown] for a in shown]
    return {
        "peers": shown,
        "averages": [[met.averages for met in row] for row in rows],
        "average_s": [[met.average_s for met in row] for row in rows],
    }
