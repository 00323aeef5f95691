"""Averaging in pairs over unequal links: real daemons, real p2pd, some minutes.

Six daemons (`loco-peer start` and `join`, NoLoCo, overlap) on six hosts behind the router
(bench/router), their links drawn by a seed: 4 to 140 ms one way, 20 to 300 Mbit/s, and one host
with an uplink of 10 Mbit/s. They share two cores, so that the lengths of their rounds scatter as
those of rented machines do. The founder's host has no thin uplink, since all others join by it.

Settings, by the time that an exchange takes beside a round:

    quarter    about 0.25 of a round; 0.9M parameters, so 0.9 MB travel each way
    most       about 0.7 of a round; 5M parameters

How long a round of H steps takes is up to the machine. So H is chosen for it: a swarm trains and
averages for PROBE_S, and H is what makes its rounds long enough for its exchanges; all that are
compared have the same H. `--inner-steps H` spares the time. What the share really was is told.

The window begins when every peer has averaged twice. Per peer, out of its event log and status
(gossip_report.py): exchanges * H / nominal steps, rounds by outcome, refusals, lengths of rounds
and of exchanges at 10/50/90%, the share of time in exchange, steps per second, also beside those of
its trainer alone when it started (which the others' start disturbs). Peer 0 is the founder, peer 5
the one with the thin uplink.

`--checkout DIR` (may be repeated) runs the daemons of that tree instead, one tree after another in
each setting: before and after a change, in one run on one machine.

Needs root. `python -m bench.gossip_links_real [--full] [--json FILE]`
"""

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import tomlkit

from .gossip_report import (
    PeerFigures,
    Window,
    pair_counts,
    peer_figures,
    together,
    told,
    told_quantiles,
)
from .real_peers import HERE, RealPeer, has_averaged, now_s, real_swarm
from .report import Report, Row, options
from .routed_network import six_links
from .router.network import congestion_control, missing, routed_network

CORES: Final = 2
EXCHANGES_BEFORE: Final = 2
"""Exchanges of each peer before anything is counted."""
SETTLED_S: Final = 240.0
"""Patience until then."""
LOOK_EVERY_S: Final = 5.0
PROBE_S: Final = 45.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One run.

    Attributes:
        share: of a round that an exchange should take.
        inner_steps: H, until a better one is known.
        batch_size: sequences of an inner step.
    """

    name: str
    share: float
    hidden_size: int
    intermediate_size: int
    num_layers: int
    context_length: int
    batch_size: int
    inner_steps: int

    def to_toml(self) -> str:
        """The run spec; it does not end by itself, and validates hardly ever."""
        heads = max(2, self.hidden_size // 64)
        tree = {
            "name": f"links-{self.name}",
            "model": {
                "hidden_size": self.hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_layers": self.num_layers,
                "num_heads": heads,
                "context_length": self.context_length,
            },
            "data": {"validation_blocks": 8},
            "optimizer": {"learning_rate": 1e-3, "schedule": "constant"},
            "training": {"total_steps": 10**6, "batch_size": self.batch_size},
            "sync": {"inner_steps": self.inner_steps, "validate_every": 10**4},
        }
        return tomlkit.dumps(tree)


SETTINGS: Final = {
    each.name: each
    for each in (
        Setting("quarter", 0.25, 128, 384, 4, 128, 2, 12),
        Setting("most", 0.7, 256, 1024, 5, 64, 1, 12),
    )
}


@dataclass(frozen=True, slots=True)
class Found:
    """What came of one swarm.

    Attributes:
        tree: whose daemons, by commit.
        loads: runnable processes of the machine, now and then.
    """

    setting: Setting
    tree: str
    window: Window
    peers: Sequence[PeerFigures]
    loads: Sequence[float]
    router: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        pairs = pair_counts(self.peers)
        return {
            "setting": asdict(self.setting),
            "tree": self.tree,
            "seconds": self.window.seconds,
            "load": statistics.fmean(self.loads),
            "share_of_round": share_of_round(together(self.peers)),
            "peers": [each.to_json() for each in self.peers],
            "all": together(self.peers).to_json(),
            "pairs": {f"{a}-{b}": count for (a, b), count in pairs.items()},
            "router": self.router,
        }


def run_swarm(setting: Setting, checkout: Path, seconds: float) -> Found:
    """Let six daemons train and average for so long, and read what they did."""
    with (
        tempfile.TemporaryDirectory(prefix="loco") as folder,
        routed_network(six_links()) as network,
        real_swarm(network, setting.to_toml(), Path(folder), checkout) as peers,
    ):
        ids = {peer.ready()["peer_id"]: f"{host}" for host, peer in enumerate(peers)}
        for peer in peers:
            peer.wait_until(
                partial(has_averaged, peer, EXCHANGES_BEFORE), "averaged twice", SETTLED_S
            )
        before, begin_s = [_step(peer) for peer in peers], now_s()
        router_before = network.statistics()
        loads = _watch(peers, seconds)
        end_s, after = now_s(), [_step(peer) for peer in peers]
        router = network.statistics()
        window = Window(begin_s, end_s)
        figures = [
            _renamed(
                peer_figures(
                    f"{host}",
                    peer.events(),
                    window,
                    setting.inner_steps,
                    after[host] - before[host],
                ),
                ids,
            )
            for host, peer in enumerate(peers)
        ]
    cost = {
        "core_share": (router.cpu_s - router_before.cpu_s) / window.seconds,
        "late_ms": 1e3
        * (router.late_s - router_before.late_s)
        / max(1, router.packets - router_before.packets),
        "dropped": router.dropped - router_before.dropped,
        "refused": router.refused - router_before.refused,
    }
    return Found(setting, commit_of(checkout), window, figures, loads, cost)


def fitting_inner_steps(found: Found) -> int:
    """H that makes an exchange take the wished share of a round, at the speeds that were seen."""
    everyone = together(found.peers)
    exchange_s = statistics.fmean(everyone.exchange_s)
    return max(2, round(exchange_s / found.setting.share * everyone.steps_per_s))


def rows_of(found: Found) -> list[Row]:
    """A row for each peer, and one for all."""
    label = f"{found.setting.name}, {found.tree}"
    return [_row(label, each) for each in (*found.peers, together(found.peers))]


def _row(label: str, each: PeerFigures) -> Row:
    return {
        "setting": label,
        "peer": each.peer,
        "exchanged": each.exchanged,
        "averaged": each.averaged,
        "exchanges": each.num_exchanges,
        "skipped": told(each.skipped),
        "round s": told_quantiles(each.round_s),
        "exchange s": told_quantiles(each.exchange_s),
        "in exchange": each.exchange_share,
        "steps/s": each.steps_per_s,
        "of alone": each.speed_share,
    }


def note_of(found: Found) -> str:
    """What the table has no room for."""
    everyone, pairs = together(found.peers), pair_counts(found.peers).values()
    return (
        f"{found.setting.name}, {found.tree}: {found.window.seconds:.0f} s of rounds of"
        f" {found.setting.inner_steps} steps; an exchange takes {share_of_round(everyone):.2f} of a"
        f" round; exchanges of a pair {min(pairs)} to {max(pairs)};"
        f" proposals refused: {told(everyone.refused)};"
        f" load {statistics.fmean(found.loads):.1f};"
        f" router: {found.router['core_share']:.2f} of a core,"
        f" {found.router['late_ms']:.2f} ms late, {found.router['dropped']} dropped"
    )


def share_of_round(figures: PeerFigures) -> float:
    """Length of an exchange over that of a round, means."""
    if not figures.exchange_s or not figures.round_s:
        return 0.0
    return statistics.fmean(figures.exchange_s) / statistics.fmean(figures.round_s)


def commit_of(checkout: Path) -> str:
    """Short, with a mark if files were changed since; the folder's name where there is no git."""
    git = shutil.which("git")
    if git is None:
        return checkout.name
    describe = [git, "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(describe, check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else checkout.name


def _step(peer: RealPeer) -> int:
    return int(peer.status()["step"])


def _watch(peers: Sequence[RealPeer], seconds: float) -> list[float]:
    """Wait, and see that all go on. The machine's load meanwhile."""
    end_s, loads = time.monotonic() + seconds, []
    while (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(LOOK_EVERY_S, left_s))
        loads.append(psutil.getloadavg()[0])
        for peer in peers:
            peer.check("while it was watched")
    return loads


def _renamed(figures: PeerFigures, names: dict[str, str]) -> PeerFigures:
    """With hosts in place of peer ids."""
    return replace(
        figures, exchanges={names[each]: count for each, count in figures.exchanges.items()}
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and publish.

    Args:
        arguments: of the command line; None are the process's own.
    """
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, help="of each window; 300, or 900 with --full")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--inner-steps", type=int, metavar="H", help="in place of the setting's")
    parser.add_argument("--checkout", type=Path, action="append", metavar="DIR")
    chosen = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        parser.exit(1, f"hosts of their own are needed: {reason}\n")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    seconds = chosen.seconds or (900.0 if chosen.full else 300.0)
    report = Report("gossip_links_real", "Six daemons behind unequal links, NoLoCo")
    report.settings = {
        "seconds": seconds,
        "cores": CORES,
        "congestion_control": congestion_control(),
        "table": six_links().to_json(),
        "swarms": [],
    }
    for name in chosen.settings:
        checkouts = [each.resolve() for each in chosen.checkout or [HERE]]
        inner_steps, setting = chosen.inner_steps, SETTINGS[name]
        if inner_steps is None:
            inner_steps = fitting_inner_steps(run_swarm(setting, checkouts[0], PROBE_S))
        setting = replace(setting, inner_steps=inner_steps)
        for checkout in checkouts:
            found = run_swarm(setting, checkout, seconds)
            report.rows += rows_of(found)
            report.notes.append(note_of(found))
            report.settings["swarms"].append(found.to_json())
            print(report.notes[-1], flush=True)
    report.publish(chosen.json)


if __name__ == "__main__":
    main()
