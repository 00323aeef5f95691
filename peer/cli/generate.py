"""`loco-peer generate`: text of a run's model, with all stages or without some.

It takes an export, or makes one in the home for as long as it writes. Stages that are left out are
not fetched, so they need no peer that holds them. What can be refused is refused before torch is
imported.

Experts are mixed here, token by token. Of a run's, one peer of each is asked what it makes of the
prompt; only the best of them by the run's rule, two as a rule, are fetched.
"""

from collections.abc import Collection
from pathlib import Path

from peer.options.config import ConfigError
from peer.process.bottom_line import shown
from peer.state.export_folder import holds_experts, stages_of_export
from protocol.run.layout import DATA_STAGE

from .client import check_exportable, home_of, run_of

Draw = tuple[int | None, float, float, int]
"""Fields of `Sampling`, which stands behind torch."""


def write_text(
    export: Path | None,
    given_home: Path | None,
    without_stages: str | None,
    prompt: str,
    draw: Draw,
) -> None:
    """Print what follows the prompt; without an export the model is that of the home."""
    without = _numbers(without_stages)
    if export is not None:
        if given_home is not None:
            raise ConfigError("--hf and --home name two models: give one of them")
        _write(export, without, prompt, draw)
        return
    home = home_of(given_home)
    run = run_of(home)
    check_left_out(without, run.pipeline.stages)
    check_exportable(home)
    from .export import export_checkpoint, folder_in
    from .export_experts import export_experts, suited

    with folder_in(home) as folder:
        if run.experts:
            export_experts(home, folder / "hf", suited(home, run, prompt))
        else:
            export_checkpoint(home, folder / "hf", without)
        _write(folder / "hf", without, prompt, draw)


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


def _write(folder: Path, without: frozenset[int], prompt: str, draw: Draw) -> None:
    together = holds_experts(folder)
    try:
        check_left_out(without, 1 if together else stages_of_export(folder))
        from peer.state.export import ExportedModel, Sampling, continue_together

        if together:
            from peer.state.ensemble_reader import ExpertEnsemble

            with shown("loading the experts"):
                ensemble = ExpertEnsemble(folder)
            continue_together(ensemble, prompt, Sampling(*draw), _say)
        else:
            with shown("loading the model"):
                model = ExportedModel(folder)
            model.leave_out(without)
            model.continue_text(prompt, Sampling(*draw), _say)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    print()


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _numbers(text: str | None) -> frozenset[int]:
    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--without-stages takes numbers such as 2,3; got {text!r}")
    return frozenset(map(int, parts))
