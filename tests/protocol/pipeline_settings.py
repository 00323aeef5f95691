"""Settings that the tests of pipelines share: SkipPipe's published schedules, and small ones.

Source of the figures: schedule.json of gensyn-ai/skippipe (MIT), whose 20 machines stand at these
places; the links follow from the table of regions (2 samples of 16,777,324 bytes, 0.35 s of
copies). NL to London is here as slow as it was there.
"""

from dataclasses import replace

from protocol.pipeline.plan import Plan
from protocol.pipeline.problem import Matrix, PathRules, PipelinePeer, Problem, Work
from protocol.pipeline.regions import line_between

TWICE = ["Belgium", "Canada", "Germany", "Iowa", "Japan", "LA", "NL", "Oregon"]
PLACES = [*TWICE, "Singapore", "Taiwan", "London", "Australia", *TWICE]
PARTITIONS = ((0, 3, 4, 10, 11), (15, 8, 14), (1, 9, 6), (16, 12, 13), (5, 18, 7), (17, 2, 19))
FORWARD_US = 440_000
WORK = Work(
    boundary_bytes=2 * 16_777_324, hop_us=350_000, gap_us=130_000, origin_gap_us=90_000
)  # fmt: skip
SLOW_BYTES_PER_S = round(0.00023681640625 * (1 << 30))

PUBLISHED_S = {"full": 79.93971963540922, "blind": 48.915682705668054}
PUBLISHED_S |= {"no_collisions": 35.43481420147051, "skippipe": 33.31379002209655}
SKIPPIPE = (
    ((0, (14, 6, 12)), (3, (15, 17, 5)), (4, (7, 13, 19)), (10, (1, 18, 2)), (11, (8, 16, 9)))
)  # fmt: skip
NO_COLLISIONS = (
    (0, (12, 5, 19), (1, 19, 18), (6, 18, 17)),
    (3, (12, 6, 2), (14, 12, 2), (6, 14, 13)),
    (4, (15, 13, 7), (15, 5, 17), (15, 13, 7)),
    (10, (1, 17, 5), (1, 7, 2), (14, 18, 19)),
    (11, (8, 16, 9), (8, 16, 9), (8, 16, 9)),
)
BLIND = (
    (0, (12, 7, 17), (14, 16, 9), (1, 8, 19)),
    (3, (12, 7, 17), (15, 6, 5), (1, 8, 19)),
    (4, (13, 18, 2), (15, 6, 5), (1, 8, 19)),
    (10, (13, 18, 2), (15, 6, 5), (14, 16, 9)),
    (11, (13, 18, 2), (12, 7, 17), (14, 16, 9)),
)
WAVES = 2
RULES = PathRules()
WORK_OF_SMALL = Work(boundary_bytes=1000)
SLOTS = 3


def links_between(places: list[str]) -> tuple[Matrix, Matrix]:
    """Latencies and rates by the table of regions."""
    lines = [[line_between(a, b) for b in places] for a in places]
    latencies = tuple(tuple(line.latency_us for line in row) for row in lines)
    return latencies, tuple(tuple(line.bytes_per_s for line in row) for row in lines)


def published_problem(
    visited: int = 4, places: list[str] = PLACES, sizes=(5, 3, 3, 3, 3, 3), **changes
) -> Problem:
    """The setting of the four published times."""
    latencies, rates = links_between(places)
    slow = {"NL", "London"}
    rates = tuple(
        tuple(
            SLOW_BYTES_PER_S if {a, places[b]} == slow else rate for b, rate in enumerate(rates[i])
        )
        for i, a in enumerate(places)
    )
    peers = tuple(
        PipelinePeer(f"{place}-{number}", FORWARD_US, SLOTS)
        for number, place in enumerate(places)
    )  # fmt: skip
    problem = Problem(peers, latencies, rates, WORK, sizes, visited, 30)
    return replace(problem, **changes)


def published_plan(rows) -> Plan:
    """The plan that a published schedule is: every wave repeats the paths of the first."""
    stages = [0] * len(PLACES)
    for stage, members in enumerate(PARTITIONS):
        for member in members:
            stages[member] = stage
    paths = [()] * len(PLACES)
    for origin, *tracks in rows:
        wave = tuple(tracks) * (SLOTS // len(tracks))
        paths[origin] = wave * WAVES
    return Plan(tuple(stages), tuple(paths))


def published_pipelines() -> Plan:
    """The full pipelines: three columns of the partitions, nine microbatches each."""
    stages = published_plan(SKIPPIPE).stages
    paths = [()] * len(PLACES)
    for origin, *relays in zip(*PARTITIONS, strict=False):
        paths[origin] = (tuple(relays),) * 9
    return Plan(stages, tuple(paths))


def small_problem(
    sizes=(1, 1, 1),
    visited=3,
    microbatches=1,
    *,
    forward_us=100_000,
    latency_us=10_000,
    slots=2,
    rules=RULES,
    work=WORK_OF_SMALL,
    **changes,
) -> Problem:
    """Equal machines on equal links of 1 MB/s."""
    number = sum(sizes)
    peers = tuple(PipelinePeer(f"p{i}", forward_us, slots) for i in range(number))
    latencies = ((latency_us,) * number,) * number
    rates = ((1_000_000,) * number,) * number
    return Problem(
        peers, latencies, rates, work, tuple(sizes), visited, microbatches, rules, **changes
    )  # fmt: skip
