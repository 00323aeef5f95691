"""`loco-peer generate`: what a run's model writes, from an export or from a peer's home.

A peer's model is exported into its home as `loco-peer export` would do it, for as long as it
writes: from the daemon, or from the newest checkpoint where none runs. Stages that are left out are
not fetched, so they need no peer that holds them.
"""

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from peer.options.config import ConfigError
from peer.state.export import ExportedModel, Sampling
from peer.state.home import Home, HomeError
from protocol.run.layout import DATA_STAGE

from .client import home_of
from .export import export_checkpoint, spec_of


def write_text(
    export: Path | None,
    given_home: Path | None,
    without_stages: str | None,
    prompt: str,
    sampling: Sampling,
) -> None:
    """Print what follows the prompt.

    Args:
        export: the model; None takes that of the home.
        without_stages: stages that are left out, as they were given.

    Raises:
        ConfigError, HomeError, NoDaemon, ControlFailed, ExportFailed
    """
    without = _numbers(without_stages)
    if export is None:
        home = home_of(given_home)
        check_left_out(without, spec_of(home).pipeline.stages)
        with _folder_in(home) as folder:
            export_checkpoint(home, folder / "hf", without)
            _write(folder / "hf", without, prompt, sampling)
    elif given_home is not None:
        raise ConfigError("--hf and --home name two models: give one of them")
    else:
        _write(export, without, prompt, sampling)


@contextmanager
def _folder_in(home: Home) -> Iterator[Path]:
    """A folder in the home for as long as it is needed. Raises HomeError."""
    try:
        home.state_dir.mkdir(exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=home.state_dir, prefix="generate-")
    except OSError as error:
        raise HomeError(f"{home.state_dir} cannot be written: {error.strerror}") from error
    with folder as path:
        yield Path(path)


def check_left_out(without: Collection[int], stages: int) -> None:
    """Refuse stages that cannot be left out. Raises ConfigError."""
    if without and stages == 1:
        raise ConfigError("this run's model is not cut into stages: leave --without-stages out")
    if DATA_STAGE in without:
        raise ConfigError(
            f"stage {DATA_STAGE} cannot be left out: it holds the embedding and the head"
        )
    if unknown := sorted(stage for stage in without if stage >= stages):
        raise ConfigError(
            f"this run has no stage {unknown[0]}: --without-stages takes 1 to {stages - 1}"
        )


def _write(folder: Path, without: frozenset[int], prompt: str, sampling: Sampling) -> None:
    try:
        model = ExportedModel(folder)
        check_left_out(without, model.stages)
        model.leave_out(without)
        model.continue_text(prompt, sampling, lambda text: print(text, end="", flush=True))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    print()


def _numbers(text: str | None) -> frozenset[int]:
    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--without-stages takes numbers such as 2,3; got {text!r}")
    return frozenset(map(int, parts))
