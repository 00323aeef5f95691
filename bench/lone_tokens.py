"""How many tokens one peer alone needs to be as good as the worst of the demo's four.

    python -m demo --out FOLDER
    python -m bench.lone_tokens --demo FOLDER/summary.json --json bench/results/lone_tokens.json

The demo compares four peers with one alone that trains as many tokens as one of them. Here the one
alone trains again, in runs of 1.5, 2, 2.5, ... times those tokens, each with a schedule as long as
itself, at the demo's rate and at the preset's (longer runs want lower rates), until a run ends with
the loss of the worst of the four. Between the last run that does not and the first that does,
losses are taken to lie on a straight line.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import trio

from bench.report import Report, options
from demo.plan import MUON_RATE, PRESET, Plan
from demo.play import train_alone
from demo.reading import Point
from demo.summary import tokens_until
from demo.table import PlainView
from peer.cli.new import preset_spec
from protocol.run.run_spec import RunSpec

FACTORS: Final = (1.5, 2.0, 2.5, 3.0, 4.0)
"""Lengths of the lone peer's runs, in tokens of one of the four."""
THREADS: Final = 1
"""Threads of the one alone, as of each of the four: others may use the machine meanwhile."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--demo", type=Path, required=True, metavar="FILE", help="its summary.json")
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--rates", type=float, nargs="+", default=[MUON_RATE, preset_rate()])
    arguments = parser.parse_args()
    demo = json.loads(arguments.demo.read_text())
    report = Report("lone_tokens", "One peer alone, until it is as good as the worst of four")
    report.settings = {"commit": commit(), "demo": demo}
    report.rows.append(row(MUON_RATE, alone_of(demo), alone_of(demo).step))
    for rate in arguments.rates:
        ends = [alone_of(demo)] if rate == MUON_RATE else []
        for factor in arguments.factors:
            ends.append(trio.run(trained, round(factor * alone_of(demo).step), rate))
            report.rows.append(row(rate, ends[-1], alone_of(demo).step))
            report.publish(arguments.json)
            if ends[-1].loss <= worst_of(demo):
                break
        report.notes.append(note(rate, ends, worst_of(demo)))
    report.publish(arguments.json)


async def trained(tokens: int, rate: float) -> Point:
    """The end of a run of one peer alone that trains so many tokens."""
    spec = with_rate(Plan().lone_spec(tokens), rate)
    with TemporaryDirectory() as folder:
        _, alone = await train_alone(spec, Path(folder), PlainView(sys.stderr), THREADS)
    return Point(alone.tokens, alone.validation_loss)


def alone_of(demo: Mapping[str, Any]) -> Point:
    """The end of the demo's lone peer: its loss, by its tokens."""
    return Point(demo["alone"]["tokens"], demo["alone"]["validation_loss"])


def worst_of(demo: Mapping[str, Any]) -> float:
    """The loss of the worst of the four."""
    return float(max(peer["validation_loss"] for peer in demo["peers"]))


def commit() -> str:
    """The commit that ran."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def preset_rate() -> float:
    """Muon's rate as `loco-peer new` writes it."""
    muon = preset_spec(PRESET).optimizer.muon
    assert muon is not None
    assert muon.learning_rate is not None
    return muon.learning_rate


def with_rate(spec: RunSpec, rate: float) -> RunSpec:
    """The same run with this peak rate of Muon."""
    tree = spec.model_dump()
    tree["optimizer"]["muon"]["learning_rate"] = rate
    return RunSpec.model_validate(tree)


def row(rate: float, end: Point, tokens: float) -> dict[str, Any]:
    """One run of the lone peer; `tokens` are those of one of the four."""
    return {
        "rate": rate,
        "tokens": round(end.step),
        "of one of four": end.step / tokens,
        "validation loss": end.loss,
    }


def note(rate: float, ends: Sequence[Point], worst: float) -> str:
    """What the runs at one rate say; `ends` are losses by tokens of whole runs."""
    needed = tokens_until(ends, worst, round(ends[-1].step))
    tokens = f"more than {ends[-1].step:,.0f}" if needed is None else f"{needed:,}"
    return f"at {rate:g}: {tokens} tokens for a loss of {worst:.4f}"


if __name__ == "__main__":
    main()
