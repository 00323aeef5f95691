"""The latency claims of NoLoCo: the paper's model, plain counting, and the real exchange beside it.

Four tables (the models are in latency_model.py):

  figure 5A   E[tree all-reduce] over E[pair], by peers and dispersion of message times
  figure 5B   waiting for all over waiting in pairs, by peers and inner steps
  counting    seconds of a pair, a ring, a tree and halving-doubling, by size of model and link
  exchange    the project's own gossip and exchange code, all peers of a swarm at once, on the
              simulated network in virtual time: seconds from the first proposal to the last
              receipt, and the part of the peers that found a partner

Goals: figures within 15% of the values computed independently before (EXPECTED).

    python -m bench.latency [--full] [--json FILE]
"""

import statistics
from typing import Any, Final

import numpy as np

from bench.latency_model import Transfer, blocking_overhead, pair_time, tree_time
from bench.report import Goal, Report, options
from bench.simulated_gossip import average_all
from peer.codec import get_codec

TOLERANCE: Final = 0.15
FIGURE_5A_DRAWS: Final = 400_000
"""Message times drawn for one value."""
TREE_OVER_PAIR: Final = {
    0.0: {4: 2.0, 16: 4.0, 64: 6.0, 256: 8.0, 1024: 10.0},
    0.5: {4: 2.1, 16: 4.5, 64: 7.1, 256: 9.7, 1024: 12.4},
    1.0: {4: 2.2, 16: 5.2, 64: 8.7, 256: 12.6, 1024: 16.9},
    1.5: {4: 2.3, 16: 5.9, 64: 10.5, 256: 16.2, 1024: 23.6},
    2.0: {4: 2.4, 16: 6.4, 64: 12.2, 256: 20.5, 1024: 31.5},
    2.5: {4: 2.5, 16: 6.8, 64: 13.7, 256: 24.3, 1024: 38.9},
}
"""Figure 5A, computed independently: cv to peers to ratio."""
BLOCKING: Final = {
    16: {5: 1.283, 10: 1.219, 25: 1.133, 50: 1.100, 100: 1.069},
    64: {5: 1.526, 10: 1.380, 25: 1.234, 50: 1.160, 100: 1.112},
    256: {5: 1.796, 10: 1.543, 25: 1.332, 50: 1.219, 100: 1.150},
    1024: {5: 2.068, 10: 1.757, 25: 1.428, 50: 1.289, 100: 1.195},
}
"""Figure 5B, computed independently: peers to inner steps to ratio."""
MODELS: Final = {"1.05M": 1.05e6, "10.5M": 10.5e6, "125M": 125e6, "1B": 1e9}
LINKS: Final = {"100 Mbit/s, 50 ms": (12.5e6, 0.05), "1 Gbit/s, 10 ms": (125e6, 0.01)}
COUNTED_PEERS: Final = (8, 16, 64, 256, 1024)
SWARMS: Final = (4, 16, 64, 256)
FULL_SWARMS: Final = (4, 16, 64, 256, 1024)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    swarms = FULL_SWARMS if arguments.full else SWARMS
    parts = [figure_5a(rng), figure_5b(rng), counting(), exchange(swarms, arguments.seed)]
    for part in parts:
        folder = arguments.json
        part.publish(folder and folder.with_stem(f"{folder.stem}-{part.settings['part']}"))


def figure_5a(rng: np.random.Generator) -> Report:
    found = Report("latency", "Figure 5A: tree all-reduce over pair", {"part": "5a"})
    for cv, expected in TREE_OVER_PAIR.items():
        ratios = {
            peers: tree_time(rng, peers, cv, FIGURE_5A_DRAWS // peers) / pair_time(cv)
            for peers in expected
        }
        found.rows.append({"cv": cv} | {f"n={peers}": ratio for peers, ratio in ratios.items()})
        found.goals.append(_within(f"figure 5A, cv {cv}", ratios, expected))
    return found


def figure_5b(rng: np.random.Generator) -> Report:
    found = Report("latency", "Figure 5B: waiting for all over waiting in pairs", {"part": "5b"})
    for peers, expected in BLOCKING.items():
        ratios = {steps: blocking_overhead(rng, peers, steps) for steps in expected}
        found.rows.append({"peers": peers} | {f"m={steps}": r for steps, r in ratios.items()})
        found.goals.append(_within(f"figure 5B, {peers} peers", ratios, expected))
    return found


def _within(what: str, found: dict[int, float], expected: dict[int, float]) -> Goal:
    worst = max(abs(found[key] / expected[key] - 1) for key in expected)
    return Goal(f"{what}: largest deviation", worst, at_most=TOLERANCE)


def counting() -> Report:
    """Seconds and bytes by plain counting."""
    found = Report("latency", "Seconds of one average, int8, counted", {"part": "counted"})
    code_bytes_per_value = get_codec("int8").code_bytes(128) / 128
    for model, parameters in MODELS.items():
        for link, (bytes_per_s, latency_s) in LINKS.items():
            for peers in COUNTED_PEERS:
                size = parameters * code_bytes_per_value
                found.rows.append(
                    _counted(Transfer(peers, size, latency_s, bytes_per_s), model, link)
                )
    return found


def _counted(transfer: Transfer, model: str, link: str) -> dict[str, Any]:
    pair_s = transfer.pair_s()
    rivals = {
        "ring": transfer.ring_s(),
        "tree": transfer.tree_s(),
        "halving": transfer.halving_doubling_s(),
    }
    row = {"model": model, "link": link, "n": transfer.peers, "pair s": pair_s}
    return row | {f"{name} / pair": seconds / pair_s for name, seconds in rivals.items()}


def exchange(swarms: tuple[int, ...], seed: int) -> Report:
    """The real code: nearest to the model is the smallest model, 100 Mbit/s, 50 ms."""
    bytes_per_s, latency_s = LINKS["100 Mbit/s, 50 ms"]
    title = "The project's exchange on the simulated network (100 Mbit/s, 50 ms, 1.05M parameters)"
    found = Report("latency", title, {"part": "exchange", "seed": seed})
    for peers in swarms:
        seen = average_all(peers, seed, latency_s=latency_s, bytes_per_s=bytes_per_s)
        counted = Transfer(peers, seen.payload_bytes, latency_s, bytes_per_s)
        exchange_s = statistics.median(seen.exchange_s)
        found.rows.append(
            {
                "n": peers,
                "matched": len(seen.exchange_s) / peers,
                "match s": statistics.median(seen.match_s),
                "exchange s": exchange_s,
                "slowest s": max(seen.exchange_s),
                "pair s": counted.pair_s(),
                "tree / exchange": counted.tree_s() / exchange_s,
                "halving / exchange": counted.halving_doubling_s() / exchange_s,
            }
        )
    return found


if __name__ == "__main__":
    main()
