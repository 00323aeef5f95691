"""The order of the flat vector: which parameter lies where.

Peers may add vectors only if every position means the same parameter to all. So the order is a
pure function of names and shapes, and its digest goes into every proposal.

Rules:
    1. Parameters are sorted by name; a tied tensor stands once, under the first of its names.
    2. Each tensor is padded with zeros to a multiple of `ALIGNMENT` values, so that no block of a
       code (peer/codec) mixes two tensors.
    3. The digest covers names and shapes, in that order, not values.

Stage 0 of a pipeline holds the embedding, the first layers, and the end of the model (final norm,
head and loss); its peers hold the data (constraint CC1, protocol/pipeline/problem.py). The other
stages hold layers only, dealt out in order and evenly; the later ones take what is left over.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import blake3
import msgpack

from protocol.errors import LocalProtocolError

ALIGNMENT: Final = 128
"""Values that codecs code together (ways.py)."""


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """One tensor: values [offset, offset + size) of the flat vector, then padding."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def padded_size(self) -> int:
        return -(-self.size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Layout:
    entries: tuple[LayoutEntry, ...]

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]]) -> "Layout":
        """Lay out these tensors. Raises ValueError: no tensor, or one without values."""
        entries = []
        offset = 0
        for name in sorted(shapes):
            entry = LayoutEntry(name, tuple(int(size) for size in shapes[name]), offset)
            if entry.size < 1:
                raise ValueError(f"parameter {name!r} of shape {entry.shape} has no values")
            entries.append(entry)
            offset += entry.padded_size
        if not entries:
            raise ValueError("a model without parameters has no layout")
        return cls(tuple(entries))

    @property
    def parameters(self) -> int:
        return sum(entry.size for entry in self.entries)

    @property
    def padded_parameters(self) -> int:  # P
        last = self.entries[-1]
        return last.offset + last.padded_size

    @property
    def digest(self) -> str:
        table = [[entry.name, list(entry.shape)] for entry in self.entries]
        return blake3.blake3(msgpack.packb(table)).hexdigest(length=16)


DATA_STAGE: Final = 0
_KIND: Final = "stage/"
_EXPERT: Final = "expert/"
_LAYERS: Final = "model.layers."
"""Prefix of the names of a layer's parameters; its number follows."""


def stage_layers(num_layers: int, stages: int, stage: int) -> range:
    """The layers of one stage. Raises LocalProtocolError: too few layers, or no such stage."""
    if not 1 <= stages <= num_layers:
        raise LocalProtocolError(f"{num_layers} layers cannot be cut into {stages} stages")
    if not 0 <= stage < stages:
        raise LocalProtocolError(f"there is no stage {stage} of {stages}")
    return range(stage * num_layers // stages, (stage + 1) * num_layers // stages)


def layer_of(parameter: str) -> int | None:
    """The layer of a parameter; None at the two ends of the model."""
    words = parameter.removeprefix(_LAYERS).split(".")
    return int(words[0]) if parameter.startswith(_LAYERS) else None


def stage_layouts(whole: Layout, stages: int) -> tuple[Layout, ...]:
    """The layouts of the stages of a model. Raises LocalProtocolError as `stage_layers`."""
    layers = [layer_of(entry.name) for entry in whole.entries]
    num_layers = 1 + max((layer for layer in layers if layer is not None), default=-1)
    stage_of = {
        layer: stage for stage in range(stages) for layer in stage_layers(num_layers, stages, stage)
    }
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(stages)]
    for entry, layer in zip(whole.entries, layers, strict=True):
        stage = DATA_STAGE if layer is None else stage_of[layer]
        shapes[stage][entry.name] = entry.shape
    return tuple(Layout.from_shapes(part) for part in shapes)


def part_of_stage(stage: int) -> str:
    """How its group names this stage (protocol/membership/group.py)."""
    return f"{_KIND}{stage}"


def stage_of_part(part: str) -> int | None:
    """The stage that a group's part is; None for another part."""
    return int(part.removeprefix(_KIND)) if part.startswith(_KIND) else None


def is_part(text: str) -> bool:
    """Whether this names a stage or an expert."""
    kind, slash, number = text.partition("/")
    return kind + slash in (_KIND, _EXPERT) and number.isdecimal()


def part_of_expert(number: int) -> str:
    return f"{_EXPERT}{number}"


def expert_of_part(part: str) -> int | None:
    """The expert that a group's part is; None for another part."""
    return int(part.removeprefix(_EXPERT)) if part.startswith(_EXPERT) else None
