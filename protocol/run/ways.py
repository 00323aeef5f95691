"""The ways of averaging, one row each: all that tells one from another at its name.

A way is a module on the daemon's side (in peer/averaging/) and a module on the trainer's
(peer/training/). Both are named here and loaded by name, for either process must start without the
other's; adding a way adds a row, and a section of the run spec if it has keys of its own.

    daemon     module:class; makes an `Averaging` of `AveragingParts` (peer/averaging/parts.py)
    trainer    module with `regions_of`, `snapshots_of` and `sync_of` (peer/training/sync.py)
    keys       of [sync] that say nothing to the other ways
    section    of the run spec, [sync.<section>], that belongs to it; None where it has none
    state      what its state holds for a joiner beside slow weights and outer momentum
    has_own_rounds  whether a peer's rounds may be of a length of its own (`inner_steps = "auto"`)
    sends_differences  whether peers send how far they have come, and not whole weights: coarser
               codecs do for that (codecs.py)
    in_pairs   whether peers send what they have to one partner at a time
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class WayRow:
    """One way of averaging; see the top of the file."""

    daemon: str
    trainer: str
    keys: tuple[str, ...] = ()
    section: str | None = None
    state: tuple[str, ...] = ()
    has_own_rounds: bool = False
    sends_differences: bool = False
    in_pairs: bool = True


WAYS: Final[Mapping[str, WayRow]] = MappingProxyType(
    {
        "noloco": WayRow(
            daemon="peer.averaging.gossip.noloco:PairAveraging",
            trainer="peer.training.pairs",
            keys=("alpha", "beta", "gamma", "overlap", "final_averaging"),
            has_own_rounds=True,
        ),
        "diloco": WayRow(
            daemon="peer.averaging.diloco.fragment_rounds:FragmentAveraging",
            trainer="peer.training.streaming",
            section="diloco",
            state=("stamps of chunks, asked of the others on arrival",),
            sends_differences=True,
            in_pairs=False,
        ),
        "streaming": WayRow(
            daemon="peer.averaging.gossip.streaming:StreamingAveraging",
            trainer="peer.training.streaming_gossip",
            keys=("alpha", "beta", "final_averaging"),
            section="streaming",
        ),
    }
)


def others_keys(method: str) -> frozenset[str]:
    """Keys of [sync] that say nothing to this way: those that belong to others alone."""
    return frozenset(key for row in WAYS.values() for key in row.keys) - set(WAYS[method].keys)
