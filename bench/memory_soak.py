"""Does a peer grow over thousands of rounds, half of them failing?

Two processes with a p2pd each run the daemon's own gossip, exchange and outer step on small vectors
(soak_peer.py), round after round. Every second round fails, in the partner's three ways in turn.
After WARM_UP_ROUNDS, when caches and the allocator have what they need, the process that nobody
kills is measured, and again at the end, after a collection of garbage each time:

    own memory   USS: pages that no other process maps
    p2pd         RSS; its Go runtime gives memory back when it likes
    objects      that Python's collector knows: a leak of ours shows here first
"""

import tempfile
from collections import Counter
from typing import Final

import trio

from .children import Answer, Child, start_child
from .report import Goal, Report

MB: Final = 1e6
WARM_UP_ROUNDS: Final = 1000
MOST_GROWTH_BYTES: Final = 2 * MB
SPOILS: Final = ("breaks", "refuses", "lies")
SAMPLES: Final = 5


def spoils(round_: int) -> str | None:
    """How the partner spoils a round; None if it does not."""
    return SPOILS[round_ // 2 % len(SPOILS)] if round_ % 2 else None


async def soak(report: Report, rounds: int) -> None:
    """Measure `rounds` rounds after the warm-up."""
    with tempfile.TemporaryDirectory(prefix="loco") as folder:
        async with (
            start_child("bench.soak_peer", folder, "healthy") as healthy,
            start_child("bench.soak_peer", folder, "spoiler") as spoiler,
        ):
            pair = _Pair(healthy, spoiler)
            await pair.connect()
            await pair.run_rounds(WARM_UP_ROUNDS)
            await healthy.ask("memory")  # to look takes memory too
            first = last = await healthy.ask("memory")
            pair.outcomes.clear()
            report.rows.append(_row(0, first, first))
            for sample in range(1, SAMPLES + 1):
                await pair.run_rounds(rounds // SAMPLES)
                last = await healthy.ask("memory")
                report.rows.append(_row(sample * (rounds // SAMPLES), first, last))
    averaged = pair.outcomes["averaged"] / pair.outcomes.total()
    grown_bytes = last["uss_bytes"] - first["uss_bytes"]
    what = f"MB that a peer grows by over {rounds} rounds"
    report.goals.append(Goal(what, grown_bytes / MB, at_most=MOST_GROWTH_BYTES / MB))
    report.goals.append(
        Goal("share of those rounds that averaged", averaged, at_least=0.4, at_most=0.6)
    )
    report.notes.append(f"how the rounds ended: {dict(pair.outcomes.most_common())}")


class _Pair:
    """Two children, round after round."""

    def __init__(self, healthy: Child, spoiler: Child) -> None:
        self._healthy = healthy
        self._spoiler = spoiler
        self._peer_ids = ("", "")
        self._round = 0
        self.outcomes: Counter[str] = Counter()

    async def connect(self) -> None:
        theirs = await self._spoiler.ask("hello")
        await self._healthy.ask("connect", **theirs)
        self._peer_ids = ((await self._healthy.ask("hello"))["peer_id"], theirs["peer_id"])

    async def run_rounds(self, count: int) -> None:
        for _ in range(count):
            await self._run_round(self._round, spoils(self._round))
            self._round += 1

    async def _run_round(self, round_: int, how: str | None) -> None:
        healthy_id, spoiler_id = self._peer_ids
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                _ask_round,
                self._spoiler,
                {"round": round_, "peer_id": healthy_id, "spoils": how},
            )
            answer = await self._healthy.ask(
                "round", round=round_, peer_id=spoiler_id, refused=how == "refuses"
            )
        self.outcomes[answer["outcome"]] += 1


async def _ask_round(child: Child, details: Answer) -> None:
    await child.ask("round", **details)


def _row(rounds: int, first: Answer, now: Answer) -> dict[str, float | int]:
    grown = {name: now[name] - first[name] for name in first}
    return {
        "rounds": rounds,
        "own memory MB": now["uss_bytes"] / MB,
        "grown MB": grown["uss_bytes"] / MB,
        "RSS grown MB": grown["rss_bytes"] / MB,
        "p2pd MB": now["p2pd_rss_bytes"] / MB,
        "p2pd grown MB": grown["p2pd_rss_bytes"] / MB,
        "objects grown": grown["objects"],
    }
