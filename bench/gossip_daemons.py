"""Gossip without a clock in whole daemons: a second witness beside gossip_links.py.

The daemon's own code in virtual time (simulation): its round loop, beats, matchmaking, streams
and outer steps; toy models of 128 Ki parameters in fp32, so that a vector is much longer than a
message. Lines are per pair and direction: 4 to 70 ms, and rates so that an exchange of a middle
pair takes the wished part of a round; those of the last two peers carry a part of THIN of that, in
place of the shared uplink, which simulated links do not have. Speeds are from half to twice the
middle; steps scatter by 25%, equally long within a round, so rounds scatter as much.

Figures come out of the event logs (gossip_report.py), from the moment at which the last peer has
averaged twice to a round before the final averaging:

  exchanged    completed exchanges * H / nominal steps, of the peers with usual lines; `least` of
               them; `thin`, of the two others
  busy         share of the time in an exchange that completed
  speed        inner steps over those of the same trainer alone in as long a time: the lowest peer
  bandwidth    bytes of a vector / (seconds of the exchange * rate of the line), mean
  repeats, cv  as in gossip_links.py
  age          of an average at its merge, in rounds
  pace         nominal steps over what training was worth by the quotas

    python -m bench.gossip_daemons [--full] [--seed N] [--json FILE]
"""

import math
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, takewhile
from pathlib import Path
from typing import Any, Final

from bench.gossip.measures import Pair, pair_figures, quantile
from bench.gossip_report import Event, PeerFigures, Window, peer_figures
from bench.report import Goal, Report, options
from peer.observe.event_names import EventName
from protocol.run.run_spec import RunSpec, SyncSection, TrainingSection
from protocol.run.sections import OptimizerSection
from protocol.schedule.rounds import owed_steps
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import SimulatedPeer, SwarmOptions, identity_of, open_swarm
from simulation.trainer import SimulatedSpeed
from simulation.virtual_time import run_in_virtual_time

INNER_STEPS: Final = 10
STEP_S: Final = 1.0
ROUND_S: Final = INNER_STEPS * STEP_S
PARAMETERS: Final = 128 * 1024
VECTOR_BYTES: Final = 4 * PARAMETERS
SPREAD: Final = 1.5
SCATTER: Final = 0.25
THIN: Final = 0.5
NUM_THIN: Final = 2
PEERS: Final = (6,)
FULL_PEERS: Final = (6, 12)
RATIOS: Final = (0.25, 0.7, 1.5)
ROUNDS: Final = 60
LIMIT_S: Final = 20 * ROUNDS * ROUND_S
SPEED: Final = 0.97
DIGITS: Final = 3


@dataclass(frozen=True, slots=True)
class Place:
    """The machines and lines of one world.

    Attributes:
        bytes_per_s: by pair of places, lower first.
    """

    machines: tuple[Machine, ...]
    latency_s: Mapping[Pair, float]
    bytes_per_s: Mapping[Pair, float]

    @property
    def num_peers(self) -> int:
        return len(self.machines)

    @property
    def thin(self) -> range:
        """Peers with thin lines: not the founder, by whom the others join."""
        return range(self.num_peers - NUM_THIN, self.num_peers)

    def owed(self, place: int) -> float:
        """Inner steps of a round."""
        speeds = [1 / machine.speed.step_s for machine in self.machines]
        return owed_steps(INNER_STEPS, speeds[place], speeds)

    def link(self, one: int, other: int) -> LinkModel:
        """The line between two places, either way."""
        pair = min(one, other), max(one, other)
        return LinkModel(self.latency_s[pair], 0.0, self.bytes_per_s[pair])


def place_of(num_peers: int, ratio: float, seed: int) -> Place:
    """A seeded world; see the top of the file."""
    rng = random.Random(f"{num_peers}/{seed}")
    middle, spread = VECTOR_BYTES / (ratio * ROUND_S), math.log(SPREAD)
    pairs = [(a, b) for a in range(num_peers) for b in range(a + 1, num_peers)]
    rates = {
        pair: middle
        * math.exp(rng.uniform(-spread, spread))
        * (THIN if pair[1] >= num_peers - NUM_THIN else 1.0)
        for pair in pairs
    }
    speeds = [2 ** rng.uniform(-1, 1) for _ in range(num_peers)]
    median_speed = statistics.median(speeds)
    machines = tuple(
        Machine(
            SimulatedSpeed(
                step_s=STEP_S * median_speed / speed,
                scatter=SCATTER,
                stretch_steps=max(1, round(INNER_STEPS * speed / median_speed)),
                scatter_seed=place,
            )
        )
        for place, speed in enumerate(speeds)
    )
    return Place(machines, {pair: rng.uniform(0.004, 0.070) for pair in pairs}, rates)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = Report("gossip_daemons", "Gossip without a clock, whole daemons, virtual time")
    report.settings = {"inner_steps": INNER_STEPS, "rounds": ROUNDS, "seed": arguments.seed}
    for num_peers in FULL_PEERS if arguments.full else PEERS:
        for ratio in RATIOS:
            place = place_of(num_peers, ratio, arguments.seed)
            found = figures(place, run(place, arguments.seed))
            report.rows.append({"peers": num_peers, "ratio": ratio} | found)
            what = f"{num_peers} peers, exchange of {ratio} rounds: lowest speed beside that alone"
            report.goals.append(Goal(what, found["speed"], at_least=SPEED))
    report.publish(arguments.json)


# --- the swarm ------------------------------------------------------------------------------------
def run(place: Place, seed: int) -> list[list[Event]]:
    """Let the daemons train to the end; their event logs, by place."""
    spec = RunSpec(
        seed=seed,
        training=TrainingSection(total_steps=ROUNDS * INNER_STEPS),
        optimizer=OptimizerSection(warmup_steps=0, schedule="constant"),
        sync=SyncSection(inner_steps=INNER_STEPS, validate_every=10 * ROUNDS, codec="fp32"),
    )
    return run_in_virtual_time(seed, lambda: _run(place, spec), limit_s=LIMIT_S)


async def _run(place: Place, spec: RunSpec) -> list[list[Event]]:
    places = {identity_of(spec.seed, f"p{n}").peer_id: n for n in range(place.num_peers)}
    world = SwarmOptions(
        link_of=lambda source, to: place.link(places[source], places[to]),
        padded_parameters=PARAMETERS,
    )
    with tempfile.TemporaryDirectory(prefix="loco") as folder:
        async with open_swarm(spec.seed, spec, Path(folder), world) as swarm:
            for number, machine in enumerate(place.machines):
                if number:
                    swarm.join(f"p{number}", machine)
                else:
                    await swarm.until(swarm.found("p0", machine).known.is_set)
            await swarm.finished()
            return [_events_of(peer, places) for peer in swarm.peers.values()]


def _events_of(peer: SimulatedPeer, places: Mapping[str, int]) -> list[Event]:
    """Its log, with places in place of peer ids."""
    return [
        event | {"partner": str(places[event["partner"]])} if event.get("partner") else event
        for event in peer.events()
    ]


# --- figures --------------------------------------------------------------------------------------
def figures(place: Place, logs: Sequence[Sequence[Event]]) -> dict[str, float]:
    """See the top of the file."""
    window = window_of(logs)
    peers = [
        peer_figures(str(number), log, window, INNER_STEPS, nominal_steps(window.part(log)))
        for number, log in enumerate(logs)
    ]
    usual = [each.exchanged for n, each in enumerate(peers) if n not in place.thin]
    averaged = [
        event | {"place": number}
        for number, log in enumerate(logs)
        for event in _named(window.part(log), EventName.ROUND_AVERAGED)
    ]
    ages = [event["age"] / INNER_STEPS for event in averaged]
    pairs = pair_figures(meetings(averaged), place.num_peers)
    found = {
        "exchanged": statistics.fmean(usual),
        "least": min(usual),
        "thin": statistics.fmean(peers[n].exchanged for n in place.thin),
        "busy": statistics.fmean(each.exchange_share for each in peers),
        "speed": min(
            speed_share(place.machines[n].speed, log, window) for n, log in enumerate(logs)
        ),
        "bandwidth": statistics.fmean(bandwidth_share(place, event) for event in averaged),
        "skipped": sum(sum(each.skipped.values()) for each in peers),
        "repeats": pairs.repeats,
        "cv": pairs.cv,
        "fewest": pairs.least,
        "most": pairs.most,
        "age": statistics.fmean(ages),
        "age 99%": quantile(ages, 0.99),
        "pace": pace(place, peers),
    }
    return {key: round(value, DIGITS) for key, value in found.items()}


def window_of(logs: Sequence[Sequence[Event]]) -> Window:
    """From the second average of the last peer to a round before the first final averaging."""
    begins = [_named(log, EventName.ROUND_AVERAGED)[1]["time"] for log in logs]
    ends = [
        next((e["time"] for e in log if e["event"] == EventName.FINAL_AVERAGING), log[-1]["time"])
        for log in logs
    ]
    return Window(max(begins), min(ends) - ROUND_S)


def nominal_steps(within: Sequence[Event]) -> float:
    """From the first round opened in the window to the last."""
    steps = [event["step"] for event in _named(within, EventName.ROUND_OPENED)]
    return float(steps[-1] - steps[0])


def speed_share(speed: SimulatedSpeed, log: Sequence[Event], window: Window) -> float:
    """Steps between the first and the last close in the window, over those of the trainer alone.

    Each step of the simulated machine has its length, so what it would have done is known exactly.
    """
    closed = _named(log, EventName.ROUND_CLOSED)
    totals = accumulate(event["steps"] for event in closed)
    marks = [
        (event["time"], total)
        for event, total in zip(closed, totals, strict=True)
        if window.begin_s <= event["time"] < window.end_s
    ]
    (begin_s, first), (end_s, last) = marks[0], marks[-1]
    within_s = end_s - begin_s + speed.step_s / 100
    ends_s = accumulate(speed.duration_s(step) for step in count(first))
    alone = sum(1 for _ in takewhile(lambda s: s <= within_s, ends_s))
    return float(last - first) / alone


def bandwidth_share(place: Place, event: Event) -> float:
    """Part of its line that an exchange used."""
    line = place.link(event["place"], int(event["partner"]))
    seconds: float = event["seconds"]
    return VECTOR_BYTES / (seconds * line.bandwidth_bytes_per_s)


def meetings(averaged: Sequence[Event]) -> list[Pair]:
    """Pairs in the order of their ends, as the one with the lower place has them."""
    ordered = sorted(averaged, key=lambda event: float(event["time"]))
    return [
        (event["place"], int(event["partner"]))
        for event in ordered
        if event["place"] < int(event["partner"])
    ]


def pace(place: Place, peers: Sequence[PeerFigures]) -> float:
    """Nominal steps over what the inner steps were worth, of all."""
    worth = sum(each.steps * INNER_STEPS / place.owed(n) for n, each in enumerate(peers))
    return sum(each.nominal_steps for each in peers) / worth


def _named(events: Sequence[Event], name: EventName) -> list[dict[str, Any]]:
    return [dict(event) for event in events if event["event"] == name]


if __name__ == "__main__":
    main()
