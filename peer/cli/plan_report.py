"""The tables and sentences of `loco-peer plan`."""

from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protocol.pipeline.pipelines import Estimate, Pipeline
from protocol.pipeline.question import Question, effort_for
from protocol.pipeline.tables import GB
from protocol.pipeline.what_if import LEAST_HELP, Answer

MEGA: Final = 1e6
WAYS: Final = {
    "noloco": "replicas, NoLoCo",
    "diloco": "replicas, DiLoCo",
    "full": "full pipeline",
    "skippipe": "SkipPipe",
}
WORKING: Final = {
    "arrival": "as things arrive",
    "1f1b": "backwards first (1F1B)",
    "two_parts": "backward in two parts",
    "both": "both of these",
}


def print_answer(question: Question, answer: Answer) -> None:
    """Print everything that people want to know."""
    console = Console()
    console.print(*_head(question, answer), sep="\n", soft_wrap=True, highlight=False)
    console.print(_ways(answer), _working(answer), _machines(question, answer), sep="\n")
    console.print(
        *_judgement(question, answer), sep="\n", soft_wrap=True, markup=False, highlight=False
    )


def _head(question: Question, answer: Answer) -> Iterator[str]:
    workload, chosen = question.workload, answer.skippipe
    number = chosen.problem.microbatches
    yield (
        f"{workload.parameters / MEGA:,.0f}M parameters, {len(question.offers)} machines;"
        f" an iteration is {number} microbatch{'es' * (number > 1)} of"
        f" {workload.tokens:,} tokens; {question.stages} stages, {question.visited} visited"
    )
    if len(chosen.iterations) > 1:
        usual, whole = chosen.iterations
        seconds = [each.planned.makespan_us / MEGA for each in (whole, usual)]
        yield (
            f"One iteration of {question.full_every} skips nothing and takes {seconds[0]:.2f} s,"
            f" the others {seconds[1]:.2f} s; SkipPipe's figures are the mean"
        )


def _judgement(question: Question, answer: Answer) -> Iterator[str]:
    chosen = answer.skippipe
    if chosen.lower_bound_us is not None:
        yield f"SkipPipe's lower bound: {chosen.lower_bound_us / MEGA:.2f} s per iteration"
    if question.too_small:
        names = ", ".join(offer.name for offer in question.too_small)
        yield f"Too small for a stage ({question.stage_state_bytes / GB:.1f} GB): {names}"
    yield f"Bottleneck: {chosen.bottleneck.sentence}."
    for gain in answer.help.gains:
        yield f"What would help: {gain.change}: {gain.share:+.0%}"
    if not answer.help.gains:
        yield f"What would help: no single change that was tried gains {LEAST_HELP:.0%}"
    if told := effort_for(len(question.offers)).told(len(question.offers)):
        yield f"{told}."
    yield f"Plan: {chosen.planned.plan.digest(chosen.problem)}"


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


def _working(answer: Answer) -> Table:
    """Iterations of the same plans under other rules of work."""
    table = Table("way of working", "full: s", "", "SkipPipe: s", "")
    for way, words in WORKING.items():
        cells = [
            cell
            for times in answer.ways_of_working.values()
            for cell in _beside(times[way], times["arrival"])
        ]
        table.add_row(words, *cells)
    return table


def _beside(seconds: float | None, usual: float | None) -> tuple[str, str]:
    if seconds is None or usual is None:
        return "stuck", ""
    share = f"{seconds / usual - 1:+.0%}"
    return f"{seconds:.2f}", "" if share in {"+0%", "-0%"} else share


def _machines(question: Question, answer: Answer) -> Table:
    table = Table("peer", "location", "full: stage", "busy", "SkipPipe: stage", "busy", "sends")
    for machine, offer in enumerate(question.offers):
        cells = [
            cell
            for pipeline in (answer.full, answer.skippipe)
            for cell in _of_machine(pipeline, machine, offer.name)
        ]
        sends = len(answer.skippipe.planned.plan.paths[machine])
        table.add_row(escape(offer.name), escape(offer.location), *cells, str(sends or ""))
    return table


def _of_machine(pipeline: Pipeline, machine: int, name: str) -> tuple[str, str]:
    stage = pipeline.planned.plan.stages[machine]
    return str(stage), f"{pipeline.estimate.utilisation[name]:.0%}"
