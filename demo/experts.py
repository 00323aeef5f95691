"""Six peers that train three experts of three sizes, each on a domain of its own.

The texts are on any machine: the standard library's sources, Python's C headers, and what packages
say of themselves. Two peers train each expert, and average with each other alone; the steps of an
expert are those of both together. At the end all experts are exported, from one peer's home.
"""

import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, Final

import trio

from peer.cli.new import preset_spec
from protocol.run.run_spec import RunSpec, validated

from .plan import INNER_STEPS, PRESET, VALIDATE_EVERY, to_toml
from .play import SUMMARY, join_line, watch
from .processes import PeerFailed, Peers, RunningPeer, console_script, open_peers
from .reading import Reading
from .table import View

METHOD: Final = "experts"
STEPS: Final = 120
"""Inner steps of each expert, of both of its peers together: six minutes on two slow cores."""
WITHIN: Final = 0.1
"""The part of its budget that an expert may be off: peers that begin at once train too much."""
SIZES: Final = {"general": 4, "headers": 3, "prose": 2}
"""Layers of each expert."""
PEERS_EACH: Final = 2
EXPORT_S: Final = 120.0
EXPORTED: Final = "experts"


def domains() -> dict[str, str]:
    """The sources of all experts but the first."""
    include, packages = sysconfig.get_path("include"), sysconfig.get_path("purelib")
    return {
        "headers": f"text:{include}/**/*.h",
        "prose": f"text:{packages}/*.dist-info/METADATA",
    }


def experts_spec(seed: int, steps: int) -> RunSpec:
    tree = preset_spec(PRESET).model_dump()
    tree |= {"name": "experts", "seed": seed, "ensemble": {"branch_round": 0}}
    tree["optimizer"]["warmup_steps"] = min(60, steps // 10)
    tree["training"]["total_steps"] = steps
    tree["sync"] |= {"inner_steps": INNER_STEPS, "validate_every": VALIDATE_EVERY}
    sources = domains()
    tree["experts"] = [
        {"name": name, "model": {"num_layers": layers}}
        | ({"source": sources[name]} if name in sources else {})
        for name, layers in SIZES.items()
    ]
    return validated(tree)


@dataclass(frozen=True, slots=True)
class ExpertsSummary:
    """Each expert at the end; `budget` in tokens, losses on its own domain."""

    experts: Sequence[dict[str, Any]]
    budget: int

    @property
    def won(self) -> bool:
        """Whether each was trained by its budget, whoever trained it."""
        off = [abs(expert["tokens"] - self.budget) / self.budget for expert in self.experts]
        return bool(max(off) <= WITHIN)

    def to_json(self) -> dict[str, Any]:
        return {"experts": list(self.experts), "budget_tokens": self.budget, "won": self.won}

    def describe(self) -> list[str]:
        lines = [f"{'expert':10} {'parameters':>12} {'tokens':>10} {'loss at home':>14}"]
        lines += [
            f"{each['name']:10} {each['parameters']:12,} {each['tokens']:10,}"
            f" {each['validation_loss']:14.4f}"
            for each in self.experts
        ]
        kept = "" if self.won else "NOT EVERY EXPERT KEPT TO ITS BUDGET: "
        return [*lines, f"{kept}the budget of each was {self.budget:,} tokens, of both its peers"]


async def play_experts(
    seed: int, steps: int | None, device: str, folder: Path, view: View
) -> ExpertsSummary:
    """Run the demo in `folder`, and leave a summary and the experts there. Raises PeerFailed."""
    spec = experts_spec(seed, steps or STEPS)
    run_toml = folder / "swarm.toml"
    run_toml.write_text(to_toml(spec))
    placed = [name for name in SIZES for _ in range(PEERS_EACH)]
    async with open_peers(folder, device) as peers:
        view.say("starting the first peer ...")
        swarm = [await peers.start("peer-1", ["start", str(run_toml)])]
        address = swarm[0].ready["addresses"][0]
        hint = f"join from another shell:  {join_line(address)} --expert general"
        async with trio.open_nursery() as nursery:
            for number, expert in enumerate(placed[1:], 2):
                nursery.start_soon(_join, peers, f"peer-{number}", address, expert, swarm)
            total = spec.training.total_steps
            readings = await watch("six peers", swarm, len(placed), total, view, hint)
        swarm.sort(key=lambda peer: peer.name)
        readings.sort(key=lambda reading: reading.name)
        view.say(f"exporting the experts to {folder / EXPORTED}")
        await _export(swarm[0], folder / EXPORTED)
    found = [_expert(name, placed, swarm, readings) for name in SIZES]
    summary = ExpertsSummary(found, spec.training.total_steps * spec.tokens_per_step)
    (folder / SUMMARY).write_text(json.dumps(summary.to_json(), indent=2) + "\n")
    return summary


async def _join(
    peers: Peers, name: str, address: str, expert: str, swarm: list[RunningPeer]
) -> None:
    swarm.append(await peers.start(name, ["join", "--bootstrap", address, "--expert", expert]))


async def _export(peer: RunningPeer, folder: Path) -> None:
    command = [str(console_script()), "export", "--home", str(peer.home.root), "--hf", str(folder)]
    with trio.fail_after(EXPORT_S):
        ran = await trio.run_process(command, stdout=DEVNULL, capture_stderr=True, check=False)
    if ran.returncode:
        raise PeerFailed(f"export of {peer.name}: {ran.stderr.decode(errors='replace')}")


def _expert(
    name: str, placed: Sequence[str], swarm: Sequence[RunningPeer], readings: Sequence[Reading]
) -> dict[str, Any]:
    own = [
        (peer, reading.status)
        for expert, peer, reading in zip(placed, swarm, readings, strict=True)
        if expert == name and reading.status is not None
    ]
    losses = [status.validation_loss for _, status in own if status.validation_loss is not None]
    return {
        "name": name,
        "peers": len(own),
        "parameters": own[0][0].events.parameters,
        "tokens": sum(status.tokens or 0 for _, status in own),
        "averaged": sum(status.outcomes.averaged for _, status in own),
        "validation_loss": max(losses),
    }
