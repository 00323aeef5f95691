"""SkipPipe's published schedules, as problems and plans of ours.

Source of the figures: schedule.json of gensyn-ai/skippipe (MIT), whose 20 machines stand at these
places; the links follow from the table of regions (2 samples of 16,777,324 bytes, 0.35 s of
copies). NL to London is here as slow as it was there.
"""

from collections.abc import Sequence
from typing import Final

from protocol.pipeline.problem import Matrix, PipelinePeer, Problem, RelayNumbers, StageWork
from protocol.pipeline.simulator import Plan
from protocol.pipeline.tables import SAME_PLACE, line_between

TWICE: Final = ("Belgium", "Canada", "Germany", "Iowa", "Japan", "LA", "NL", "Oregon")
PLACES: Final = (*TWICE, "Singapore", "Taiwan", "London", "Australia", *TWICE)
PARTITIONS: Final = (
    (0, 3, 4, 10, 11), (15, 8, 14), (1, 9, 6), (16, 12, 13), (5, 18, 7), (17, 2, 19)
)  # fmt: skip
FORWARD_US: Final = 440_000
SLOTS: Final = 3
WAVES: Final = 2
MICROBATCHES: Final = 30
FULL_PER_PIPELINE: Final = 9
WORK: Final = StageWork(
    boundary_bytes=2 * 16_777_324, hop_us=350_000, gap_us=130_000, origin_gap_us=90_000
)  # fmt: skip
SLOW_PAIR: Final = {"NL", "London"}
SLOW_BYTES_PER_S: Final = round(0.00023681640625 * (1 << 30))

PUBLISHED_S: Final = {
    "full": 79.93971963540922,
    "blind": 48.915682705668054,
    "no_collisions": 35.43481420147051,
    "skippipe": 33.31379002209655,
}
Rows = tuple[tuple[int, tuple[RelayNumbers, ...]], ...]
"""Data peers, and the path of each of their slots (or one for all)."""
SKIPPIPE: Final[Rows] = (
    (0, ((14, 6, 12),)),
    (3, ((15, 17, 5),)),
    (4, ((7, 13, 19),)),
    (10, ((1, 18, 2),)),
    (11, ((8, 16, 9),)),
)
NO_COLLISIONS: Final[Rows] = (
    (0, ((12, 5, 19), (1, 19, 18), (6, 18, 17))),
    (3, ((12, 6, 2), (14, 12, 2), (6, 14, 13))),
    (4, ((15, 13, 7), (15, 5, 17), (15, 13, 7))),
    (10, ((1, 17, 5), (1, 7, 2), (14, 18, 19))),
    (11, ((8, 16, 9), (8, 16, 9), (8, 16, 9))),
)
BLIND: Final[Rows] = (
    (0, ((12, 7, 17), (14, 16, 9), (1, 8, 19))),
    (3, ((12, 7, 17), (15, 6, 5), (1, 8, 19))),
    (4, ((13, 18, 2), (15, 6, 5), (1, 8, 19))),
    (10, ((13, 18, 2), (15, 6, 5), (14, 16, 9))),
    (11, ((13, 18, 2), (12, 7, 17), (14, 16, 9))),
)


def links_between(places: Sequence[str]) -> tuple[Matrix, Matrix]:
    """Latencies and rates by the table of regions."""
    lines = [[line_between(a, b) or SAME_PLACE for b in places] for a in places]
    latencies = tuple(tuple(line.latency_us for line in row) for row in lines)
    return latencies, tuple(tuple(line.bytes_per_s for line in row) for row in lines)


def published_problem(
    visited: int = 4,
    places: Sequence[str] = PLACES,
    sizes: tuple[int, ...] = (5, 3, 3, 3, 3, 3),
    microbatches: int = MICROBATCHES,
) -> Problem:
    """The setting of the published times, or other machines and stages at its prices."""
    latencies, table = links_between(places)
    rates = tuple(
        tuple(
            SLOW_BYTES_PER_S if {a, b} == SLOW_PAIR else table[i][j] for j, b in enumerate(places)
        )
        for i, a in enumerate(places)
    )
    peers = tuple(
        PipelinePeer(f"{place}-{number}", FORWARD_US, SLOTS) for number, place in enumerate(places)
    )
    return Problem(peers, latencies, rates, WORK, sizes, visited, microbatches)


def published_plan(rows: Rows) -> Plan:
    """The plan that a published schedule is: every wave repeats the paths of the first."""
    paths: list[tuple[RelayNumbers, ...]] = [()] * len(PLACES)
    for origin, tracks in rows:
        paths[origin] = tracks * (SLOTS // len(tracks)) * WAVES
    return Plan(_stages(), tuple(paths))


def published_pipelines() -> Plan:
    """The full pipelines: three columns of the partitions, nine microbatches each."""
    paths: list[tuple[RelayNumbers, ...]] = [()] * len(PLACES)
    for origin, *relays in zip(*PARTITIONS, strict=False):
        paths[origin] = (tuple(relays),) * FULL_PER_PIPELINE
    return Plan(_stages(), tuple(paths))


def _stages() -> tuple[int, ...]:
    stages = [0] * len(PLACES)
    for stage, members in enumerate(PARTITIONS):
        for member in members:
            stages[member] = stage
    return tuple(stages)
