"""The ways of averaging and the codecs, one row each: all that others need to know by a name.

A way is a package in peer/averaging/, loaded by name, and a `Sync` of the trainer
(peer/training/sync.py). A codec is a class in peer/codec/, loaded by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from .layout import ALIGNMENT


@dataclass(frozen=True, slots=True)
class WayRow:
    """One way of averaging.

    Attributes:
        daemon: module:class; makes an `Averaging` of `AveragingParts` (peer/averaging/parts.py).
        conversation: that its peers have with each other (protocol/wire/versions.py).
        section: of the run spec, [sync.<section>], that belongs to it.
        keys: of [sync] that say nothing to the other ways.
        has_own_rounds: whether each peer may choose the length of its rounds
            (`inner_steps = "auto"`).
        sends_differences: peers send how far they have come, not whole weights; coarser codecs do
            for that.
        in_pairs: peers send to one partner at a time.
    """

    daemon: str
    conversation: str
    section: str
    keys: tuple[str, ...] = ()
    has_own_rounds: bool = False
    sends_differences: bool = False
    in_pairs: bool = True


WAYS: Final[Mapping[str, WayRow]] = {
    "noloco": WayRow(
        daemon="peer.averaging.gossip.noloco:PairAveraging",
        conversation="gossip",
        section="noloco",
        keys=("alpha", "beta", "gamma", "overlap", "final_averaging"),
        has_own_rounds=True,
    ),
    "diloco": WayRow(
        daemon="peer.averaging.diloco.fragment_rounds:FragmentAveraging",
        conversation="fragment",
        section="diloco",
        sends_differences=True,
        in_pairs=False,
    ),
}


def conversations_of(method: str, stages: int) -> tuple[str, ...]:
    """Conversations that a run needs besides those of all peers (protocol/wire/versions.py)."""
    return (WAYS[method].conversation, *(["stage"] if stages > 1 else []))


def others_keys(method: str) -> frozenset[str]:
    """Keys of [sync] that belong to other ways alone."""
    return frozenset(key for row in WAYS.values() for key in row.keys) - set(WAYS[method].keys)


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One codec.

    Attributes:
        made_by: module:class; called with `part_of`, makes a `Codec` (peer/codec/__init__.py).
        block_bytes: bytes that ALIGNMENT values become; all that is coded is a multiple of it long.
        differences_only: it is too coarse for whole weights.
        packs: pairs send each other the codes in fewer bits, as differences from what the other
            holds (peer/codec/differences.py); `block_bytes` is then what they take in memory, and
            the most that travels.
        fused: way of averaging to the module of compiled loops that take its outer step straight
            from these codes; other ways decode first.
    """

    made_by: str
    block_bytes: int
    differences_only: bool = False
    packs: bool = False
    fused: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes_per_value(self) -> float:
        return self.block_bytes / ALIGNMENT

    def code_bytes(self, num_values: int) -> int:
        """`num_values` is a multiple of ALIGNMENT."""
        return num_values // ALIGNMENT * self.block_bytes


CODECS: Final[Mapping[str, CodecRow]] = {
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


def codecs_for(method: str) -> tuple[str, ...]:
    way = WAYS[method]
    return tuple(
        name
        for name, row in CODECS.items()
        if (way.sends_differences or not row.differences_only) and (way.in_pairs or not row.packs)
    )
