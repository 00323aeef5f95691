"""What lies cost in a window in which honest peers learn much: 200 rounds, all arms at once.

    python -m bench.hostile_long [--smoke] [--ways A,B] [--seeds 0,1] [--device cuda]

bench.hostile asks the daemon's own code, for 16 rounds, in which honest peers gain little. Here the
runs of one way and seed are one stack of replicas (lies/stack.py), so that 200 rounds of eighty
runs take minutes on a GPU. All peers start from an early checkpoint. Judgements and clipping are
the daemon's, by protocol/plausible.py; beside them stand defences that others have
(lies/long_arms.py). Liars send what lies/liars.py says, and `sly` what is made for those defences.

`lost` is the share of the honest gain that is lost: of what as many honest peers alone, with the
daemon's defences, have gained since the checkpoint. Goals: a tenth at the most with two liars of
16, and no end above the start with five.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch

from bench.lies.arms import SHARES, Way
from bench.lies.long_arms import DEFENCES, LongArm, arms_of
from bench.lies.long_fragments import LongFragments
from bench.lies.long_pairs import LongPairs
from bench.lies.long_world import LongWorld
from bench.lies.settings import LONG, SMOKE_HOSTILE
from bench.lies.stack import Stack
from bench.quality.measures import mean
from bench.quality.settings import Setting
from bench.quality.study import study_options
from bench.quality.world import World
from bench.report import Goal, Report, Row, machine

RESULTS: Final = Path(__file__).parent / "results" / "hostile_long.jsonl"
LOST_SHARE: Final = 0.1
WAYS: Final[dict[Way, Callable[..., LongPairs | LongFragments]]] = {
    "pairs": LongPairs,
    "fragments": LongFragments,
}


def main() -> None:
    parser = study_options(__doc__, {}, RESULTS)
    parser.add_argument("--ways", default="pairs,fragments", metavar="A,B")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th arm, from I on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="judge what is then there")
    parser.add_argument("--rate", type=float, help="another learning rate")
    parser.add_argument("--trained-steps", type=int, help="another checkpoint")
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.device == "cpu" else 2)
    setting = _setting(arguments)
    for seed in arguments.seeds:
        for way in arguments.ways.split(","):
            if not arguments.made_only:
                run_stack(way, seed, setting, arguments)
    lines = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    report_of(lines, setting).publish(arguments.json)


def _setting(arguments: argparse.Namespace) -> Setting:
    setting = replace(SMOKE_HOSTILE, name="long-smoke") if arguments.smoke else LONG
    rate, steps = arguments.rate, arguments.trained_steps
    if rate is not None or steps is not None:
        rate, steps = rate or setting.learning_rate, steps or setting.trained_steps
        name = f"{setting.name}-{rate:g}-{steps}"
        setting = replace(setting, name=name, learning_rate=rate, trained_steps=steps)
    return setting


def run_stack(way: Way, seed: int, setting: Setting, arguments: argparse.Namespace) -> None:
    """All arms of a way, or a part of them; each leaves a line."""
    until_s = time.monotonic() + arguments.seconds
    device = torch.device(arguments.device)
    world = World.open(setting, seed, arguments.cache)
    long = LongWorld(world, device)
    index, of = map(int, arguments.part.split("/"))
    arms = list(arms_of(way))[index::of]
    stack = Stack(world.spec, world.vocabulary, sum(arm.peers for arm in arms), device)
    start_P = long.checkpoint()
    with torch.no_grad():
        stack.theta_RP.copy_(start_P.expand_as(stack.theta_RP))
    swarm = WAYS[way](stack, arms, long)
    (start_loss,) = stack.losses(start_P[None], long.held_out_BT[None]).tolist()
    peers = torch.tensor([peer for arm in arms for peer in range(arm.peers)], device=device)
    curves: list[list[tuple[int, float]]] = [[] for _ in arms]
    step = 0
    while step < setting.steps and time.monotonic() < until_s:
        for _ in range(setting.inner_steps):
            stack.step(long.blocks(step)[peers], world.rate(step))
            step += 1
            with torch.no_grad():
                swarm.after_step(step)
        if step % setting.curve_every == 0:
            means_JP = torch.stack([swarm.judged(number).mean(0) for number in range(len(arms))])
            for curve, loss in zip(curves, _losses(stack, means_JP, long), strict=True):
                curve.append((step, loss))
            print(f"{way} {seed}: step {step}, {until_s - time.monotonic():.0f} s left", flush=True)
    with torch.no_grad():
        swarm.settle()
    for number, arm in enumerate(arms):
        judged_NP = swarm.judged(number)
        losses = _losses(stack, judged_NP, long)
        tree = {
            "name": f"{setting.name}/{arm.name}-{seed}",
            **asdict(arm),
            "setting": asdict(setting),
            "seed": seed,
            "steps": step,
            "start_loss": start_loss,
            "losses": losses,
            "averaged_loss": _losses(stack, judged_NP.mean(0, keepdim=True), long)[0],
            "curve": curves[number],
            **swarm.companies[number].counts.told(),
            "machine": machine(),
        }
        with arguments.results.open("ab", buffering=0) as file:
            file.write(f"{json.dumps(tree)}\n".encode())


def _losses(stack: Stack, weights_NP: torch.Tensor, long: LongWorld) -> list[float]:
    blocks = long.held_out_BT.expand(len(weights_NP), -1, -1)
    found: list[float] = []
    for some_NP, some in zip(weights_NP.split(64), blocks.split(64), strict=True):
        found += stack.losses(some_NP, some).tolist()
    return found


# --- what is said of it ---------------------------------------------------------------------------
Line = Mapping[str, Any]


def report_of(lines: Sequence[Line], setting: Setting) -> Report:
    """The table and the goals of all runs of a setting."""
    runs = {line["name"]: line for line in lines if line["name"].startswith(f"{setting.name}/")}
    report = Report("hostile_long", f"What lies cost in {setting.steps} steps, {setting.name}")
    report.settings = asdict(setting)
    for way in DEFENCES:
        worst: dict[tuple[str, int], list[tuple[float, float, str]]] = {}
        for arm in arms_of(way):
            found = [run for run in runs.values() if _is_of(run, arm)]
            if found:
                report.rows.append(row := _row(arm, found, runs, setting))
                if arm.liars:
                    risen = max(mean(run["losses"]) - run["start_loss"] for run in found)
                    key = arm.defence, arm.liars
                    worst.setdefault(key, []).append((row["lost"], risen, arm.attack))
        few, many = SHARES
        for (defence, liars), each in worst.items():
            lost, _, attack = max(each)
            risen, worst_attack = max((risen, attack) for _, risen, attack in each)
            of = f"{way}, {defence}, {liars} liars"
            if liars == few:
                report.goals.append(
                    Goal(f"{of}: share of the gain lost, {attack}", lost, at_most=LOST_SHARE)
                )
            if liars == many:
                what = f"{of}: loss above the checkpoint's, {worst_attack}"
                report.goals.append(Goal(what, risen, at_most=0.0))
    return report


def _is_of(run: Line, arm: LongArm) -> bool:
    return all(run[key] == value for key, value in asdict(arm).items())


def _row(arm: LongArm, found: Sequence[Line], runs: Mapping[str, Line], setting: Setting) -> Row:
    losses = [mean(run["losses"]) for run in found]
    lost = [
        _lost(loss, run, runs.get(f"{setting.name}/{arm.reference}-{run['seed']}"))
        for loss, run in zip(losses, found, strict=True)
    ]
    return {
        "way": arm.way,
        "attack": arm.attack,
        "liars": f"{arm.liars} of {arm.peers}",
        "defence": arm.defence,
        "seeds": len(found),
        "gain": mean([run["start_loss"] - loss for loss, run in zip(losses, found, strict=True)]),
        "of mean": mean([run["start_loss"] - run["averaged_loss"] for run in found]),
        "lost": mean(lost),
        "least": min(lost),
        "most": max(lost),
        "refused": f"{mean([run['refused'][0] for run in found]):.1%}",
        "liars refused": f"{mean([run['refused'][1] for run in found]):.1%}",
        "liars'": f"{mean([run['liars_weight'] for run in found]):.1%}",
    }


def _lost(loss: float, run: Line, alone: Line | None) -> float:
    """The share of what honest peers alone have gained that is lost."""
    if alone is None or not math.isfinite(loss):
        return math.nan if alone is None else math.inf
    honest = mean(alone["losses"])
    return (loss - honest) / (float(run["start_loss"]) - honest)


if __name__ == "__main__":
    main()
