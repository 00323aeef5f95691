"""`loco-peer export`: the daemon writes its state to a file; this process converts it."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.content.state_file import HEADER_BYTES, state_bytes
from peer.options.config import ConfigError
from peer.state.export import export_hugging_face
from peer.state.home import Home, HomeError
from peer.training.corpus import describe_corpus, kept_corpus
from peer.training.corpus.tokenizer import (
    BYTES,
    FileTokenizer,
    load_tokenizer,
    tokenizer_file,
    tokenizer_path,
)
from peer.training.model import model_shapes
from protocol.errors import LocoError
from protocol.run.layout import Layout
from protocol.run.run_spec import RunSpec
from protocol.run.stages import stage_layouts, stage_of_part


class ExportFailed(LocoError):
    """The state cannot be converted; the message says why."""


def other_stages(home: Home, part: str) -> dict[int, int]:
    """The stages that must be fetched for a whole model, and the padded parameters of each.

    Args:
        part: that this peer holds; none are missing beside a whole model.

    Raises:
        HomeError: the home has no run.
    """
    own = stage_of_part(part)
    if own is None:
        return {}
    spec = spec_of(home)
    layouts = enumerate(stage_layouts(whole_layout(home, spec), spec.pipeline.stages))
    return {stage: layout.padded_parameters for stage, layout in layouts if stage != own}


def export_state(
    home: Home,
    written: dict[str, Any],
    others: dict[int, Path],
    directory: Path,
    without: Collection[int] = frozenset(),
) -> None:
    """Convert a state file to a Hugging Face checkpoint in `directory`.

    Args:
        written: what the daemon replied: `path` of the state file, `part` of the model that it is
            of, and `round` and `tokens` where it stands.
        others: fp32 vectors of the other stages, where that is one.
        without: stages that nobody gave; their parameters are zeros.

    Raises:
        ConfigError: `directory` holds something else.
        HomeError: the home has no run.
        ExportFailed: the state does not fit the run, or the tokenizer is not to be had.
    """
    spec = spec_of(home)
    try:
        weights_P = _whole_weights(spec, whole_layout(home, spec), written, others, without)
    except (ValueError, OSError) as error:
        raise ExportFailed(f"cannot export: {error}") from error
    export_weights(
        home, weights_P, directory, round=written.get("round"), tokens=written.get("tokens")
    )


def export_weights(
    home: Home,
    weights_P: npt.NDArray[np.float32],
    directory: Path,
    *,
    round: int | None,
    tokens: int | None,
) -> None:
    """Write a whole model's weights, fp32 [P], as a Hugging Face checkpoint.

    Raises:
        ConfigError, HomeError, ExportFailed: as `export_state`.
    """
    spec = spec_of(home)
    try:
        export_hugging_face(
            weights_P,
            spec,
            whole_layout(home, spec),
            directory,
            tokenizer_json=_tokenizer_json(home, spec),
            round=round,
            tokens=tokens,
        )
    except FileExistsError as error:
        raise ConfigError(str(error)) from error
    except (ValueError, OSError) as error:
        raise ExportFailed(f"cannot export: {error}") from error


def spec_of(home: Home) -> RunSpec:
    """The run spec of the run that a home belongs to. Raises HomeError."""
    signed = home.run()
    if signed is None:
        raise HomeError(f"{home.root} belongs to no run yet: there is no model")
    return signed.spec()


def whole_layout(home: Home, spec: RunSpec) -> Layout:
    """The layout of the run's model. Raises ValueError, OSError."""
    return Layout.from_shapes(model_shapes(spec, _vocabulary_size(home, spec)))


def _whole_weights(
    spec: RunSpec,
    layout: Layout,
    written: dict[str, Any],
    others: dict[int, Path],
    without: Collection[int],
) -> npt.NDArray[np.float32]:
    """The slow weights of the whole model, put together from its stages where it has some."""
    path, own = Path(written["path"]), stage_of_part(written["part"])
    if own is None:
        return slow_weights_in(path, layout)
    whole_P = np.zeros(layout.padded_parameters, "<f4")
    places = {entry.name: entry.offset for entry in layout.entries}
    for stage, part in enumerate(stage_layouts(layout, spec.pipeline.stages)):
        if stage in without:
            continue
        values = slow_weights_in(path, part) if stage == own else np.fromfile(others[stage], "<f4")
        for entry in part.entries:
            start = places[entry.name]
            whole_P[start : start + entry.size] = values[entry.offset : entry.offset + entry.size]
    return whole_P


def slow_weights_in(path: Path, layout: Layout) -> npt.NDArray[np.float32]:
    """The slow weights in a state file. Raises ValueError: it is of another size. OSError."""
    expected, found = state_bytes(layout.padded_parameters), path.stat().st_size
    if found != expected:
        raise ValueError(f"{path} has {found} bytes, the run's model needs {expected}")
    return np.fromfile(path, "<f4", count=layout.padded_parameters, offset=HEADER_BYTES)


def _vocabulary_size(home: Home, spec: RunSpec) -> int:
    kept = kept_corpus(home.cache_dir, spec.data.manifest or "")
    if kept is not None:
        return describe_corpus(spec, kept).vocabulary_size
    return load_tokenizer(spec.data.tokenizer).vocabulary_size


def _tokenizer_json(home: Home, spec: RunSpec) -> bytes | None:
    if spec.data.tokenizer == BYTES:
        return None
    kept = tokenizer_path(home.cache_dir, spec.data.tokenizer_digest or "")
    if kept.is_file():
        return kept.read_bytes()
    data = tokenizer_file(spec.data.tokenizer)
    digest = FileTokenizer(data).digest
    if digest != spec.data.tokenizer_digest:
        raise ValueError(
            f"the tokenizer {spec.data.tokenizer!r} found here has digest {digest}, not the run's"
        )
    return data
