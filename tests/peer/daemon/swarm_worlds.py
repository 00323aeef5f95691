"""Swarms for tests: small, quick, from a seed, and the means to look at them."""

import functools
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import blake3
import numpy as np

from peer.content.state_file import state_bytes, weights_chunk
from peer.daemon.links import SILENCE_S
from peer.observe.event_names import EventName
from protocol.gossip.round_length import FIRST_INNER_STEPS
from protocol.limits import STATE_CHUNK_BYTES
from protocol.membership.view import Member, Roster
from protocol.run.run_spec import RunSpec, SyncSection, TrainingSection
from protocol.run.sections import OptimizerSection
from simulation.network import LinkModel
from simulation.swarm import LoggedEvent, SimulatedPeer, SimulatedSwarm, SwarmOptions
from simulation.virtual_time import run_in_virtual_time

STEP_S = 0.1  # of the simulated trainer, by default
HOUR_S = 3600.0
TOGETHER_S = 1.0  # between the two ends of an exchange, at most


def toy_spec(rounds: int = 4, inner_steps: int = 20, seed: int = 1, **sync: Any) -> RunSpec:
    """A run of so many rounds of training; the final averaging comes on top."""
    return RunSpec(
        seed=seed,
        training=TrainingSection(total_steps=rounds * inner_steps),
        optimizer=OptimizerSection(warmup_steps=0, schedule="constant"),
        sync=SyncSection(inner_steps=inner_steps, **sync),
    )


def weights_bytes(num_values: int) -> int:
    """Bytes of those chunks of a state that hold weights: what comes without outer momentum."""
    chunks = weights_chunk(num_values - 1) + 1
    return min(chunks * STATE_CHUNK_BYTES, state_bytes(num_values))


def simulated(seed: int = 1, limit_s: float = HOUR_S) -> Callable[..., Callable[..., None]]:
    """Make a test of an async function: in virtual time, scheduled from the seed."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            run_in_virtual_time(seed, lambda: test(**fixtures), limit_s=limit_s)

        return run

    return decorate


class HoledRoster(Roster):
    """A roster that hides some of the others from its reader.

    In a small swarm links are symmetric, and peers tell each other of everybody they know; views
    are equal after seconds. In a large one they are not: each peer holds links to a part of the
    others. To show what that does to matchmaking in a swarm of a few dozen, this one leaves out a
    fixed random part of the others, drawn anew for each reader, where it is asked who trains.
    """

    def __init__(self, seed: int, reader: str, hidden_fraction: float) -> None:
        super().__init__(SILENCE_S)
        self._seed = seed
        self._reader = reader
        self._hidden_fraction = hidden_fraction

    def members_training(self, now_s: float) -> tuple[Member, ...]:
        training = super().members_training(now_s)
        return tuple(member for member in training if not self._hides(member.peer_id))

    def _hides(self, peer_id: str) -> bool:
        text = f"{self._seed}/hole/{self._reader}/{peer_id}"
        drawn = int.from_bytes(blake3.blake3(text.encode()).digest(length=8), "big")
        return drawn < self._hidden_fraction * 2**64


def with_holes(seed: int, hidden_fraction: float) -> SwarmOptions:
    """A world in which each peer never sees this part of the others train."""
    return SwarmOptions(roster_of=lambda reader: HoledRoster(seed, reader, hidden_fraction))


async def start(swarm: SimulatedSwarm, *names: str, machine_of: Any = None) -> None:
    """Found with the first, join with the others, and wait until all are in."""
    machine_of = machine_of or {}
    for name in names:
        begin = swarm.join if swarm.peers else swarm.found
        begin(name, *([machine_of[name]] if name in machine_of else []))
        if name == names[0]:
            await swarm.until(swarm[name].known.is_set)
    await swarm.until(lambda: all(swarm[name].ready.is_set() for name in names))


def set_lines(swarm: SimulatedSwarm, model: LinkModel) -> None:
    """Let all lines carry so much from now on."""
    for one, other in itertools.permutations((peer.peer_id for peer in swarm.peers.values()), 2):
        swarm.internet.link(one, other).model = model


def outcomes(peer: SimulatedPeer, after: int = -1) -> list[str]:
    """How its rounds after that one ended, in order: `averaged` or the reason."""
    names = (EventName.ROUND_AVERAGED, EventName.ROUND_SKIPPED)
    return [
        "averaged" if event["event"] == EventName.ROUND_AVERAGED else event["reason"]
        for event in peer.events(*names)
        if event["round"] > after
    ]


def tally(*peers: SimulatedPeer, after: int = -1) -> Counter[str]:
    """Outcomes of all these peers together."""
    return Counter(outcome for peer in peers for outcome in outcomes(peer, after))


def skips(peer: SimulatedPeer, after: int = -1) -> list[str]:
    """Reasons of its rounds that ended without averaging."""
    return [outcome for outcome in outcomes(peer, after) if outcome != "averaged"]


def last_training_round(peer: SimulatedPeer) -> int:
    """Its own number of its last round with steps."""
    closed = peer.events(EventName.ROUND_CLOSED)
    return max(event["round"] for event in closed if event["steps"])


def training_outcomes(peer: SimulatedPeer) -> list[str]:
    """The same without the final averaging."""
    return outcomes(peer)[: -len(final_outcomes(peer)) or None]


def final_outcomes(peer: SimulatedPeer) -> list[str]:
    """How its meetings of the final averaging ended."""
    return outcomes(peer, after=last_training_round(peer))


def partners(peer: SimulatedPeer) -> dict[int, str]:
    """Its own round to partner."""
    averaged = peer.events(EventName.ROUND_AVERAGED)
    return {event["round"]: event["partner"] for event in averaged}


def exchanges(*peers: SimulatedPeer) -> Iterator[tuple[LoggedEvent, LoggedEvent]]:
    """Both ends of each exchange of these peers; each end has the other one."""
    ends: dict[tuple[str, str], list[LoggedEvent]] = {}
    for peer in peers:
        for event in peer.events(EventName.ROUND_AVERAGED):
            ends.setdefault((peer.peer_id, event["partner"]), []).append(event)
    for one, other in itertools.combinations((peer.peer_id for peer in peers), 2):
        ours, theirs = ends.get((one, other), []), ends.get((other, one), [])
        assert len(ours) == len(theirs), (one, other)
        for pair in zip(ours, theirs, strict=True):
            assert abs(pair[0]["monotonic_s"] - pair[1]["monotonic_s"]) <= TOGETHER_S, pair
            yield pair


def assert_trains_on(peer: SimulatedPeer, step_s: float = STEP_S) -> None:
    """Training never stood still before the end, its step never fell, no round was cut short.

    But for one that was begun alone, where peers choose how long theirs are: after a few steps; and
    for one that was begun before speeds were known: after twice the steps that are owed by then.
    """
    opened = peer.events(EventName.ROUND_OPENED)
    closed = [event for event in peer.events(EventName.ROUND_CLOSED) if event["steps"]]
    for begin, end, following in zip(opened, closed, [*opened[1:], None], strict=False):
        assert begin["round"] == end["round"]
        begun_alone = peer.facts.chosen_inner_steps is not None and begin["members"] == 1
        least = FIRST_INNER_STEPS if begun_alone else begin["quota"]
        assert end["steps"] >= (min(least, 2 * following["quota"]) if following else least)
        assert begin["step"] < end["step"]
        stood_s = end["seconds"] - end["steps"] * step_s
        assert stood_s >= -1e-6, end
        if following is not None and following["quota"]:
            # What an average interrupts, in the middle of a step, is less than a step.
            assert stood_s < step_s, end
            assert following["step"] >= end["step"]
            assert following["monotonic_s"] == end["monotonic_s"]


def jumps(peer: SimulatedPeer) -> list[int]:
    """Its rounds that begin beyond the end of the one before."""
    closed = {event["round"]: event["step"] for event in peer.events(EventName.ROUND_CLOSED)}
    return [
        event["round"]
        for event in peer.events(EventName.ROUND_OPENED)
        if event["step"] > closed.get(event["round"] - 1, event["step"])
    ]


def distance(one: SimulatedPeer, other: SimulatedPeer) -> float:
    """Root mean square per parameter of the difference of their slow weights."""
    return float(np.sqrt(np.mean(np.square(one.slow_weights() - other.slow_weights()))))


def round_of(peer: SimulatedPeer) -> int:
    """The round in training."""
    return peer.facts.round
