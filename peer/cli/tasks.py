"""`loco-peer eval --tasks`: a model's answers to tasks that people know, by lm-eval.

lm-eval is an extra, and large. It takes tasks from the Hugging Face hub, or, with `--task-files`,
from files of the user's own, whose Python it runs. The model is an export, or that of a home.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from peer.options.config import ConfigError
from peer.process.bottom_line import shown
from peer.state.export_folder import holds_experts, stages_of_export
from protocol.errors import LocoError
from protocol.names import nearest

from .client import check_exportable, home_of

LIBRARY: Final = "lm_eval"
BATCH: Final = 8
"""Sequences at a time: more gains little where a context is long, and takes its memory."""
NO_ERROR: Final = "N/A"
"""lm-eval's word where a metric has no standard error."""


@dataclass(frozen=True, slots=True)
class TaskQuestion:
    """Questions to a model: tasks by name, and how many examples of each; None takes all."""

    tasks: Sequence[str]
    files: Path | None
    limit: int | None
    device: str | None


def tasks_named(text: str) -> list[str]:
    """Raises ConfigError: lm-eval is not installed here, or none is named."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--tasks: name tasks of lm-eval, such as hellaswag,arc_easy")
    if find_spec(LIBRARY) is None:
        raise ConfigError(
            "--tasks: lm-eval is not installed here; install it with: pip install 'loco-peer[eval]'"
        )
    return names


def show_answers(
    hf: Path | None, given_home: Path | None, question: TaskQuestion, *, as_json: bool
) -> None:
    """Raises ConfigError, NoDaemon, NotNow; LocoError: lm-eval ended with an error."""
    if hf is not None and given_home is not None:
        raise ConfigError("--hf and --home name two models: give one of them")
    if hf is not None:
        found = _answers(hf, question)
    else:
        home = home_of(given_home)
        check_exportable(home)
        from .export import folder_in  # imports torch, so wrong options are told before
        from .export_experts import export_run

        with folder_in(home) as folder:
            export_run(home, folder / "hf", None, swarm=False, as_moe=False)
            found = _answers(folder / "hf", question)
    print(json.dumps(found) if as_json else "\n".join(lines_of(found)))


def _answers(folder: Path, question: TaskQuestion) -> dict[str, Any]:
    if holds_experts(folder):
        raise ConfigError("a task is put to one model: --hf DIR/EXPERT names one of an export's")
    try:
        stages_of_export(folder)  # a checkpoint of another program may hold Python: none is read
    except (ValueError, OSError) as error:
        raise ConfigError(f"--hf: {error}") from error
    with shown("asking the tasks: loading lm-eval"):
        return _results(folder, question)


def _results(folder: Path, question: TaskQuestion) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from peer.training.device import choose_device

    try:
        device = str(choose_device(question.device or "auto"))
    except ValueError as error:
        raise ConfigError(f"--device: {error}") from error
    files = None if question.files is None else str(question.files)
    manager = TaskManager(include_path=files)
    _check_known(question.tasks, manager.all_tasks)
    try:
        told = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder)},
            tasks=list(question.tasks),
            task_manager=manager,
            limit=question.limit,
            device=device,
            batch_size=BATCH,
            log_samples=False,
        )
    except Exception as error:  # lm-eval, and what it loads data sets with, raise all sorts
        why = str(error).strip().partition("\n")[0]
        raise LocoError(
            f"lm-eval could not ask {', '.join(question.tasks)}: {type(error).__name__}: {why}"
        ) from error
    return dict((told or {})["results"])


def _check_known(tasks: Sequence[str], known: Sequence[str]) -> None:
    """Raises ConfigError."""
    for name in tasks:
        if name not in known:
            raise ConfigError(
                f"--tasks: lm-eval knows no task '{name}'{nearest(name, known, 3)}"
                " (`lm-eval ls tasks` lists them; --task-files DIR has your own)"
            )


def lines_of(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each task and metric. lm-eval names a metric as `acc,none`, by its filter."""
    width = max(map(len, results), default=0)
    for task, told in results.items():
        for name, value in told.items():
            metric, comma, filtered = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = told.get(f"{metric}_stderr,{filtered}", NO_ERROR)
            beside = f" +- {error:.4f}" if isinstance(error, int | float) else ""
            of = "" if filtered == "none" else f" ({filtered})"
            yield f"{task:<{width}}  {metric:<12} {value:.4f}{beside}{of}"
