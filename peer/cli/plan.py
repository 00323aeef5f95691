"""`loco-peer plan`: what machines would do together, before anybody pays for them.

All that it says is computed in protocol/pipeline. Hours and money come first. Pipelines are planned
where the run spec's [pipeline] or an option asks for them, or where the model does not fit a
machine. Options override the run spec.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from peer.options.config import ConfigError, read_text, refuse_experts
from peer.process.bottom_line import shown
from protocol.names import LISTED, size_text
from protocol.pipeline.pipelines import Estimate, replicas_of
from protocol.pipeline.question import (
    BOUNDARY_CODECS,
    TRAINING_PER_FORWARD,
    PlanQuestion,
    effort_for,
    rules_of,
    workload_of,
)
from protocol.pipeline.tables import HOW, link_matrices, parse_links, parse_peers
from protocol.pipeline.what_if import (
    LEAST_HELP,
    RunEstimate,
    WhatIfAnswer,
    most_evaluations,
    verdict_of,
    what_if,
)
from protocol.run.needs import flops_per_token
from protocol.run.run_spec import RunSpec
from protocol.run.sections import visited_of
from protocol.schedule.progress import Counting

from .options import PlanOptions, read_spec

MAX_TABLE_BYTES: Final = 8 << 20
USUAL_STAGES: Final = 4
"""Stages that are planned where the run spec has no pipeline."""
SMALL_PARAMETERS: Final = 100_000_000
"""Below this a step mostly waits for small pieces of work, on any card."""
WAYS: Final = {
    "noloco": ("replicas, NoLoCo", "replicas that average in pairs"),
    "diloco": ("replicas, DiLoCo", "replicas that average fragments among all"),
    "full": ("full pipeline", "a full pipeline"),
    "skippipe": ("SkipPipe", "a pipeline that skips stages"),
}
"""Names of the ways in tables, and in sentences."""
WORKING: Final = {
    "arrival": "as things arrive",
    "1f1b": "backwards first (1F1B)",
    "two_parts": "backward in two parts",
    "both": "both of these",
}


def show_plan(run_toml: Path, peers: Path, links: Path | None, options: PlanOptions) -> None:
    """Raises LocoError: a file cannot be used, or the machines cannot form the pipeline."""
    picture, as_json = options.picture, options.as_json
    if picture is not None:
        from .plan_picture import check_picture

        check_picture(picture)  # planning takes a while, so what cannot be drawn is said before
    spec = read_spec(run_toml)
    refuse_experts(spec, "plan")
    question = question_of(spec, peers, links, options)
    unasked = PlanOptions(sequences=options.sequences, picture=picture, as_json=as_json)
    asked = spec.pipeline.stages > 1 or options != unasked
    wanted = asked or picture is not None or (as_json and len(question.offers) > 1)
    way = "diloco" if spec.sync.method == "diloco" else "noloco"
    replicas = replicas_of(question)[way]
    tokens = spec.training.total_steps * spec.tokens_per_step
    verdict = verdict_of(question, way, replicas, tokens, len(question.offers))
    if not (wanted or question.too_small_for_the_whole):
        if as_json:
            print(json.dumps({"answer": asdict(verdict)}))
        else:
            _print(_first(question, verdict, {}))
            Console().print(_of_replicas(question, replicas))
            _print(["No pipeline was planned, because the model fits; --stages N plans one."])
        return
    with shown("planning") as tell:
        most = most_evaluations(question)
        answer = what_if(question, Counting(tell, "", most, "iterations simulated").add)
    if picture is not None:
        from .plan_picture import draw

        draw(answer, picture)
    verdicts = {
        way: verdict_of(question, way, each.estimate, tokens, each.planned.plan.stages.count(0))
        for way, each in (("full", answer.full), ("skippipe", answer.skippipe))
        if way == "full" or each is not answer.full
    }
    if asked and "skippipe" in verdicts:
        verdict = verdicts.pop("skippipe")
    elif asked or question.too_small_for_the_whole:
        verdict = verdicts.pop("full")
    if as_json:
        print(json.dumps({"answer": asdict(verdict), **answer.to_json()}))
        return
    _print(_first(question, verdict, verdicts))
    _print(_head(question, answer))
    Console().print(_ways(answer), _working(answer), _machines(question, answer), sep="\n")
    _print(_judgement(question, answer))


def question_of(
    spec: RunSpec, peers: Path, links: Path | None, options: PlanOptions
) -> PlanQuestion:
    pipeline, workload = spec.pipeline, workload_of(spec, options.sequences)
    codec = pipeline.codec if options.codec is None else options.codec
    if codec not in BOUNDARY_CODECS:
        raise ConfigError(f"unknown codec '{codec}': use {', '.join(BOUNDARY_CODECS)}")
    forward = workload.tokens * flops_per_token(spec) / TRAINING_PER_FORWARD
    offers = parse_peers(read_text(peers, MAX_TABLE_BYTES), peers.name, forward)
    lines = parse_links(read_text(links, MAX_TABLE_BYTES), offers, links.name) if links else {}
    stages, visited = options.stages, options.visited
    if stages is None:
        usual = max(2, min(USUAL_STAGES, len(offers), workload.num_layers))
        stages = pipeline.stages if pipeline.stages > 1 else usual
    if visited is None:  # those of the run spec, where its stages are the ones that are planned for
        own = stages == pipeline.stages
        visited = pipeline.num_visited if own else max(2, visited_of(stages))
    return PlanQuestion(
        offers,
        *link_matrices(offers, lines),
        workload,
        stages,
        visited,
        options.microbatches,
        codec,
        rules_of(pipeline),
        pipeline.full_every if options.full_every is None else options.full_every,
    )


# --- sentences ------------------------------------------------------------------------------------
def _print(lines: Iterator[str] | list[str]) -> None:
    Console().print(*lines, sep="\n", soft_wrap=True, markup=False, highlight=False)


def _first(
    question: PlanQuestion, verdict: RunEstimate, others: Mapping[str, RunEstimate]
) -> Iterator[str]:
    number = len(question.offers)
    yield (
        f"{f'These {number} machines' if number > 1 else 'This machine'}:"
        f" {_time(verdict.hours)}, {verdict.cost:,.2f} dollars, as {_way(question, verdict.way)}."
    )
    yield (
        f"{_tokens(verdict.tokens)} tokens in all, at {verdict.tokens_per_s:,.0f} tokens/s;"
        f" {verdict.cost / verdict.tokens * 1e9:,.2f} dollars for a billion"
    )
    for way, other in others.items():
        costs = "; skipping costs learning" if way == "skippipe" else ""
        yield (
            f"As {_way(question, way)}: {_time(other.hours)}, {other.cost:,.2f} dollars, for"
            f" {_tokens(other.tokens)} tokens{costs}."
        )
    whole = size_text(question.workload.state_bytes)
    if boxes := [offer for offer in question.offers if offer.gpus > 1]:
        names = _named([offer.name for offer in boxes])
        work = question.workload
        each = size_text(work.state_bytes_on(max(o.gpus for o in boxes)))
        yield (
            f"Cards of {names} train as one peer: {each} of training state each at the least, and"
            " exchanges that nothing hides are counted; not measured."
        )
        for box in filter(work.shards_on, boxes):
            yield (
                f"That does not fit a card of {box.name}: each has a part of the weights alone,"
                f" {size_text(work.sharded_bytes_on(box.gpus))}, and computes layers twice."
            )
    if small := question.too_small_for_the_whole:
        names = _named([offer.name for offer in small])
        yield f"The whole model's training state takes {whole}, too much for {names}."
    if unknown := [offer.name for offer in question.offers if offer.memory_bytes is None]:
        yield (
            f"Whether {whole} of training state fit is not known of {_named(unknown)}:"
            " no memory_gb."
        )
    if estimated := [offer for offer in question.offers if offer.card]:
        names = _named([f"{offer.name} ({offer.card})" for offer in estimated])
        yield f"Speed of {names}: {HOW}. `loco-peer measure` on one tells."
        if question.workload.parameters < SMALL_PARAMETERS:
            yield "A model this small keeps no card busy: it takes longer, maybe many times."


def _head(question: PlanQuestion, answer: WhatIfAnswer) -> Iterator[str]:
    workload, chosen = question.workload, answer.skippipe
    number = chosen.problem.microbatches
    yield (
        f"{workload.parameters / 1e6:,.0f}M parameters, {len(question.offers)} machines;"
        f" an iteration is {number} microbatch{'es' * (number > 1)} of"
        f" {workload.tokens:,} tokens; {question.stages} stages, {question.visited} visited"
    )
    if len(chosen.iterations) > 1:
        usual, whole = (each.planned.makespan_us / 1e6 for each in chosen.iterations)
        yield (
            f"One iteration of {question.full_every} skips nothing and takes {whole:.2f} s,"
            f" the others {usual:.2f} s; SkipPipe's figures are the mean"
        )


def _judgement(question: PlanQuestion, answer: WhatIfAnswer) -> Iterator[str]:
    chosen = answer.skippipe
    if chosen.lower_bound_us is not None:
        yield f"SkipPipe's lower bound: {chosen.lower_bound_us / 1e6:.2f} s per iteration"
    if question.too_small:
        names = ", ".join(offer.name for offer in question.too_small)
        yield f"Too small for a stage ({question.stage_state_bytes / 1e9:.1f} GB): {names}"
    yield f"Bottleneck: {chosen.bottleneck.sentence}."
    for gain in answer.help.gains:
        yield f"What would help: {gain.change}: {gain.share:+.0%}"
    if not answer.help.gains:
        yield f"What would help: no single change that was tried gains {LEAST_HELP:.0%}"
    if told := effort_for(len(question.offers)).told(len(question.offers)):
        yield f"{told}."
    yield f"Plan: {chosen.planned.plan.digest(chosen.problem)}"


def _way(question: PlanQuestion, way: str) -> str:
    if len(question.offers) == 1:
        return "one that trains alone"
    visited = f" ({question.visited} of {question.stages} visited)"
    more = {"full": f" of {question.stages} stages", "skippipe": visited}
    return WAYS[way][1] + more.get(way, "")


def _time(hours: float) -> str:
    shown = f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.0f} minutes"
    return f"{shown} ({hours / 24:,.1f} days)" if hours >= 48 else shown


def _tokens(number: int) -> str:
    return f"{number / 1e9:,.1f} billion" if number >= 1e9 else f"{number / 1e6:,.1f} million"


def _named(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


# --- tables ---------------------------------------------------------------------------------------
def _of_replicas(question: PlanQuestion, estimate: Estimate) -> Table:
    table = Table("peer", "location", "speed by", "tokens/s", "busy", "MB/h sent", "dollars/h")
    for offer in question.offers:
        workload = question.workload
        step_tokens = workload.batch_microbatches * workload.tokens
        alone = step_tokens / (workload.step_us(offer) / 1e6)
        busy = estimate.utilisation[offer.name]
        table.add_row(
            escape(offer.name),
            escape(offer.location),
            f"{offer.gpus} x " * (offer.gpus > 1) + escape(offer.card or "compute_s"),
            f"{alone * busy:,.0f}",
            f"{busy:.0%}",
            f"{estimate.bytes_per_hour[offer.name] / 1e6:,.0f}",
            f"{offer.price_per_hour:,.2f}",
        )
    return table


def _ways(answer: WhatIfAnswer) -> Table:
    table = Table("way", "fits", "iteration s", "tokens/s", "MB/h and peer", "cost/Gtoken")
    for way, estimate in answer.estimates.items():
        sent = estimate.bytes_per_hour.values()
        table.add_row(
            WAYS[way][0],
            {True: "yes", False: "no", None: "not said"}[estimate.fits],
            f"{estimate.iteration_s:.2f}",
            f"{estimate.tokens_per_s:,.0f}",
            f"{sum(sent) / len(sent) / 1e6:,.0f}",
            f"{estimate.cost_per_billion_tokens:,.2f}",
        )
    return table


def _working(answer: WhatIfAnswer) -> Table:
    table = Table("way of working", "full: s", "", "SkipPipe: s", "")
    for way, words in WORKING.items():
        cells: list[str] = []
        for times in answer.ways_of_working.values():
            seconds, usual = times[way], times["arrival"]
            if seconds is None or usual is None:
                cells += ["stuck", ""]
            else:
                share = f"{seconds / usual - 1:+.0%}"
                cells += [f"{seconds:.2f}", "" if share in {"+0%", "-0%"} else share]
        table.add_row(words, *cells)
    return table


def _machines(question: PlanQuestion, answer: WhatIfAnswer) -> Table:
    table = Table("peer", "location", "full: stage", "busy", "SkipPipe: stage", "busy", "sends")
    for machine, offer in enumerate(question.offers):
        cells: list[str] = []
        for pipeline in (answer.full, answer.skippipe):
            busy = pipeline.estimate.utilisation[offer.name]
            cells += [str(pipeline.planned.plan.stages[machine]), f"{busy:.0%}"]
        sends = len(answer.skippipe.planned.plan.paths[machine])
        table.add_row(escape(offer.name), escape(offer.location), *cells, str(sends or ""))
    return table
