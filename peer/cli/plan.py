"""`loco-peer plan`: what machines would do together, before anybody pays for them.

It reads files, asks, and prints; all that it says is computed in protocol/pipeline. Hours and money
come first. Pipelines are planned where they are asked for, by the run spec's [pipeline] or by an
option, or where the model does not fit a machine. Options override the run spec.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from peer.options.config import ConfigError
from protocol.errors import InvalidRunSpec
from protocol.pipeline.pipelines import Estimate, replicas_of
from protocol.pipeline.question import BOUNDARY_CODECS, Question, rules_of, workload_of
from protocol.pipeline.tables import link_matrices, parse_links, parse_peers
from protocol.pipeline.what_if import Answer, RunEstimate, needs_pipeline, verdict_of, what_if
from protocol.run.needs import flops_per_token
from protocol.run.run_spec import RunSpec, parse_toml
from protocol.run.sections import PipelineSection, visited_of

from .plan_first import print_first, print_replicas, verdict_json
from .plan_report import print_answer

MAX_TABLE_BYTES: Final = 8 << 20
BACKWARD_FORWARDS: Final = 2
"""Work of a backward pass, in forwards."""
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
    question, spec = _question(run_toml, peers, links, options), _spec(run_toml)
    asked = spec.pipeline.stages > 1 or replace(options, sequences=None) != PlanOptions()
    wanted = asked or picture is not None or (as_json and len(question.offers) > 1)
    if not (wanted or needs_pipeline(question)):
        _show_replicas(question, spec, as_json=as_json)
        return
    answer = what_if(question)
    if picture is not None:
        from .plan_picture import draw

        draw(answer, picture)
    verdicts = _pipelines(question, spec, answer)
    if asked:
        first = "full" if question.visited == question.stages else "skippipe"
    elif needs_pipeline(question):
        first = "full"
    else:
        first, verdict, _ = _replicas(question, spec)
        verdicts[first] = verdict
    if as_json:
        print(json.dumps({"answer": verdict_json(verdicts[first]), **answer.to_json()}))
        return
    print_first(question, verdicts.pop(first), verdicts)
    print_answer(question, answer)


def _show_replicas(question: Question, spec: RunSpec, *, as_json: bool) -> None:
    _, verdict, estimate = _replicas(question, spec)
    if as_json:
        print(json.dumps({"answer": verdict_json(verdict)}))
    else:
        print_first(question, verdict, {})
        print_replicas(question, estimate)


def _replicas(question: Question, spec: RunSpec) -> tuple[str, RunEstimate, Estimate]:
    """The run by its own way of averaging, with the whole model on each machine."""
    way = "diloco" if spec.sync.method == "diloco" else "noloco"
    estimate = replicas_of(question)[way]
    machines = len(question.offers)
    return way, verdict_of(question, way, estimate, _tokens(spec), machines), estimate


def _pipelines(question: Question, spec: RunSpec, answer: Answer) -> dict[str, RunEstimate]:
    """The run as a full pipeline, and as one that skips stages, where that is another one."""
    pipelines = {"full": answer.full}
    if answer.skippipe is not answer.full:
        pipelines["skippipe"] = answer.skippipe
    verdicts = {}
    for way, each in pipelines.items():
        data_peers = each.planned.plan.stages.count(0)
        verdicts[way] = verdict_of(question, way, each.estimate, _tokens(spec), data_peers)
    return verdicts


def _tokens(spec: RunSpec) -> int:
    """Tokens that a peer with data trains from beginning to end."""
    return spec.training.total_steps * spec.tokens_per_step


def _question(run_toml: Path, peers: Path, links: Path | None, options: PlanOptions) -> Question:
    spec = _spec(run_toml)
    pipeline, workload = spec.pipeline, workload_of(spec, options.sequences)
    codec = pipeline.codec if options.codec is None else options.codec
    if codec not in BOUNDARY_CODECS:
        raise ConfigError(f"unknown codec '{codec}': use {', '.join(BOUNDARY_CODECS)}")
    forward = workload.tokens * flops_per_token(spec) / (1 + BACKWARD_FORWARDS)
    offers = parse_peers(_text(peers), peers.name, forward)
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
