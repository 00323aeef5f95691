"""Gossip without a clock over unequal lines: how much is averaged, between whom, how late.

Real matchmaking, rounds and patience in virtual time (gossip_world.py), 24 and 6 peers, an exchange
of 0.1 to 2 rounds. Four kinds of world:

  unequal    speeds, rates and delays differ, rounds scatter by 25%, peers 0 and 1 share an uplink
  steady     the same, but rounds do not scatter: do the same two always end together?
  equal      equal speeds and lines, rounds scatter, no shared uplink
  clockwork  the same, but rounds do not scatter

The columns: `exchanged`, completed exchanges * H / nominal steps, the mean of the peers that are
not behind the shared uplink; `least`, the lowest of these; `uplink`, the mean of the two behind it,
whom their line holds up; `busy`, the share of all time in an exchange; `wait`, for a partner, in
rounds; `skipped`, rounds without a partner; `repeats`, exchanges with the partner of the exchange
before (1 / (peers - 1) if partners were drawn evenly); `cv`, `chi2`, `fewest`, `most`, how evenly
pairs met (gossip/measures.py); `age`, of an average at its merge, in rounds; `apart`, the distance
of the two snapshots, in rounds, of 99%; `pace`, nominal steps over the steps that training was
worth by the quotas: 1 if the schedule runs neither ahead of the training nor behind it.

The trainers' speed beside their speed alone is 1 by construction: gossip_daemons.py looks at that.

Goals (unequal): `exchanged` at least 0.95 up to 0.7 with 24 peers, 0.90 with six; from 1.5 on
`busy` at least 0.9; `pace` within 5% of 1. Steady: `repeats` at most 0.1 with 24 peers, 0.5 with 6.

    python -m bench.gossip_links [--full] [--json FILE]
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bench.gossip.measures import pair_figures, quantile
from bench.gossip.world import ROUND_S, World, world_of
from bench.gossip_world import GossipWorld
from bench.report import Goal, Report, Row, options

PEERS: Final = (24, 6)
RATIOS: Final = (0.1, 0.25, 0.5, 0.7, 1.0, 1.5, 2.0)
KINDS: Final[Mapping[str, dict[str, Any]]] = {
    "unequal": {},
    "steady": {"scatter": 0.0},
    "equal": {"equal": True},
    "clockwork": {"equal": True, "scatter": 0.0},
}
ROUNDS: Final = {24: 80, 6: 200}
SEEDS: Final = {24: 2, 6: 4}
FULL_TIMES: Final = 4
"""So many times as many seeds."""
EXCHANGED: Final = {24: 0.95, 6: 0.90}
REPEATS: Final = {24: 0.1, 6: 0.5}
DIGITS: Final = 3
THICK: Final = 0.7
THIN: Final = 1.5
BUSY: Final = 0.9
PACE: Final = 0.05


def main() -> None:
    arguments = options(__doc__).parse_args()
    report = Report("gossip_links", "Gossip without a clock, real decisions, virtual time")
    for num_peers in PEERS:
        seeds = range(SEEDS[num_peers] * (FULL_TIMES if arguments.full else 1))
        report.settings[f"{num_peers} peers"] = {"rounds": ROUNDS[num_peers], "seeds": len(seeds)}
        for kind in KINDS:
            for ratio in RATIOS:
                runs = [one_run(kind, num_peers, ratio, seed) for seed in seeds]
                report.rows.append(
                    {"world": kind, "peers": num_peers, "ratio": ratio} | means(runs)
                )
    report.goals = goals(report.rows)
    report.publish(arguments.json)


def one_run(kind: str, num_peers: int, ratio: float, seed: int) -> dict[str, float]:
    """The figures of one world."""
    world = world_of(num_peers, ratio, seed, **KINDS[kind])
    run = GossipWorld(world, seed)
    run.run(ROUNDS[num_peers] * ROUND_S)
    return figures(world, run)


def figures(world: World, run: GossipWorld) -> dict[str, float]:
    """See the top of the file."""
    inner_steps = world.inner_steps
    shares = [each.averaged * inner_steps / each.nominal for each in run.records]
    usual = [share for place, share in enumerate(shares) if place not in world.uplinks]
    averaged = max(1, sum(each.averaged for each in run.records))
    worth = sum(
        each.own_steps * inner_steps / world.owed(place) for place, each in enumerate(run.records)
    )
    pairs = pair_figures(
        ((one.peer, other.peer) for one, other in (each.sides for each in run.exchanges)),
        world.num_peers,
    )
    ages = [side.age / inner_steps for each in run.exchanges for side in each.sides]
    apart = [abs(each.sides[0].step - each.sides[1].step) / inner_steps for each in run.exchanges]
    return {
        "exchanged": statistics.fmean(usual),
        "least": min(usual),
        "uplink": statistics.fmean(shares[place] for place in world.uplinks or range(len(shares))),
        "busy": statistics.fmean(each.exchanged_s for each in run.records) / run.now_s,
        "wait": sum(each.searched_s for each in run.records) / averaged / ROUND_S,
        "skipped": sum(sum(each.skipped.values()) for each in run.records),
        "repeats": pairs.repeats,
        "cv": pairs.cv,
        "chi2": pairs.chi_squared,
        "fewest": pairs.least,
        "most": pairs.most,
        "age": statistics.fmean(ages),
        "age 99%": quantile(ages, 0.99),
        "apart": quantile(apart, 0.99),
        "pace": sum(each.nominal for each in run.records) / worth,
    }


def means(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Over seeds; the lowest peer of all of them is the lowest."""
    found = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
    found["least"] = min(run["least"] for run in runs)
    return {key: round(value, DIGITS) for key, value in found.items()}


def goals(rows: Sequence[Row]) -> list[Goal]:
    """See the top of the file."""
    found = []
    for row in rows:
        peers, ratio = row["peers"], row["ratio"]
        what = f"{row['world']}, {peers} peers, exchange of {ratio} rounds"
        if row["world"] == "unequal":
            found.append(Goal(f"{what}: pace", row["pace"], at_least=1 - PACE, at_most=1 + PACE))
            if ratio <= THICK:
                goal = EXCHANGED[peers]
                found.append(Goal(f"{what}: exchanged", row["exchanged"], at_least=goal))
            if ratio >= THIN:
                found.append(Goal(f"{what}: busy", row["busy"], at_least=BUSY))
        elif row["world"] == "steady":
            found.append(Goal(f"{what}: repeats", row["repeats"], at_most=REPEATS[peers]))
    return found


if __name__ == "__main__":
    main()
