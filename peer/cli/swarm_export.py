"""`loco-peer export --swarm`: the mean of the slow weights of all peers that can be reached.

Peers that average in pairs are some way apart, and their mean is better than each of them. It is
made here, vector by vector, and measured on the run's held-out text.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import trio

from peer.observe.control import REPLY_TIMEOUT_S, ControlFailed
from peer.state.home import Home
from peer.training.corpus import describe_corpus, kept_corpus, open_corpus
from peer.training.device import choose_precision
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import flat_adamw
from peer.training.step import Stepper
from protocol.membership.group import WHOLE_MODEL
from protocol.names import short_id
from protocol.run.run_spec import RunSpec

from .client import WRITE_STATE_TIMEOUT_S, ask_daemon
from .export import ExportFailed, export_weights, slow_weights_in, spec_of, whole_layout

FETCH_TIMEOUT_S: Final = 3700.0
MICRO_BATCH: Final = 4
Float32Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Given:
    """The slow weights of one peer."""

    name: str
    step: int | None
    slow_P: Float32Vector


class Judge:
    """Measures losses on the held-out text, on the processor: the graphics card is training."""

    def __init__(self, home: Home, spec: RunSpec) -> None:
        kept = kept_corpus(home.cache_dir, spec.data.manifest or "")
        if kept is None:
            raise ExportFailed(f"the run's held-out text is not in {home.cache_dir}")
        prepared, device = describe_corpus(spec, kept), torch.device("cpu")
        self._model = FlatModel(initial_module(spec, prepared.vocabulary_size), device)
        optimizer = flat_adamw(self._model, spec.optimizer)
        precision = choose_precision("auto", device)
        self._stepper = Stepper(self._model, optimizer, precision, MICRO_BATCH)
        blocks = spec.data.validation_blocks
        with open_corpus(prepared.path, spec.model.context_length, blocks) as corpus:
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
    written = trio.run(ask_daemon, home, "write_state", WRITE_STATE_TIMEOUT_S)
    if written["part"] != WHOLE_MODEL:
        raise ExportFailed("peers of this run hold stages; leave --swarm out")
    spec = spec_of(home)
    judge, count = Judge(home, spec), 0
    mean_P: Float32Vector = np.zeros(whole_layout(home, spec).padded_parameters, np.float32)
    print(f"{'peer':<9}{'step':>9}  validation")
    for given in _given(home, spec, written):
        count += 1
        mean_P += (given.slow_P - mean_P) / np.float32(count)
        step = "-" if given.step is None else f"{given.step:,}"
        print(f"{given.name:<9}{step:>9}  {judge.loss(given.slow_P):.4f}", flush=True)
    print(f"{'mean':<9}{f'of {count}':>9}  {judge.loss(mean_P):.4f}")
    export_weights(home, mean_P, directory, round=written["round"], tokens=written["tokens"])


def _given(home: Home, spec: RunSpec, written: dict[str, Any]) -> Iterator[Given]:
    """Our own weights, then those of the others, one after another; who gives none is named."""
    own = trio.run(ask_daemon, home, "status", REPLY_TIMEOUT_S)
    layout = whole_layout(home, spec)
    own_P = slow_weights_in(Path(written["path"]), layout)
    yield Given(short_id(own["peer_id"]), own["step"], own_P)
    for peer_id in trio.run(ask_daemon, home, "holders", REPLY_TIMEOUT_S)["peers"]:
        try:
            reply = trio.run(_fetch, home, peer_id)
        except ControlFailed as error:
            print(f"{short_id(peer_id):<9}{'-':>9}  left out: {error}")
            continue
        path = Path(reply["path"])
        slow_P: Float32Vector = np.fromfile(path, "<f4", count=layout.padded_parameters)
        path.unlink()
        yield Given(short_id(peer_id), reply["step"], slow_P)


async def _fetch(home: Home, peer_id: str) -> dict[str, Any]:
    return await ask_daemon(home, "fetch_weights", FETCH_TIMEOUT_S, peer=peer_id)
