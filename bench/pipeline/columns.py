"""Full pipelines, as DT-FM arranges them: every microbatch walks one column through all stages.

Idea: stages are arranged by cost (genetic.py); from stage to stage machines are paired by
bottleneck matching, so a column is a pipeline of near machines. There are as many columns as a
relay stage has machines; microbatches are dealt out to them in turn.

`full_pipelines` lets one data peer feed each column (SkipPipe's baseline); `shared_pipelines` lets
all data peers feed all columns: each microbatch goes to the column that would be done with it
first, if it did what it has been given one after another.
"""

from dataclasses import replace

from bench.pipeline.genetic import Stages, groups_of
from bench.pipeline.matching import bottleneck
from protocol.pipeline.planner import even_quotas, hop_prices, round_trip_us
from protocol.pipeline.problem import Problem, RelayNumbers
from protocol.pipeline.simulator import Plan

Column = tuple[int, ...]
"""A data peer, then a machine of each stage."""


def at_full_depth(problem: Problem) -> Problem:
    """The same machines and microbatches, without skipping."""
    return replace(problem, visited=problem.num_stages)


def columns_of(problem: Problem, stages: Stages) -> list[Column]:
    """Pairs from stage to stage, chained."""
    prices = hop_prices(problem)
    groups = groups_of(stages)
    columns: list[Column] = [(machine,) for machine in groups[1]]
    for group in groups[2:]:
        _, chosen = bottleneck([[prices[column[-1]][m] for m in group] for column in columns])
        columns = [(*column, group[c]) for column, c in zip(columns, chosen, strict=True)]
    _, data = bottleneck(
        [[prices[d][column[0]] + prices[column[-1]][d] for d in groups[0]] for column in columns]
    )
    return [(groups[0][d], *column) for column, d in zip(columns, data, strict=True)]


def full_pipelines(problem: Problem, stages: Stages) -> Plan:
    """One data peer for each column."""
    columns = columns_of(problem, stages)
    share, rest = divmod(problem.microbatches, len(columns))
    paths: list[tuple[RelayNumbers, ...]] = [()] * len(stages)
    for place, (origin, *relays) in enumerate(columns):
        paths[origin] = (tuple(relays),) * (share + (place < rest))
    return Plan(stages, tuple(paths))


def shared_pipelines(problem: Problem, stages: Stages) -> Plan:
    """All data peers for all columns."""
    columns, prices = [column[1:] for column in columns_of(problem, stages)], hop_prices(problem)
    given_us = dict.fromkeys(columns, 0)
    paths: dict[int, list[RelayNumbers]] = {}
    quotas = even_quotas(problem, stages)
    for turn in range(max(quotas.values())):
        for origin in (origin for origin, quota in quotas.items() if quota > turn):

            def done_us(column: RelayNumbers, origin: int = origin) -> int:
                return given_us[column] + round_trip_us(problem, prices, (origin, *column))

            chosen = min(columns, key=done_us)
            given_us[chosen] = done_us(chosen)
            paths.setdefault(origin, []).append(chosen)
    return Plan(stages, tuple(tuple(paths.get(m, ())) for m in range(len(stages))))
