"""`loco-peer export`: a run's model as a Hugging Face checkpoint.

The daemon writes its state to a file, and this process converts it; where no daemon gives its
state, the home's newest checkpoint is converted. `--swarm` exports the mean of the slow weights of
the peers that can be reached: peers that average in pairs are some way apart, and their mean is
better than each of them. Any of them may lie, so each counts by its measured loss, and one that
harms the mean is left out (protocol/content/samples.py, rule 8).
"""

import math
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peer.content.state_file import HEADER_BYTES, state_bytes
from peer.observe.control import ControlFailed, NoDaemon, NotNow
from peer.options.config import ConfigError
from peer.process.bottom_line import shown
from peer.state.checkpoints import OUTER_FILE, SLOW, Checkpoint, CheckpointStore
from peer.state.export import export_hugging_face
from peer.state.home import Home, HomeError
from peer.training.corpus.folder import describe_corpus, kept_corpus, open_corpus
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
from protocol.content.samples import MEAN_NATS, ROUNDING_NATS, Float32Vector, shares_by_loss
from protocol.errors import LocoError
from protocol.membership.group import WHOLE_MODEL
from protocol.names import short_id
from protocol.run.layout import Layout, part_of_stage, stage_layouts, stage_of_part
from protocol.run.run_spec import RunSpec
from protocol.schedule.progress import TaskProgress, Tell, nobody

from .client import SLOW_S, ask_now, run_of, spec_of


# --- export ---------------------------------------------------------------------------------------
class ExportFailed(LocoError):
    """The message says why."""


@contextmanager
def exports() -> Iterator[None]:
    """Raises ConfigError, ExportFailed: a folder, a file or a value that cannot be used."""
    try:
        yield
    except FileExistsError as error:
        raise ConfigError(str(error)) from error
    except (ValueError, OSError) as error:
        raise ExportFailed(f"cannot export: {error}") from error


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """Weights of a part of the model that can be had, where they stand, and how to read them."""

    read: Callable[[], Float32Vector]
    round: int | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class OwnState:
    """The daemon's reply of where its state is, or why it gives none.

    Attributes:
        written: `path` of the state file, `part` of the model that it is of, and `round` and
            `tokens` where it stands.
    """

    home: Home
    written: Mapping[str, Any]
    why: NoDaemon | NotNow | None = None

    def find(self, part: str, layout: Layout, gone: ExitStack) -> FoundWeights:
        """From our state, through the daemon from a peer, or from our newest checkpoint.

        Raises NoDaemon, ControlFailed: there is none of it. ValueError, OSError.
        """
        try:
            if self.why is not None:
                raise self.why
            if self.written["part"] == part:
                read, reply = partial(slow_weights_in, Path(self.written["path"]), layout), None
            else:
                reply = fetched(self.home, part, layout.padded_parameters)
                path = Path(reply["path"])
                gone.callback(path.unlink, missing_ok=True)
                read = partial(taken, path)
        except (NoDaemon, ControlFailed) as error:
            return self._kept(part, error)
        told_of = reply or self.written
        return FoundWeights(read, told_of.get("round"), told_of.get("tokens"))

    def _kept(self, part: str, error: NoDaemon | ControlFailed) -> FoundWeights:
        kept = None if stage_of_part(part) is not None else newest_kept(self.home, part)
        if kept is None:
            raise error
        manifest = kept.manifest
        why = f"{error}: taking the newest checkpoint of {part} here, of {manifest}"
        print(why, file=sys.stderr, flush=True)
        return FoundWeights(partial(slow_weights_of, kept), manifest.round, manifest.tokens)


def own_state(home: Home, tell: Tell) -> OwnState:
    tell(TaskProgress("the daemon writes its state"))
    try:
        return OwnState(home, ask_now(home, "write_state", SLOW_S))
    except (NoDaemon, NotNow) as error:
        return OwnState(home, {}, error)


def export_checkpoint(home: Home, directory: Path, without: Collection[int] = frozenset()) -> None:
    """Write this peer's state, or the home's newest checkpoint, as a Hugging Face checkpoint.

    Args:
        without: stages that are not fetched from others; their parameters become zeros.

    Raises:
        NoDaemon, NotNow: there is no checkpoint either.
        ConfigError: `directory` holds something else.
        ExportFailed: the state does not fit the run, or the tokenizer is not to be had.
        ControlFailed, HomeError
    """
    with shown("exporting") as tell:
        export_state(own_state(home, tell), directory, without, tell)


@exports()
def export_state(
    own: OwnState, directory: Path, without: Collection[int] = frozenset(), tell: Tell = nobody
) -> None:
    """Write a whole model, of parts as they are found. Raises as `export_checkpoint`."""
    home, spec, written = own.home, run_of(own.home), own.written
    stages = spec.pipeline.stages
    try:
        layout = whole_layout(home, spec)
        parts = {WHOLE_MODEL: layout}
        if stages > 1:
            parts = {part_of_stage(n): each for n, each in enumerate(stage_layouts(layout, stages))}
        weights_P: Float32Vector = np.zeros(layout.padded_parameters, np.float32)
        with ExitStack() as gone:
            for number, (part, its_layout) in enumerate(parts.items()):
                if number in without:
                    continue
                tell(TaskProgress(f"fetching {part}", number, len(parts), "parts"))
                found = own.find(part, its_layout, gone)
                if stages == 1:
                    weights_P = found.read()
                else:
                    _place(weights_P, layout, found.read(), its_layout)
    except (NoDaemon, NotNow) as error:
        more = "the home has no checkpoint either" if stages == 1 else "a stage alone is no model"
        raise type(error)(f"{error}; {more}") from error
    tell(TaskProgress(f"writing {directory}"))
    stands = written.get("round", found.round), written.get("tokens", found.tokens)
    export_weights(home, spec, weights_P, directory, *stands)


def fetched(
    home: Home, part: str, padded_parameters: int, peer_id: str | None = None
) -> dict[str, Any]:
    """The daemon's word of a part's weights that it has fetched; for their `path`, `taken`."""
    wanted = {"part": part, "padded_parameters": padded_parameters, "peer": peer_id}
    return ask_now(home, "fetch_weights", SLOW_S, **wanted)


def taken(path: Path) -> Float32Vector:
    """Read weights that the daemon has fetched for us, and remove their file. Raises OSError."""
    try:
        return np.fromfile(path, "<f4")
    finally:
        path.unlink(missing_ok=True)


def _place(whole_P: Float32Vector, layout: Layout, values: Float32Vector, part: Layout) -> None:
    places = {entry.name: entry.offset for entry in layout.entries}
    for entry in part.entries:
        start = places[entry.name]
        whole_P[start : start + entry.size] = values[entry.offset : entry.offset + entry.size]


def export_weights(
    home: Home,
    spec: RunSpec,
    weights_P: Float32Vector,
    directory: Path,
    round: int | None,
    tokens: int | None,
) -> None:
    """Write a whole model's weights. Raises FileExistsError, ValueError, OSError."""
    export_hugging_face(
        weights_P,
        spec,
        whole_layout(home, spec),
        directory,
        tokenizer_json=tokenizer_json_of(home, spec),
        round=round,
        tokens=tokens,
    )


def whole_layout(home: Home, spec: RunSpec) -> Layout:
    """Raises ValueError, OSError."""
    return Layout.from_shapes(model_shapes(spec, _vocabulary_size(home, spec)))


def slow_weights_in(path: Path, layout: Layout) -> Float32Vector:
    """Raises ValueError: the file is of another size. OSError."""
    expected, found = state_bytes(layout.padded_parameters), path.stat().st_size
    if found != expected:
        raise ValueError(f"{path} has {found} bytes, the run's model needs {expected}")
    return np.fromfile(path, "<f4", count=layout.padded_parameters, offset=HEADER_BYTES)


def _vocabulary_size(home: Home, spec: RunSpec) -> int:
    kept = kept_corpus(home.cache_dir, spec.data.manifest or "")
    if kept is not None:
        return describe_corpus(spec, kept).manifest.vocabulary_size
    return load_tokenizer(spec.data.tokenizer).vocabulary_size


def tokenizer_json_of(home: Home, spec: RunSpec) -> bytes | None:
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
def newest_kept(home: Home, part: str | None) -> Checkpoint | None:
    """The newest whole checkpoint of the home's run, and of this part if one is given."""

    def refused(path: Path, why: str) -> None:
        print(f"{path} cannot be used: {why}", file=sys.stderr, flush=True)

    signed, store = home.run(), CheckpointStore(home.checkpoints_dir, keep=1)
    return None if signed is None else store.newest_whole(signed.run_id, refused, part)


def slow_weights_of(kept: Checkpoint) -> Float32Vector:
    """Raises ExportFailed: it is torn."""
    weights_P = np.zeros(kept.manifest.padded_parameters, np.float32)
    try:
        TensorFile(kept.path / OUTER_FILE).read_into(SLOW, torch.from_numpy(weights_P))
    except FileUnusable as torn:
        raise ExportFailed(f"{kept.path}: {torn}") from torn
    return weights_P


@contextmanager
def folder_in(home: Home) -> Iterator[Path]:
    """A folder in the home, which goes at the end. Raises HomeError."""
    try:
        home.state_dir.mkdir(exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=home.state_dir, prefix="generate-")
    except OSError as error:
        raise HomeError(f"{home.state_dir} cannot be written: {error.strerror}") from error
    with folder as path:
        yield Path(path)


# --- swarm export ---------------------------------------------------------------------------------


Loss = Callable[[Float32Vector], float]


def loss_judge(home: Home, spec: RunSpec) -> Loss:
    """Measure weights on the held-out text, in nats per token. Raises ExportFailed.

    It runs on the CPU, because the GPU is training.
    """
    kept = kept_corpus(home.cache_dir, spec.data.manifest or "")
    if kept is None:
        raise ExportFailed(f"the run's held-out text is not in {home.cache_dir}")
    prepared, device = describe_corpus(spec, kept), torch.device("cpu")
    module = initial_module(spec, prepared.manifest.vocabulary_size)
    model = FlatModel(module, device, document_end=spec.data.document_end)
    optimizer = inner_optimizer(model, spec.optimizer, "fp32")
    precision = choose_precision("auto", device)
    stepper = Stepper(model, optimizer, precision, spec.microbatch_sequences)
    blocks = spec.data.validation_blocks
    corpus = open_corpus(prepared.folder, spec.model.context_length, blocks)
    blocks_BT = corpus.validation_blocks(blocks)

    def loss(slow_P: Float32Vector) -> float:
        model.theta_P.copy_(torch.from_numpy(slow_P))
        return stepper.loss_of(blocks_BT)

    return loss


@dataclass(frozen=True, slots=True)
class Given:
    """A peer's slow weights, in a file: all of them together may not fit the memory."""

    name: str
    loss: float
    path: Path

    def read(self) -> Float32Vector:
        return np.fromfile(self.path, "<f4")


@exports()
def export_swarm(home: Home, directory: Path) -> None:
    """Print the loss of each peer that can be reached and of the mean, and write the mean."""
    with shown("exporting") as tell:
        tell(TaskProgress("the daemon writes its state"))
        written = ask_now(home, "write_state", SLOW_S)
        if stage_of_part(written["part"]) is not None:
            raise ExportFailed("peers of this run hold stages; leave --swarm out")
        spec = spec_of(home)
        loss = loss_judge(home, spec)
        print(f"{'peer':<9}{'step':>9}  validation")
        with folder_in(home) as folder:
            given = list(_given(home, spec, written, folder, loss, tell))
            mean_P, count, mean_loss = mean_of(given, loss, tell)
        print(f"{'mean':<9}{f'of {count}':>9}  {mean_loss:.4f}")
        tell(TaskProgress(f"writing {directory}"))
        export_weights(home, spec, mean_P, directory, written["round"], written["tokens"])


def _given(
    home: Home, spec: RunSpec, written: dict[str, Any], folder: Path, loss: Loss, tell: Tell
) -> Iterator[Given]:
    """Our weights, then the others'; peers that give none are named. Prints each one's loss."""

    def given(peer_id: str, step: int | None, slow_P: Float32Vector) -> Given:
        name, path = short_id(peer_id), folder / peer_id
        slow_P.tofile(path)
        found = Given(name, loss(slow_P), path)
        shown = "-" if step is None else f"{step:,}"
        print(f"{name:<9}{shown:>9}  {found.loss:.4f}", flush=True)
        return found

    own = ask_now(home, "status")
    layout = whole_layout(home, spec)
    tell(TaskProgress("measuring our own weights"))
    yield given(own["peer_id"], own["step"], slow_weights_in(Path(written["path"]), layout))
    others = ask_now(home, "holders")["peers"]
    for number, peer_id in enumerate(others):
        tell(TaskProgress("fetching and measuring weights", number, len(others), "peers"))
        try:
            reply = fetched(home, written["part"], layout.padded_parameters, peer_id)
        except ControlFailed as error:
            print(f"{short_id(peer_id):<9}{'-':>9}  left out: {error}")
            continue
        yield given(peer_id, reply["step"], taken(Path(reply["path"])))


def mean_of(
    given: Sequence[Given], loss: Loss, tell: Tell = nobody
) -> tuple[Float32Vector, int, float]:
    """The mean of peers by their losses, of how many it is, and its loss; tells who is left out.

    The first one is tried first, the others from the best on. Raises ExportFailed.
    """
    shares = shares_by_loss([each.loss for each in given])
    ranked = sorted(range(len(given)), key=lambda index: (index > 0, -shares[index]))
    mean_P: Float32Vector = np.zeros(0, np.float32)
    count, total, mean_loss, losses = 0, 0.0, math.nan, 0.0
    for number, (each, share) in enumerate((given[index], shares[index]) for index in ranked):
        tell(TaskProgress("measuring the mean", number, len(given), "peers"))
        why = f"its loss is more than {MEAN_NATS:g} above the median"
        if share:
            weight = share / (total + share)
            tried_P, tried_loss, most = each.read(), each.loss, each.loss
            if count:
                tried_P = mean_P + (tried_P - mean_P) * np.float32(weight)
                tried_loss, most = loss(tried_P), losses + (each.loss - losses) * weight
            if tried_loss <= most + ROUNDING_NATS:
                mean_P, mean_loss, losses = tried_P, tried_loss, most
                count, total = count + 1, total + share
                continue
            why = f"the mean would have a loss of {tried_loss:.4f} with it, not {mean_loss:.4f}"
        print(f"{each.name:<9}{'-':>9}  left out: {why}", flush=True)
    if not count:
        raise ExportFailed("no peer gave weights with a loss that is a number")
    return mean_P, count, mean_loss
