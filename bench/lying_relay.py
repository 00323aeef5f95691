"""What a lying relay costs learning, without and with the checks of data peers.

    python -m bench.lying_relay [--full] [--json FILE]

Three stages of a layer with three replicas each, in one process (stage_quality/lying.py): the
trainer's stages, codecs and optimizer, paths drawn at random, replicas averaged in pairs. One relay
of six negates the activations that it sends, which are then as large as honest ones. Losses are
those of the columns without the liar. Goals, stated before: with checks at most a tenth of what the
lie costs without them, nobody else left out, and less than 3% of the relays' work.
"""

import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final
from unittest import mock

import platformdirs
import torch

from bench.quality.feed import Feed
from bench.quality.measures import mean
from bench.quality.settings import Setting
from bench.quality.world import World
from bench.report import Goal, Report, Row, options
from bench.stage_quality.arms import StageArm
from bench.stage_quality.lying import LIAR, LyingPipeline, name_of
from bench.stage_quality.run import Gossip
from peer.training.schedule import learning_rate
from protocol.microbatch import checks
from protocol.microbatch.checks import CHECKED

_MODEL: Final = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 3,
    "num_heads": 2,
    "context_length": 32,
}
QUICK: Final = Setting(
    "quick", 30, 6, 10, 3, 30, final_blocks=32, replicas=3, learning_rate=6e-3, model=_MODEL
)
FULL: Final = replace(QUICK, name="full", steps=600, inner_steps=20, warmup_steps=60)
QUICK_CHECKED: Final = 8
"""One microbatch of so many is checked in the quick setting: it is too short for the real rate."""
ARM: Final = StageArm(
    "three-replicas", stages=3, visited=3, codec="int8", columns=3, mixing="random", gossip=True
)
ARMS: Final = {
    "nobody lies": (False, False),
    "one lies": (True, False),
    "one lies, checked": (True, True),
    "nobody lies, checked": (False, True),
}
FORWARD_OF_WORK: Final = 3
"""A microbatch is a forward, and a backward of two."""


def main() -> None:
    parser = options(__doc__)
    cache = Path(platformdirs.user_cache_dir("loco-peer"))
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help="for the corpus")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are small
    setting = FULL if arguments.full else QUICK
    world = World.open(setting, 0, arguments.cache)
    report = Report("lying_relay", f"A relay of six lies, {setting.name}")
    report.settings = asdict(setting)
    every = CHECKED if arguments.full else QUICK_CHECKED
    with mock.patch.object(checks, "CHECKED", every):
        for name, (lies, checked) in ARMS.items():
            report.rows.append(_row(name, world, lies=lies, checked=checked))
            print(report.rows[-1], flush=True)
    report.goals = _goals({str(row["arm"]): row for row in report.rows}, every)
    report.publish(arguments.json)


def _row(name: str, world: World, *, lies: bool, checked: bool) -> Row:
    setting, began_s = world.setting, time.perf_counter()
    pipeline = LyingPipeline(world, ARM, setting.batch_size, lies=lies, checked=checked)
    feed = Feed(world.corpus, world.spec.seed, setting.batch_size, ARM.columns)
    gossip = Gossip(pipeline, world.spec.seed)
    for step in range(1, setting.steps + 1):
        pipeline.step(
            feed.next_blocks(), learning_rate(world.spec.optimizer, step - 1, setting.steps)
        )
        if step % setting.inner_steps == 0:
            gossip.average()
    blocks_BT = world.corpus.validation_blocks(setting.final_blocks)
    relays, found = range(1, ARM.stages), pipeline.found
    honest = [column for column in range(ARM.columns) if column != LIAR[1]]
    losses = [pipeline.loss_of(blocks_BT, relays, column) for column in honest]
    return {
        "arm": name,
        "loss": mean(losses),
        "microbatches of a data peer": found.microbatches // ARM.columns,
        "left out after": [after for _, after in found.left_out],
        "others left out": sum(relay != name_of(*LIAR) for relay, _ in found.left_out),
        "extra work": found.copies / (FORWARD_OF_WORK * found.microbatches),
        "usual distance": mean(found.distances) if found.distances else None,
        "seconds": round(time.perf_counter() - began_s, 1),
    }


def _goals(rows: dict[str, Row], every: int) -> list[Goal]:
    honest, lied, checked = (
        float(rows[name]["loss"]) for name in ("nobody lies", "one lies", "one lies, checked")
    )
    share = (checked - honest) / (lied - honest) if lied > honest else math.nan
    others = sum(int(row["others left out"]) for row in rows.values())
    work = max(float(row["extra work"]) for row in rows.values())
    return [
        Goal("share of what the lie costs that is left with checks", share, at_most=0.1),
        Goal("honest relays left out", others, at_most=0),
        Goal("share of the relays' work, at the real rate", work * every / CHECKED, at_most=0.03),
    ]


if __name__ == "__main__":
    main()
