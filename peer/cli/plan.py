"""`loco-peer plan`: what machines would do together, before anybody pays for them.

It reads files, asks `what_if`, and prints; all that it says is computed in protocol/pipeline.
"""

import json
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from peer.options.config import ConfigError
from protocol.errors import InvalidRunSpec
from protocol.pipeline.replicas import Estimate
from protocol.pipeline.tables import link_matrices, parse_links, parse_peers
from protocol.pipeline.what_if import Answer, Pipeline, Question, what_if
from protocol.pipeline.workload import BOUNDARY_CODECS, workload_of
from protocol.run.run_spec import RunSpec, parse_toml

MAX_TABLE_BYTES: Final = 8 << 20
USUAL_STAGES: Final = 4
MEGA: Final = 1e6
WAYS: Final = {
    "noloco": "replicas, NoLoCo",
    "diloco": "replicas, DiLoCo",
    "full": "full pipeline",
    "skippipe": "SkipPipe",
}


def show_plan(
    run_toml: Path,
    peers: Path,
    links: Path | None,
    *,
    stages: int | None,
    visited: int | None,
    microbatches: int | None,
    sequences: int | None,
    codec: str,
    as_json: bool,
) -> None:
    """Plan for these machines, and print what comes out.

    Raises:
        LocoError: a file cannot be used, or the machines cannot form the pipeline.
    """
    if codec not in BOUNDARY_CODECS:
        raise ConfigError(f"unknown codec '{codec}': use {', '.join(BOUNDARY_CODECS)}")
    workload = workload_of(_spec(run_toml), sequences)
    offers = parse_peers(_text(peers), peers.name)
    lines = parse_links(_text(links), offers, links.name) if links else {}
    num_stages = stages
    if num_stages is None:
        num_stages = max(2, min(USUAL_STAGES, len(offers), workload.num_layers))
    question = Question(
        offers,
        *link_matrices(offers, lines),
        workload,
        num_stages,
        max(2, num_stages * 3 // 4) if visited is None else visited,
        microbatches,
        codec,
    )
    answer = what_if(question)
    if as_json:
        print(json.dumps(answer.to_json()))
    else:
        _print(question, answer)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TABLE_BYTES + 1)
        if len(data) > MAX_TABLE_BYTES:
            raise ConfigError(f"{path}: longer than {MAX_TABLE_BYTES} bytes")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error


def _spec(path: Path) -> RunSpec:
    text = _text(path)
    try:
        return parse_toml(text)
    except InvalidRunSpec as error:
        raise InvalidRunSpec(f"{path}: {error}") from error


def _print(question: Question, answer: Answer) -> None:
    console = Console()
    workload, chosen = question.workload, answer.skippipe
    console.print(
        f"{workload.parameters / MEGA:,.0f}M parameters, {len(question.offers)} machines;"
        f" an iteration is {chosen.problem.microbatches} microbatches of"
        f" {workload.tokens:,} tokens; {question.stages} stages, {question.visited} visited",
        soft_wrap=True,
        highlight=False,
    )
    console.print(_ways(answer), _machines(question, answer), sep="\n")
    console.print(
        f"SkipPipe's lower bound: {chosen.lower_bound_us / MEGA:.2f} s per iteration",
        f"Bottleneck: {chosen.bottleneck.sentence}.",
        *(f"What would help: {change}: {share:+.0%}" for change, share in answer.help),
        f"Plan: {chosen.planned.plan.digest(chosen.problem)}",
        sep="\n",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


def _ways(answer: Answer) -> Table:
    table = Table("way", "fits", "iteration s", "tokens/s", "MB/h and peer", "cost/Gtoken")
    for way, estimate in answer.estimates.items():
        sent = estimate.bytes_per_hour.values()
        table.add_row(
            WAYS[way],
            _fits(estimate),
            f"{estimate.iteration_s:.2f}",
            f"{estimate.tokens_per_s:,.0f}",
            f"{sum(sent) / len(sent) / MEGA:,.0f}",
            f"{estimate.cost_per_billion_tokens:,.2f}",
        )
    return table


def _fits(estimate: Estimate) -> str:
    return {True: "yes", False: "no", None: "not said"}[estimate.fits]


def _machines(question: Question, answer: Answer) -> Table:
    table = Table("peer", "location", "full: stage", "busy", "SkipPipe: stage", "busy", "sends")
    for machine, offer in enumerate(question.offers):
        cells = [
            cell
            for pipeline in (answer.full, answer.skippipe)
            for cell in _of_machine(pipeline, machine, offer.name)
        ]
        sends = len(answer.skippipe.planned.plan.paths[machine])
        table.add_row(offer.name, offer.location, *cells, str(sends or ""))
    return table


def _of_machine(pipeline: Pipeline, machine: int, name: str) -> tuple[str, str]:
    stage = pipeline.planned.plan.stages[machine]
    return str(stage), f"{pipeline.estimate.utilisation[name]:.0%}"
