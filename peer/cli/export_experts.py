"""`loco-peer export` of a run with experts: a checkpoint of each, and what makes them an ensemble.

This peer's own expert comes from its daemon, the others' from a peer of each; where nobody has one,
from the newest checkpoint of it in this home. All are there before the first is written, so that a
folder never holds half an ensemble that nobody asked for.

`--as-moe` writes one Mixtral in their place, if it is better than the best of them alone.
"""

import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np

from peer.observe.control import ControlFailed, NoDaemon, NotNow
from peer.options.config import ConfigError
from peer.process.bottom_line import shown
from peer.state.ensemble_reader import ExpertEnsemble
from peer.state.export import move_files
from peer.state.export_folder import write_ensemble
from peer.state.home import Home
from peer.state.moe import Domain, NoMixture, compared, merged
from peer.training.corpus.folder import kept_corpus, open_corpus
from peer.training.corpus.tokenizer import ByteTokenizer, FileTokenizer
from protocol.content.samples import ROUNDING_NATS
from protocol.errors import InvalidRunSpec
from protocol.experts.ensemble import Combination, Posterior
from protocol.experts.matrix import lines_of_table
from protocol.run.layout import part_of_expert
from protocol.run.run_spec import NONE, RunSpec
from protocol.schedule.progress import TaskProgress, Tell

from .client import SLOW_S, ask_now, run_of
from .export import (
    ExportFailed,
    FoundWeights,
    export_checkpoint,
    export_swarm,
    export_weights,
    exports,
    folder_in,
    newest_kept,
    own_state,
    tokenizer_json_of,
    whole_layout,
)

MERGE_BLOCKS: Final = 64
"""Held-out blocks of each domain: half of them for the gates, half to measure with."""

SCORED_TOKENS: Final = 4096
"""The end of a prompt tells experts apart, and fits a request to the daemon."""


def export_run(
    home: Home, directory: Path, experts: str | None, *, swarm: bool, as_moe: bool
) -> None:
    """Export the home's run by the options given, of which some exclude others.

    Raises ConfigError, and as the exports below.
    """
    names = None if experts is None else [name.strip() for name in experts.split(",")]
    if (names is not None or as_moe) and not run_of(home).experts:
        raise ConfigError("this run has one model: leave --experts and --as-moe out")
    if swarm and (names is not None or as_moe):
        raise ConfigError("--swarm exports the mean of this home's own expert: give it alone")
    if swarm:
        export_swarm(home, directory)
    elif as_moe:
        export_mixture(home, directory, names)
    elif run_of(home).experts:
        export_experts(home, directory, names)
    else:
        export_checkpoint(home, directory)


@exports()
def export_experts(home: Home, directory: Path, names: Collection[str] | None) -> None:
    """Write a checkpoint of each expert, or of those named, into folders of their names.

    Raises:
        ExportFailed: nobody has one of them, or it does not fit the run.
        ConfigError, HomeError, NoDaemon, NotNow: as `export_checkpoint`.
    """
    with shown("exporting") as tell:
        _export(home, directory, names, tell)


@exports()
def export_mixture(home: Home, directory: Path, names: Collection[str] | None) -> None:
    """Write one Mixtral of the experts; prints what it makes of each domain beside them.

    Raises ExportFailed: it is worse than the best of them, or cannot be; and as `export_experts`.
    """
    with shown("exporting") as tell, folder_in(home) as folder:
        _export(home, folder / "experts", names, tell)
        try:
            tell(TaskProgress("merging the experts"))
            ensemble = ExpertEnsemble(folder / "experts")
            domains = list(_domains(home, ensemble.names))
            mixture = merged(ensemble, domains, folder / "moe")
            tell(TaskProgress("measuring them on held-out text"))
            best, its_loss, loss = _told(compared(ensemble, mixture, domains), len(domains))
        except NoMixture as error:
            raise ExportFailed(f"--as-moe: {error}") from error
        if not loss <= its_loss + ROUNDING_NATS:
            raise ExportFailed(
                f"nothing is written: as one mixture the experts have a loss of {loss:.4f}, worse"
                f" than {best} alone ({its_loss:.4f}); export them without --as-moe"
            )
        move_files(folder / "moe", directory)


def suited(home: Home, run: RunSpec, prompt: str) -> list[str]:
    """The names of the experts that are to continue a prompt: the best of the run's posterior.

    Those that nobody answers for are left out, and told.

    Raises:
        ExportFailed, NoDaemon, NotNow: nobody answers for any.
        ConfigError: the prompt is no text for the model.
    """
    rules = run.ensemble
    assert rules is not None
    numbers = [n for n in range(len(run.experts)) if n or rules.anchor != NONE]
    tokens = _tokens_of(home, run, prompt)
    try:
        said = _said_of(home, run, numbers, tokens) if len(tokens) > 1 else {n: [] for n in numbers}
    except (NoDaemon, NotNow) as error:
        kept = [n for n in numbers if newest_kept(home, part_of_expert(n)) is not None]
        if not kept:
            raise type(error)(f"{error}; the home has no checkpoint of an expert either") from error
        print(f"{error}; the experts that this home has answer", file=sys.stderr, flush=True)
        return [run.experts[number].name for number in kept]
    if not said:
        raise ExportFailed("no expert says what it makes of the prompt: try again in a minute")
    posterior = Posterior(len(said), Combination(rules.discount, rules.fixed_share))
    for now in np.array([*said.values()]).T:
        posterior.saw(now)
    order = np.argsort(-posterior.log_weights, kind="stable")[: rules.top]
    return [run.experts[[*said][place]].name for place in order]


def _tokens_of(home: Home, run: RunSpec, prompt: str) -> list[int]:
    data, most = tokenizer_json_of(home, run), run.model.context_length
    tokenizer = ByteTokenizer() if data is None else FileTokenizer(data)
    tokens: list[int] = tokenizer.encode(prompt).tolist()
    if not 0 < len(tokens) < most:
        raise ConfigError(
            f"the prompt has {len(tokens)} tokens, and the models read {most} at once: give a text"
            " that leaves room for what is to be written"
        )
    return tokens


def _said_of(
    home: Home, run: RunSpec, numbers: list[int], tokens: list[int]
) -> dict[int, list[float]]:
    """Log-probabilities of the prompt's tokens, by the numbers of the experts."""
    parts, last = {part_of_expert(number): number for number in numbers}, tokens[-SCORED_TOKENS:]
    reply = ask_now(home, "score_text", SLOW_S, parts=[*parts], tokens=last)
    for part, reason in reply["failed"].items():
        name = run.experts[parts[part]].name
        print(f"{name} is left out: {reason}", file=sys.stderr, flush=True)
    said = reply["log_probs"]
    return {number: said[part] for part, number in parts.items() if part in said}


def numbers_of(run: RunSpec, names: Collection[str] | None) -> list[int]:
    """Raises ConfigError: there is none of that name."""
    if names is None:
        return list(range(len(run.experts)))
    try:
        return sorted({number for name in names if (number := run.expert_named(name)) is not None})
    except InvalidRunSpec as error:
        raise ConfigError(str(error).replace("--expert ", "--experts ")) from error


def _export(home: Home, directory: Path, names: Collection[str] | None, tell: Tell) -> None:
    run = run_of(home)
    with ExitStack() as gone:
        found = _gathered(home, run, numbers_of(run, names), tell, gone)
        for count, (number, weights) in enumerate(found.items()):
            name, spec = run.experts[number].name, run.of_expert(number)
            tell(TaskProgress(f"writing {name}", count, len(found), "experts"))
            target = directory / name
            export_weights(home, spec, weights.read(), target, weights.round, weights.tokens)
    write_ensemble(directory, run, [*found])


# --- gathering ------------------------------------------------------------------------------------
def _gathered(
    home: Home, run: RunSpec, numbers: list[int], tell: Tell, gone: ExitStack
) -> dict[int, FoundWeights]:
    """Gather the weights of these experts. Raises ExportFailed: some are not to be had."""
    own = own_state(home, tell)
    found, missing = dict[int, FoundWeights](), dict[str, str]()
    for count, number in enumerate(numbers):
        name = run.experts[number].name
        tell(TaskProgress(f"fetching {name}", count, len(numbers), "experts"))
        try:
            layout = whole_layout(home, run.of_expert(number))
            found[number] = own.find(part_of_expert(number), layout, gone)
        except (NoDaemon, ControlFailed) as error:
            missing[name] = str(error)
    if not missing:
        return found
    if own.why is not None and not found:
        raise type(own.why)(f"{own.why}; the home has no checkpoint either") from own.why
    reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
    others = ",".join(run.experts[number].name for number in found)
    cure = f", or take the others alone: --experts {others}" if others else ""
    raise ExportFailed(
        f"not all experts are to be had ({reasons}). Start a peer of each that is missing{cure}"
    )


# --- one mixture ----------------------------------------------------------------------------------
def _domains(home: Home, names: Collection[str]) -> Iterator[Domain]:
    """Held-out blocks of the experts' domains. Raises ExportFailed: those of one are not here."""
    run = run_of(home)
    for name in names:
        number = run.expert_named(name)
        assert number is not None
        spec = run.of_expert(number)
        kept = kept_corpus(home.cache_dir, spec.data.manifest or "")
        if kept is None:
            raise ExportFailed(
                f"--as-moe: the held-out text of {name} is not in {home.cache_dir}, so that nothing"
                " can be measured; run it where a peer has it, such as the founder's machine"
            )
        blocks = spec.data.validation_blocks
        corpus = open_corpus(kept.folder, spec.model.context_length, blocks)
        blocks_BT = corpus.validation_blocks(min(MERGE_BLOCKS, blocks))
        if len(blocks_BT) < 2:
            raise ExportFailed(f"--as-moe needs two held-out blocks of {name}, and there is one")
        yield Domain(name, blocks_BT[1::2], blocks_BT[::2])


def _told(rows: dict[str, list[float]], domains: int) -> tuple[str, float, float]:
    """Print losses; the best expert, its loss and the mixture's, over all domains.

    The rows are the experts', then the ensemble's and the mixture's.
    """
    means = {name: float(np.mean(losses)) for name, losses in rows.items()}
    *experts, _, mixture = rows
    whole = [(name, [*losses, means[name]]) for name, losses in rows.items()]
    print(*lines_of_table([*experts[:domains], "mean"], whole), sep="\n", flush=True)
    best = min(experts, key=means.__getitem__)
    return best, means[best], means[mixture]
