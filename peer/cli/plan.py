"""`loco-peer plan`: what machines would do together, before anybody pays for them.

It reads files, asks `what_if`, and prints; all that it says is computed in protocol/pipeline. What
stands in the run spec's [pipeline] counts, options override it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peer.options.config import ConfigError
from protocol.errors import InvalidRunSpec
from protocol.pipeline.question import Question, rules_of
from protocol.pipeline.tables import link_matrices, parse_links, parse_peers
from protocol.pipeline.what_if import what_if
from protocol.pipeline.workload import BOUNDARY_CODECS, workload_of
from protocol.run.pipeline_section import PipelineSection, visited_of
from protocol.run.run_spec import RunSpec, parse_toml

from .plan_report import print_answer

MAX_TABLE_BYTES: Final = 8 << 20
USUAL_STAGES: Final = 4
"""Stages that are planned for where the run spec has no pipeline."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the command line says in place of the run spec; None leaves it to that."""

    stages: int | None = None
    visited: int | None = None
    full_every: int | None = None
    microbatches: int | None = None
    sequences: int | None = None
    codec: str | None = None


def show_plan(
    run_toml: Path,
    peers: Path,
    links: Path | None,
    options: PlanOptions,
    *,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Plan for these machines, and print what comes out.

    Raises:
        LocoError: a file cannot be used, or the machines cannot form the pipeline.
    """
    if picture is not None:
        from .plan_picture import check_picture

        check_picture(picture)  # planning takes a while, so what cannot be drawn is said before
    question = _question(run_toml, peers, links, options)
    answer = what_if(question)
    if picture is not None:
        from .plan_picture import draw

        draw(answer, picture)
    if as_json:
        print(json.dumps(answer.to_json()))
    else:
        print_answer(question, answer)


def _question(run_toml: Path, peers: Path, links: Path | None, options: PlanOptions) -> Question:
    spec = _spec(run_toml)
    pipeline, workload = spec.pipeline, workload_of(spec, options.sequences)
    codec = pipeline.codec if options.codec is None else options.codec
    if codec not in BOUNDARY_CODECS:
        raise ConfigError(f"unknown codec '{codec}': use {', '.join(BOUNDARY_CODECS)}")
    offers = parse_peers(_text(peers), peers.name)
    lines = parse_links(_text(links), offers, links.name) if links else {}
    stages = options.stages
    if stages is None:
        usual = max(2, min(USUAL_STAGES, len(offers), workload.num_layers))
        stages = pipeline.stages if pipeline.stages > 1 else usual
    return Question(
        offers,
        *link_matrices(offers, lines),
        workload,
        stages,
        _visited(pipeline, stages) if options.visited is None else options.visited,
        options.microbatches,
        codec,
        rules_of(pipeline),
        pipeline.full_every if options.full_every is None else options.full_every,
    )


def _visited(pipeline: PipelineSection, stages: int) -> int:
    """Those of the run spec, where its stages are the ones that are planned for."""
    return pipeline.num_visited if stages == pipeline.stages else max(2, visited_of(stages))


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
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path} line {line}: not UTF-8 text; save it as UTF-8") from error


def _spec(path: Path) -> RunSpec:
    text = _text(path)
    try:
        return parse_toml(text)
    except InvalidRunSpec as error:
        raise InvalidRunSpec(f"{path}: {error}") from error
