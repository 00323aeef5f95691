"""`loco-peer export`: the daemon writes its state to a file; this process converts it.

Where no daemon gives its state, it is that of the home's newest checkpoint. With `--swarm` it is
the mean of the slow weights of all peers that can be reached: peers that average in pairs are some
way apart, and their mean is better than each of them. It is made here, vector by vector, and
measured on the run's held-out text.
"""

import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from peer.content.state_file import HEADER_BYTES, state_bytes
from peer.observe.control import ControlFailed, NoDaemon, NotNow
from peer.options.config import ConfigError
from peer.state.checkpoints import OUTER_FILE, SLOW, CheckpointStore
from peer.state.export import export_hugging_face
from peer.state.home import Home, HomeError
from peer.training.corpus import describe_corpus, kept_corpus, open_corpus
from peer.training.corpus.tokenizer import (
    BYTES,
    FileTokenizer,
    load_tokenizer,
    tokenizer_file,
    tokenizer_path,
)
from peer.training.device import choose_precision
from peer.training.model import FlatModel, initial_module, model_shapes
from peer.training.optimizer import inner_optimizer
from peer.training.step import Stepper
from peer.training.tensor_file import FileUnusable, TensorFile
from protocol.errors import LocoError
from protocol.membership.group import WHOLE_MODEL
from protocol.names import short_id
from protocol.run.layout import Layout, stage_layouts, stage_of_part
from protocol.run.run_spec import RunSpec

from .client import WRITE_STATE_TIMEOUT_S, told


# --- export ---------------------------------------------------------------------------------------
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
        return describe_corpus(spec, kept).manifest.vocabulary_size
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


# --- kept export ----------------------------------------------------------------------------------
def export_kept(home: Home, directory: Path, error: NoDaemon | NotNow) -> None:
    """Write the slow weights of the newest checkpoint that is whole, and say which step that is.

    Args:
        error: what asking the daemon came to.

    Raises:
        NoDaemon, NotNow: as given, where there is no checkpoint either.
        ConfigError, HomeError, ExportFailed
    """

    def refused(path: Path, why: str) -> None:
        print(f"{path} cannot be used: {why}", file=sys.stderr, flush=True)

    signed, store = home.run(), CheckpointStore(home.checkpoints_dir, keep=1)
    found = None if signed is None else store.newest_whole(signed.run_id, refused)
    if found is None:
        raise type(error)(f"{error}; the home has no checkpoint either") from error
    manifest = found.manifest
    stage = stage_of_part(manifest.part)
    is_running = isinstance(error, NotNow)
    says = "gives no state now" if is_running else "is not running"
    why = f"the daemon of {home.root} {says}"
    if stage is not None:
        cure = "try again when it trains" if is_running else "start it, to fetch the other stages"
        raise ExportFailed(f"{why}, and its checkpoint holds only stage {stage}: {cure}") from error
    print(
        f"{why}: taking its newest checkpoint, of {manifest}",
        file=sys.stderr,
        flush=True,
    )
    weights_P = np.zeros(manifest.padded_parameters, np.float32)
    try:
        TensorFile(found.path / OUTER_FILE).read_into(SLOW, torch.from_numpy(weights_P))
    except FileUnusable as torn:
        raise ExportFailed(f"{found.path}: {torn}") from torn
    export_weights(home, weights_P, directory, round=manifest.round, tokens=manifest.tokens)


# --- swarm export ---------------------------------------------------------------------------------
FETCH_TIMEOUT_S: Final = 3700.0
MICRO_BATCH: Final = 4
Float32Vector = npt.NDArray[np.float32]


class LossJudge:
    """Measures losses on the held-out text, on the processor: the graphics card is training."""

    def __init__(self, home: Home, spec: RunSpec) -> None:
        kept = kept_corpus(home.cache_dir, spec.data.manifest or "")
        if kept is None:
            raise ExportFailed(f"the run's held-out text is not in {home.cache_dir}")
        prepared, device = describe_corpus(spec, kept), torch.device("cpu")
        self._model = FlatModel(initial_module(spec, prepared.manifest.vocabulary_size), device)
        optimizer = inner_optimizer(self._model, spec.optimizer, "fp32")
        precision = choose_precision("auto", device)
        self._stepper = Stepper(self._model, optimizer, precision, MICRO_BATCH)
        blocks = spec.data.validation_blocks
        with open_corpus(prepared.folder, spec.model.context_length, blocks) as corpus:
            self._blocks_BT = corpus.validation_blocks(blocks)

    def loss(self, slow_P: Float32Vector) -> float:
        """The loss of these weights, nats per token."""
        self._model.theta_P.copy_(torch.from_numpy(slow_P))
        return self._stepper.loss_of(self._blocks_BT)


def export_swarm(home: Home, directory: Path) -> None:
    """Print the loss of each peer that can be reached and of the mean, and write the mean.

    Raises:
        NoDaemon, ControlFailed, ExportFailed, ConfigError
    """
    written = told(home, "write_state", WRITE_STATE_TIMEOUT_S)
    if written["part"] != WHOLE_MODEL:
        raise ExportFailed("peers of this run hold stages; leave --swarm out")
    spec = spec_of(home)
    judge, count = LossJudge(home, spec), 0
    mean_P: Float32Vector = np.zeros(whole_layout(home, spec).padded_parameters, np.float32)
    print(f"{'peer':<9}{'step':>9}  validation")
    for name, step, slow_P in _given(home, spec, written):
        count += 1
        mean_P += (slow_P - mean_P) / np.float32(count)
        shown = "-" if step is None else f"{step:,}"
        print(f"{name:<9}{shown:>9}  {judge.loss(slow_P):.4f}", flush=True)
    print(f"{'mean':<9}{f'of {count}':>9}  {judge.loss(mean_P):.4f}")
    export_weights(home, mean_P, directory, round=written["round"], tokens=written["tokens"])


def _given(
    home: Home, spec: RunSpec, written: dict[str, Any]
) -> Iterator[tuple[str, int | None, Float32Vector]]:
    """Name, step and slow weights: ours, then those of the others; who gives none is named."""
    own = told(home, "status")
    layout = whole_layout(home, spec)
    own_P = slow_weights_in(Path(written["path"]), layout)
    yield short_id(own["peer_id"]), own["step"], own_P
    for peer_id in told(home, "holders")["peers"]:
        try:
            reply = told(home, "fetch_weights", FETCH_TIMEOUT_S, peer=peer_id)
        except ControlFailed as error:
            print(f"{short_id(peer_id):<9}{'-':>9}  left out: {error}")
            continue
        path = Path(reply["path"])
        slow_P: Float32Vector = np.fromfile(path, "<f4", count=layout.padded_parameters)
        path.unlink()
        yield short_id(peer_id), reply["step"], slow_P
