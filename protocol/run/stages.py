"""A model cut into the stages of a pipeline: which layers each holds, and what its group is called.

Stage 0 holds the embedding, the first layers, and the end of the model: final norm, head and loss.
Its peers hold the data (constraint CC1, protocol/pipeline/problem.py). The other stages hold
layers only. Layers are dealt out in order, as evenly as can be; the later stages take what is left
over, for stage 0 has the two ends besides.
"""

from typing import Final

from protocol.errors import LocalProtocolError

from .layout import Layout

DATA_STAGE: Final = 0
_KIND: Final = "stage/"
_LAYERS: Final = "model.layers."
"""How names of parameters begin that belong to a layer; its number follows."""


def stage_layers(num_layers: int, stages: int, stage: int) -> range:
    """The layers of one stage, counted from 0.

    Raises LocalProtocolError unless there is a layer for each stage, and such a stage.
    """
    if not 1 <= stages <= num_layers:
        raise LocalProtocolError(f"{num_layers} layers cannot be cut into {stages} stages")
    if not 0 <= stage < stages:
        raise LocalProtocolError(f"there is no stage {stage} of {stages}")
    return range(stage * num_layers // stages, (stage + 1) * num_layers // stages)


def layer_of(parameter: str) -> int | None:
    """The layer that a parameter of the model belongs to; None for one of the two ends."""
    words = parameter.removeprefix(_LAYERS).split(".")
    return int(words[0]) if parameter.startswith(_LAYERS) else None


def stage_layouts(whole: Layout, stages: int) -> tuple[Layout, ...]:
    """The layout of each stage of a model. Raises LocalProtocolError as `stage_layers`."""
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
