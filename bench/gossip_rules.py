"""Rules for who averages with whom, weighed in simulation: small, abstract, from a seed.

The rules (bench/gossip):

  same round      only peers that have closed the round of the same number (same_round.py)
  pull, both, once  whoever closes a round asks anybody, free or not, as AD-PSGD (ask_anybody.py)
  free            free with free (free_with_free.py), and that without one of its parts:
  no debt         rounds that lasted too long are not made up for
  no savings      no longer waits for a new partner
  no put-off      whoever was met last is as welcome as others

The columns: `exchanged`, completed averages per round's worth of nominal steps, the mean of the
peers that are not behind the shared uplink; `least`, the lowest of these; `uplink`, the mean of the
two behind it; `busy`, the share of time in an exchange; `sent`, vectors sent per average, those of
exchanges that were given up among them; `repeats`, `cv`, `chi2`, how evenly pairs met
(gossip/measures.py); `age`, of an average at its merge, in rounds.

These peers are all equally fast, know everything at once, and never fail: the study ranks rules.
What the chosen rule does with messages, delays and unequal speeds is measured in gossip_links.py.

    python -m bench.gossip_rules [--full] [--rules free,once] [--json FILE]
"""

import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from bench.gossip.ask_anybody import AskAnybody, Merging
from bench.gossip.free_with_free import FreeWithFree, Parts
from bench.gossip.same_round import SameRound
from bench.gossip.swarm import Setting, Swarm
from bench.report import Report, options


class Rule(Protocol):
    """Decides when rounds close, who exchanges with whom, and who merges what."""

    def start(self) -> None: ...


RULES: Final[Mapping[str, Callable[[Swarm], Rule]]] = {
    "same round": SameRound,
    "pull": partial(AskAnybody, merging=Merging.PULL),
    "both": partial(AskAnybody, merging=Merging.BOTH),
    "once": partial(AskAnybody, merging=Merging.ONCE),
    "free": partial(FreeWithFree, parts=Parts()),
    "no debt": partial(FreeWithFree, parts=Parts(debt=False)),
    "no savings": partial(FreeWithFree, parts=Parts(savings=False)),
    "no put-off": partial(FreeWithFree, parts=Parts(put_off=False)),
}
PEERS: Final = (24, 6)
RATIOS: Final = (0.1, 0.25, 0.5, 0.7, 1.0, 1.5, 2.0)
DIGITS: Final = 3
SEEDS: Final = 2
FULL_SEEDS: Final = 8


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rules", default=",".join(RULES), help="those to try, by name")
    arguments = parser.parse_args()
    names, seeds = arguments.rules.split(","), FULL_SEEDS if arguments.full else SEEDS
    for num_peers in PEERS:
        report = Report("gossip_rules", f"Rules of pairing, {num_peers} peers")
        report.settings = {"peers": num_peers, "seeds": seeds}
        for name in names:
            report.rows += [row(name, num_peers, ratio, seeds) for ratio in RATIOS]
        path = arguments.json
        report.publish(path and path.with_stem(f"{path.stem}-{num_peers}"))


def row(name: str, num_peers: int, ratio: float, seeds: int) -> dict[str, Any]:
    """One rule in one kind of world: means over seeds."""
    runs = [figures(name, Setting(num_peers, ratio, seed)) for seed in range(seeds)]
    means = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
    known = {key: None if math.isnan(mean) else round(mean, DIGITS) for key, mean in means.items()}
    return {"rule": name, "ratio": ratio} | known


def figures(name: str, setting: Setting) -> dict[str, Any]:
    """One rule in one world."""
    swarm = Swarm(setting)
    RULES[name](swarm).start()
    swarm.agenda.run(setting.rounds)
    return swarm.figures()


if __name__ == "__main__":
    main()
