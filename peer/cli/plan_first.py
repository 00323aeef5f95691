"""The first lines of `loco-peer plan`: how long, for what money, which way, known how."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protocol.names import size_text
from protocol.pipeline.pipelines import SECONDS_PER_HOUR, Estimate
from protocol.pipeline.question import Question
from protocol.pipeline.tables import HOW
from protocol.pipeline.what_if import RunEstimate, too_small_for_the_whole

WAYS: Final = {
    "noloco": "replicas that average in pairs",
    "diloco": "replicas that average fragments among all",
    "full": "a full pipeline",
    "skippipe": "a pipeline that skips stages",
}
HOURS_PER_DAY: Final = 24
MOST_NAMED: Final = 8
SMALL_PARAMETERS: Final = 100_000_000
"""Below this a step is mostly waiting for small pieces of work, on any card."""


def print_first(
    question: Question, verdict: RunEstimate, others: Mapping[str, RunEstimate]
) -> None:
    """Print the verdict, and what it rests on."""
    console = Console()
    lines = _lines(question, verdict, others)
    console.print(*lines, sep="\n", soft_wrap=True, markup=False, highlight=False)


def print_replicas(question: Question, estimate: Estimate) -> None:
    """Print what each machine does, where no pipeline was planned."""
    console = Console()
    console.print(_machines(question, estimate))
    console.print(
        "No pipeline was planned, because the model fits; --stages N plans one.", soft_wrap=True
    )


def verdict_json(verdict: RunEstimate) -> dict[str, Any]:
    """Plain values."""
    return {
        "way": verdict.way,
        "hours": verdict.hours,
        "cost": verdict.cost,
        "tokens": verdict.tokens,
        "tokens_per_s": verdict.tokens_per_s,
    }


def _lines(
    question: Question, verdict: RunEstimate, others: Mapping[str, RunEstimate]
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
    yield from _of_memory(question)
    if estimated := [offer for offer in question.offers if offer.card]:
        names = _named([f"{offer.name} ({offer.card})" for offer in estimated])
        yield f"Speed of {names}: {HOW}. `loco-peer measure` on one tells."
        if question.workload.parameters < SMALL_PARAMETERS:
            yield "A model this small keeps no card busy: it takes longer, maybe many times."


def _of_memory(question: Question) -> Iterator[str]:
    whole = size_text(question.workload.state_bytes)
    if small := too_small_for_the_whole(question):
        names = _named([offer.name for offer in small])
        yield f"The whole model's training state takes {whole}, too much for {names}."
    if unknown := [offer.name for offer in question.offers if offer.memory_bytes is None]:
        yield (
            f"Whether {whole} of training state fit is not known of {_named(unknown)}:"
            " no memory_gb."
        )


def _machines(question: Question, estimate: Estimate) -> Table:
    table = Table("peer", "location", "speed by", "tokens/s", "busy", "MB/h sent", "dollars/h")
    workload = question.workload
    for offer in question.offers:
        alone = workload.tokens / (3 * offer.compute_us / 1e6)
        busy = estimate.utilisation[offer.name]
        table.add_row(
            escape(offer.name),
            escape(offer.location),
            escape(offer.card or "compute_s"),
            f"{alone * busy:,.0f}",
            f"{busy:.0%}",
            f"{estimate.bytes_per_hour[offer.name] / 1e6:,.0f}",
            f"{offer.price_per_hour:,.2f}",
        )
    return table


def _way(question: Question, way: str) -> str:
    if len(question.offers) == 1:
        return "one that trains alone"
    if way == "full":
        return f"{WAYS[way]} of {question.stages} stages"
    if way == "skippipe":
        return f"{WAYS[way]} ({question.visited} of {question.stages} visited)"
    return WAYS[way]


def _time(hours: float) -> str:
    shown = f"{hours:,.1f} hours" if hours >= 1 else f"{hours * SECONDS_PER_HOUR / 60:,.0f} minutes"
    return f"{shown} ({hours / HOURS_PER_DAY:,.1f} days)" if hours >= 2 * HOURS_PER_DAY else shown


def _tokens(number: int) -> str:
    return f"{number / 1e9:,.1f} billion" if number >= 1e9 else f"{number / 1e6:,.1f} million"


def _named(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
