"""Daemons on the machines of a world, with a plan to follow."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.real_peers import HERE, RealPeer, home_in
from bench.router.network import RoutedNetwork
from peer.network.identity import load_or_create
from protocol.pipeline.simulator import Plan

from .given_paths import GIVEN, GivenPaths
from .trainer import STATED

PROGRAM: Final = ("-m", "bench.pipeline_world.daemon")
LOOK_EVERY_S: Final = 1.0


def used_machines(plan: Plan) -> list[int]:
    """Those that send or are visited; a data peer first, which founds the run."""
    origins = [machine for machine, paths in enumerate(plan.paths) if paths]
    visited = {relay for paths in plan.paths for path in paths for relay in path}
    return [*origins, *sorted(visited)]


@contextmanager
def planned_swarm(
    network: RoutedNetwork, run_toml: str, plan: Plan, stated_s: Mapping[str, float], folder: Path
) -> Iterator[Mapping[int, RealPeer]]:
    """A daemon on each machine of the plan, by number; all data peers follow it.

    What their trainers do stands in `folder`/trainerN.jsonl.

    Raises:
        PeerFailed
    """
    spec = folder / "run.toml"
    spec.write_text(run_toml)
    daemons = {machine: folder / f"peer{machine}" for machine in used_machines(plan)}
    ids = {
        machine: load_or_create(home_in(daemon).identity_path).peer_id
        for machine, daemon in daemons.items()
    }
    table = json.dumps(named_paths(plan, ids))
    peers: dict[int, RealPeer] = {}
    for machine, daemon in daemons.items():
        stated = {**stated_s, "log": str(folder / f"trainer{machine}.jsonl")}
        peers[machine] = RealPeer(
            daemon,
            HERE,
            partial(network.command, machine),
            program=PROGRAM,
            environment={STATED: json.dumps(stated), GIVEN: table},
        )
    with ExitStack() as stack:
        stack.callback(_stop_all, list(peers.values()))
        founder, *others = peers
        peers[founder].start("start", str(spec), listen=f"{network.address(founder)}:0")
        address = peers[founder].ready()["addresses"][0]
        for machine in others:
            stage = ["--stage", str(plan.stages[machine])]
            listen = f"{network.address(machine)}:0"
            peers[machine].start("join", "--bootstrap", address, *stage, listen=listen)
        for peer in peers.values():
            peer.ready()
        digest = GivenPaths(table).digest
        for machine, paths in enumerate(plan.paths):
            if paths:
                follows = partial(_follows, peers[machine], digest)
                peers[machine].wait_until(follows, "had the paths", 240.0)
        yield peers


def named_paths(plan: Plan, ids: Mapping[int, str]) -> dict[str, list[list[str]]]:
    """The plan's paths by peer id."""
    return {
        ids[origin]: [[ids[relay] for relay in path] for path in paths]
        for origin, paths in enumerate(plan.paths)
        if paths
    }


def watch(peers: Mapping[int, RealPeer], seconds: float) -> None:
    """Wait, and see that all go on. Raises PeerFailed."""
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(LOOK_EVERY_S, left_s))
        for peer in peers.values():
            peer.check("while it was watched")


def _follows(peer: RealPeer, digest: str) -> bool:
    pipeline = peer.status()["pipeline"]
    return pipeline is not None and pipeline["plan"] == digest


def _stop_all(peers: Sequence[RealPeer]) -> None:
    for peer in peers:
        peer.stop()
    for peer in peers:
        peer.wait_gone()
