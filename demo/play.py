"""The demo itself: the swarm, then one peer alone, then what came of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from peer.facts import PeerState
from protocol.run.run_spec import RunSpec

from .plan import PEERS, Plan, to_toml
from .processes import Peers, RunningPeer, console_script, open_peers
from .reading import Reading
from .summary import Finished, Summary, finished, median_tokens
from .table import Scene, View

POLL_S: Final = 1.0
LONE_THREADS: Final = 2
"""Threads of the lone peer. It has the machine for itself: the same tokens, sooner."""
SUMMARY: Final = "summary.json"
PICTURE: Final = "losses.png"


async def play(plan: Plan, folder: Path, view: View) -> Summary:
    """Run the whole demo in `folder`, which is empty, and leave summary and picture there.

    Raises:
        PeerFailed
    """
    swarm, ended = await _train_swarm(plan, folder, view)
    tokens = median_tokens(ended)
    view.say(f"the swarm is done; now one peer alone, {tokens:,} tokens like the median peer")
    lone, alone = await train_alone(plan.lone_spec(tokens), folder, view, device=plan.device)
    summary = Summary(ended, alone, plan.sends_per_round, lone.events.validation)
    (folder / SUMMARY).write_text(json.dumps(summary.to_json(), indent=2) + "\n")
    _picture(swarm, lone, folder / PICTURE)
    return summary


async def _train_swarm(
    plan: Plan, folder: Path, view: View
) -> tuple[list[RunningPeer], list[Finished]]:
    spec = plan.swarm_spec()
    run_toml = folder / "swarm.toml"
    run_toml.write_text(to_toml(spec))
    async with open_peers(folder, plan.device) as peers:
        view.say("starting the first peer ...")
        swarm = [await peers.start("peer-1", ["start", str(run_toml)])]
        address = swarm[0].ready["addresses"][0]
        hint = f"join from another shell:  {join_line(address)}"
        async with trio.open_nursery() as nursery:
            for number in range(2, PEERS + 1):
                join = ["join", "--bootstrap", address, *plan.options_of(number)]
                nursery.start_soon(_join, peers, f"peer-{number}", join, swarm)
            readings = await watch(
                "four peers", swarm, PEERS, spec.training.total_steps, view, hint
            )
    swarm.sort(key=lambda peer: peer.name)
    readings.sort(key=lambda reading: reading.name)
    return swarm, [_finished(*each) for each in zip(readings, swarm, strict=True)]


async def _join(peers: Peers, name: str, command: Sequence[str], swarm: list[RunningPeer]) -> None:
    swarm.append(await peers.start(name, command))


async def train_alone(
    spec: RunSpec, folder: Path, view: View, threads: int = LONE_THREADS, device: str = "cpu"
) -> tuple[RunningPeer, Finished]:
    """Run one peer alone to the end of this run, in a home below `folder`.

    Raises:
        PeerFailed
    """
    run_toml = folder / "alone.toml"
    run_toml.write_text(to_toml(spec))
    async with open_peers(folder, device) as peers:
        lone = await peers.start("alone", ["start", str(run_toml)], threads)
        readings = await watch("one peer alone", [lone], 1, spec.training.total_steps, view)
    return lone, _finished(readings[0], lone)


def _finished(reading: Reading, peer: RunningPeer) -> Finished:
    return finished(reading, peer.events.parameters or 0)


async def watch(
    title: str,
    peers: Sequence[RunningPeer],
    expected: int,
    total_steps: int,
    view: View,
    hint: str = "",
) -> list[Reading]:
    """Show the peers until all `expected` are there and finished; `peers` may still grow."""
    while True:
        readings = [await peer.read() for peer in sorted(peers, key=lambda p: p.name)]
        complete = len(readings) == expected
        names = {peer.ready["peer_id"]: peer.name for peer in peers}
        view.show(Scene(title, readings, total_steps, names, complete, hint))
        if complete and all(_is_finished(reading) for reading in readings):
            return readings
        await trio.sleep(POLL_S)


def _is_finished(reading: Reading) -> bool:
    return reading.status is not None and reading.status.state is PeerState.FINISHED


def join_line(address: str) -> str:
    """The command with which another peer on this machine joins."""
    return f"{console_script()} join --home fifth-peer --threads 1 --bootstrap {address}"


def _picture(swarm: Sequence[RunningPeer], lone: RunningPeer, path: Path) -> None:
    from .picture import Curve, draw  # matplotlib takes a second, and is needed at the end only

    def curve(peer: RunningPeer) -> Curve:
        return Curve(peer.name, peer.events.training, peer.events.validation)

    draw([curve(peer) for peer in swarm], curve(lone), path)
