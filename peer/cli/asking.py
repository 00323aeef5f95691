"""`loco-peer new` in a terminal: a few questions, whose answers become its arguments.

So the command that is shown at the end is the one that is run.
"""

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from peer.options.config import ConfigError
from peer.options.needs_told import told_needs
from peer.options.values import whole
from protocol.errors import LocoError
from protocol.limits import MAX_STAGES

from .new import METHODS, PRESETS, preset_spec

ONE, SEVERAL = "one", "several"
INTRODUCTION: Final = (
    "A run spec says what all peers of a run agree on. Enter takes the answer in brackets, Ctrl+C"
    "\nends without a file; the file explains every key, and you can change it before the run."
)
NEXT: Final = {
    ONE: "then: `start` trains here alone; others can join whenever you like",
    SEVERAL: "then: `start` prints the command for the other machines, which need nothing else",
}
_READERS: Final[Mapping[str, Callable[[Any], int]]] = {
    "stages": whole(1, MAX_STAGES),
    "seed": whole(0, (1 << 63) - 1),
}


@dataclass(frozen=True, slots=True)
class TerminalQuestion:
    """One question.

    Attributes:
        says: what it means, in a sentence.
        default: the answer of an empty line.
        check: raises LocoError or ValueError, and says why, where an answer cannot be used.
    """

    name: str
    says: str
    default: str
    check: Callable[[str], object]


Ask = Callable[[TerminalQuestion], str]
"""Puts a question until it has an answer."""


# --- what is asked --------------------------------------------------------------------------------
def answers_of(ask: Ask) -> tuple[list[str], str]:
    """The arguments of `new`, and what comes next."""
    path = ask(TerminalQuestion("file", "Where to write it.", free_name(Path()), check_file))
    chosen: dict[str, Any] = {}

    def about(option: str, says: str) -> None:
        """Ask for an option of `new`; the default is not among its arguments."""
        default = str(_default_of(option, chosen))

        def chosen_with(answer: str) -> dict[str, Any]:
            return {**chosen, option: _READERS.get(option, str)(answer)}

        answer = ask(
            TerminalQuestion(option, says, default, lambda a: preset_spec(**chosen_with(a)))
        )
        if answer != default:
            chosen.update(chosen_with(answer))

    about(
        "preset",
        f"Model size: {', '.join(PRESETS)}. `demo` has 0.9M parameters, and a CPU is enough; the"
        "\nothers have 125M and 1B, and want GPUs and GPT-2's tokenizer from the Hugging Face hub.",
    )
    about(
        "data",
        "The text to learn: `stdlib` is Python's own source. Yours: text:FOLDER/*.txt, jsonl:FILES,"
        "\nparquet:FILES, hf:NAME of the hub, or tokens:FILE. The first peer alone needs it.",
    )
    says = "Whether one machine trains, or several that average their weights: one or several."
    machines = ask(TerminalQuestion("machines", says, SEVERAL, _check_machines))
    if machines == SEVERAL:
        memory = next(line for line in told_needs(preset_spec(**chosen)) if "memory" in line)
        about(
            "stages",
            "Into how many stages the model is cut: 1, unless it is too large for one machine."
            f"\nUncut it takes of each: {' '.join(memory.split()[1:])}.",
        )
    if machines == SEVERAL and "stages" not in chosen:
        about(
            "method",
            f"How peers average: {', '.join(METHODS)}. `noloco`, in pairs, suits any line and many"
            "\npeers; `diloco` keeps all models equal, for few peers on good lines; `streaming` is"
            "\nnoloco in fragments.",
        )
    about(
        "seed", "The number that first weights and the order of the text follow from: any will do."
    )
    options = [word for option, value in chosen.items() for word in (f"--{option}", str(value))]
    return [path, *options], NEXT[machines]


def _default_of(option: str, chosen: Mapping[str, Any]) -> object:
    usual = {"preset": "demo", "method": METHODS[0], "stages": 1, "seed": 0}
    return usual.get(option, preset_spec(**chosen).data.source)


def _check_machines(answer: str) -> None:
    if answer not in (ONE, SEVERAL):
        raise ConfigError(f"use {ONE} or {SEVERAL}")


def free_name(folder: Path) -> str:
    """run.toml, or the first of run-2.toml and so on that is not there."""
    names = ["run.toml", *(f"run-{number}.toml" for number in range(2, 1000))]
    return next(name for name in names if not (folder / name).exists())


def check_file(answer: str) -> None:
    """Refuse what `new` could not write to. Raises ConfigError."""
    path = Path(answer)
    if answer.startswith("-"):
        raise ConfigError(f"{answer} looks like an option: use another name")
    if path.exists():
        raise ConfigError(f"{answer} exists already: use another name")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}: make it first, or use another one")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"nothing can be written in {path.parent}: use another folder")


# --- asking ---------------------------------------------------------------------------------------
def put(
    question: TerminalQuestion, read: Callable[[str], str], say: Callable[[str], object]
) -> str:
    """Put a question until it has an answer."""
    say(f"\n{question.says}")
    while True:
        answer = read(f"{question.name} [{question.default}]: ").strip() or question.default
        try:
            question.check(answer)
        except (LocoError, ValueError, OSError) as error:
            say(f"  {error}")
        else:
            return answer


def arguments_of_new() -> list[str]:
    """Ask here. Raises EOFError, KeyboardInterrupt: the user does not want to go on."""
    with suppress(ImportError):
        import readline  # noqa: F401 - with it, `input` lets lines be edited
    print(INTRODUCTION)
    try:
        arguments, then = answers_of(partial(put, read=input, say=print))
    except (EOFError, KeyboardInterrupt):
        print("\nnothing was written", file=sys.stderr)
        raise
    print(f"\nThe same without questions:\n  loco-peer new {shlex.join(arguments)}\n{then}\n")
    return arguments
