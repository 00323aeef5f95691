"""The ways of averaging and the codecs, one row each: all that others need to know by a name.

A way is a package on the daemon's side (in peer/averaging/), loaded by name, and a `Sync` on the
trainer's (peer/training/sync.py).

    daemon     module:class; makes an `Averaging` of `AveragingParts` (peer/averaging/parts.py)
    keys       of [sync] that say nothing to the other ways
    section    of the run spec, [sync.<section>], that belongs to it
    has_own_rounds  whether a peer's rounds may be of a length of its own (`inner_steps = "auto"`)
    sends_differences  whether peers send how far they have come, and not whole weights: coarser
               codecs do for that
    in_pairs   whether peers send what they have to one partner at a time

A codec is a class of peer/codec, loaded by name. The run spec, its explanations and the sizes of
messages read the rows.

    made_by           module:class; called with `part_of`, makes a `Codec` (peer/codec/base.py)
    block_bytes       bytes that ALIGNMENT values become; whatever is coded is a multiple of it long
    differences_only  whether it is too coarse for whole weights
    packs             whether two that average as a pair send each other the codes in fewer bits, as
                      differences from what the other holds (peer/codec/differences.py); then the
                      bytes above are those of memory, and the most that travels
    fused             way of averaging to the module of compiled loops that take its outer
                      step straight from these codes; other ways decode first
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from .layout import ALIGNMENT


# --- ways -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class WayRow:
    """One way of averaging; see the top of the file."""

    daemon: str
    section: str
    keys: tuple[str, ...] = ()
    has_own_rounds: bool = False
    sends_differences: bool = False
    in_pairs: bool = True


WAYS: Final[Mapping[str, WayRow]] = MappingProxyType(
    {
        "noloco": WayRow(
            daemon="peer.averaging.gossip.noloco:PairAveraging",
            section="noloco",
            keys=("alpha", "beta", "gamma", "overlap", "final_averaging"),
            has_own_rounds=True,
        ),
        "diloco": WayRow(
            daemon="peer.averaging.diloco.fragment_rounds:FragmentAveraging",
            section="diloco",
            sends_differences=True,
            in_pairs=False,
        ),
    }
)


def others_keys(method: str) -> frozenset[str]:
    """Keys of [sync] that say nothing to this way: those that belong to others alone."""
    return frozenset(key for row in WAYS.values() for key in row.keys) - set(WAYS[method].keys)


# --- codecs ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class CodecRow:
    """One codec; see the top of the file."""

    made_by: str
    block_bytes: int
    differences_only: bool = False
    packs: bool = False
    fused: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes_per_value(self) -> float:
        return self.block_bytes / ALIGNMENT

    def code_bytes(self, num_values: int) -> int:
        """Bytes that so many values become, a multiple of ALIGNMENT."""
        return num_values // ALIGNMENT * self.block_bytes


_ROWS: Final[dict[str, CodecRow]] = {
    "int8": CodecRow(
        made_by="peer.codec.codecs:Int8Codec",
        block_bytes=130,
        fused={
            "noloco": "peer.averaging.gossip.int8_step",
            "diloco": "peer.averaging.diloco.int8_nesterov",
        },
    ),
    "int8-diff": CodecRow(
        made_by="peer.codec.codecs:Int8DiffCodec",
        block_bytes=130,
        packs=True,
        fused={"noloco": "peer.averaging.gossip.int8_step"},
    ),
    "bf16": CodecRow(made_by="peer.codec.codecs:Bf16Codec", block_bytes=256),
    "fp32": CodecRow(made_by="peer.codec.codecs:Fp32Codec", block_bytes=512),
    "int4": CodecRow(
        made_by="peer.codec.codecs:Int4Codec",
        block_bytes=66,
        differences_only=True,
    ),
}
CODECS: Final[Mapping[str, CodecRow]] = MappingProxyType(_ROWS)


def codecs_for(method: str) -> tuple[str, ...]:
    """Names of the codecs that fit what a way of averaging sends, and to whom."""
    way = WAYS[method]
    return tuple(
        name
        for name, row in CODECS.items()
        if (way.sends_differences or not row.differences_only) and (way.in_pairs or not row.packs)
    )
