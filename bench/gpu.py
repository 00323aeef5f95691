"""The speed of one CUDA card, and peers on it (docs/results/gpu.md).

    python -m bench.gpu --out FOLDER [--device cuda] [PART ...]

Parts, each of a minute or three, in this order:

    tests     those that need a GPU
    speed     bench.throughput of `125m`: AdamW and Muon, plain and compiled
    memory    bench.gpu_loop of `125m` and `1b`: compiled, computed again, adapters
    codec     bench.codec
    noloco    three real peers on this one card train `125m`: one alone, two join, one of them is
              killed and comes back, one is exported
    diloco    the same in fragments
    box       as noloco, and the first peer trains on all cards (`--gpus all`); left out where
              there is one
    demo      `python -m demo --method pipeline`

`make gpu` runs tests, speed, memory, noloco and box; what they take adds up to some nine minutes on
an H100. Without a card it ends with one sentence and code 2.

Their text is the Python source of this environment, their tokenizer is made of it: nothing is
downloaded. What commands say is in FOLDER/PART.log, their figures in FOLDER/*.json, what peers did
in their event logs below FOLDER/PART; FOLDER/gpu.json has when things happened. `--preset demo`
with `--device cpu` tries the script itself.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psutil
import torch
import trio
from tokenizers import ByteLevelBPETokenizer

from demo.plan import to_toml
from demo.processes import Peers, RunningPeer, console_script, open_peers
from peer.cli.new import PRESETS, preset_spec
from protocol.run.run_spec import RunSpec

from .report import machine

TEXT_CHARACTERS: Final = 24_000_000
VOCABULARY: Final = {"demo": 512, "125m": 50257, "1b": 50257}
THREADS: Final = 2
WAIT_S: Final = 120.0
"""The longest wait for one event of a peer."""
ALONE_ROUNDS: Final = 5
TOGETHER_ROUNDS: Final = 6
INNER_STEPS: Final = {"noloco": 10, "diloco": 20}
DILOCO: Final = {
    "blocks_per_fragment": 4,
    "learning_rate": 0.7,
    "momentum": 0.6,
    "overlap_steps": 3,
}
AVERAGED: Final = {"noloco": "RoundAveraged", "diloco": "FragmentReturned"}
BOX: Final = "box"
WRONG_USAGE: Final = 2
LIBRARIES: Final = ("loco-peer", "torch", "transformers", "hivemind", "numpy")
LOOPS: Final = (
    "--preset 125m --sequences 32 --compile",
    "--preset 1b --sequences 4 --batch 16",
    "--preset 1b --sequences 8 --batch 16 --recompute",
    "--preset 1b --sequences 4 --batch 16 --lora",
)
"""Settings of bench.gpu_loop."""
SPEEDS: Final[tuple[tuple[str, list[str]], ...]] = (
    ("adamw", []),
    ("adamw", ["--compile"]),
    ("muon", ["--compile"]),
)
GPU_TESTS: Final = ("tests/numerics", "tests/peer/codec/test_codecs.py")


def commands(part: str, options: argparse.Namespace) -> list[list[str]]:
    """Commands of a part that has no swarm of its own; `python -m` is left out."""
    out, device = str(options.out), options.device
    if part == "tests":
        return [["pytest", "-q", "-p", "no:cacheprovider", "-k", "cuda or gpu", *GPU_TESTS]]
    if part == "memory":
        return [["bench.gpu_loop", "--device", device, *loop.split()] for loop in LOOPS]
    if part == "codec":
        return [["bench.codec", "--json", f"{out}/codec.json"]]
    if part == "demo":
        return [["demo", "--method", "pipeline", "--device", device, "--out", f"{out}/demo"]]
    speed = ["bench.throughput", "--device", device, "--preset", options.preset]
    return [
        [
            *speed,
            "--optimizer",
            optimizer,
            *extra,
            "--json",
            f"{out}/{optimizer}{''.join(extra)}.json",
        ]
        for optimizer, extra in SPEEDS
    ]


def run_commands(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run them one by one, and keep what they say."""
    told = {}
    with (options.out / f"{part}.log").open("w") as log:
        for command in commands(part, options):
            print(*command, flush=True)
            began_s = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", *command], stdout=log, stderr=log, check=False
            )
            told[" ".join(command)] = [done.returncode, round(time.monotonic() - began_s, 1)]
    return {"exit code and seconds": told}


def write_text(folder: Path, vocabulary: int) -> None:
    """A corpus of Python sources in `data`, and a tokenizer of it in `tokenizer`."""
    (folder / "data").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    size, files = 0, []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text("utf-8", errors="ignore").replace("\0", "")
        if size < TEXT_CHARACTERS:
            size += len(text)
            files.append(text)
    (folder / "data" / "python.txt").write_text("\n\n".join(files))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        files,
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))


def run_spec(preset: str, method: str, text: Path) -> RunSpec:
    """The preset with Muon on our text, without an end."""
    tree = preset_spec(preset, method).model_dump()
    tree["name"] = method
    tree["data"] |= {"source": f"text:{text}/data/*.txt", "tokenizer": str(text / "tokenizer")}
    tree["optimizer"] |= {"warmup_steps": 30, "schedule": "constant"}
    tree["training"] |= {"total_steps": 1_000_000, "micro_batch": 8}
    tree["sync"] |= {"inner_steps": INNER_STEPS[method], "validate_every": 4}
    if method == "diloco":
        tree["sync"]["diloco"] = DILOCO
    return RunSpec.model_validate(tree)


def events(peer: RunningPeer, name: str) -> list[dict[str, Any]]:
    """Events of that name that this home's peers told, the killed one's included."""
    lines = peer.home.event_log_path.read_bytes().split(b"\n")[:-1]
    return [event for event in map(json.loads, lines) if event["event"] == name]


class Swarm:
    """Three peers on one card, and when what happened to them."""

    def __init__(self, peers: Peers, method: str, first: Sequence[str] = ()) -> None:
        """`first` are options of the first peer alone."""
        self._peers = peers
        self._first = first
        self._averaged = AVERAGED[method]
        self.found: dict[str, Any] = {}

    async def start(self, name: str, command: Sequence[str], told: str) -> RunningPeer:
        """A peer that trains; `told` names its times in what is found."""
        began_s = trio.current_time()
        peer = await self._peers.start(name, command, THREADS)
        ready_s = round(trio.current_time() - began_s, 2)
        before = len(events(peer, "TrainerStarted")) if told == "back" else 0
        trains_s = await self.until(peer, "TrainerStarted", before + 1)
        self.found[told] = {"ready_s": ready_s, "trainer_started_s_later": trains_s}
        return peer

    async def until(self, peer: RunningPeer, name: str, count: int) -> float | None:
        """Seconds until a peer has told that event so often, or None if it took too long."""
        began_s = trio.current_time()
        with trio.move_on_after(WAIT_S):
            while len(events(peer, name)) < count:  # noqa: ASYNC110 - another process tells it
                await trio.sleep(0.1)
            return round(trio.current_time() - began_s, 2)
        return None

    async def play(self, run_toml: Path) -> RunningPeer:
        """One alone, three together, one killed, and back. Returns the founder."""
        first = await self.start("peer-1", ["start", str(run_toml), *self._first], "founder")
        await self.until(first, "RoundClosed", ALONE_ROUNDS)
        join = ["join", "--yes", "--bootstrap", first.ready["addresses"][0]]
        second = await self.start("peer-2", join, "second")
        third = await self.start("peer-3", join, "third")
        for peer in (second, third):
            await self.until(peer, self._averaged, TOGETHER_ROUNDS)
        daemon = psutil.Process(third.process.pid).children()[0]
        daemon.kill()  # its keeper ends the rest
        await third.process.wait()
        third = await self.start("peer-3", ["start"], "back")
        count = len(events(third, self._averaged))
        self.found["back"]["averaged_s_later"] = await self.until(third, self._averaged, count + 1)
        return first


async def run_swarm(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Make text, play it, and export the founder's model."""
    folder, cards = options.out / part, list[str]()
    method = "noloco" if part == BOX else part
    if part == BOX and options.cards < 2:
        return {"left out": f"{options.cards} card"}
    if part == BOX:
        cards = ["--gpus", str(options.cards)]
    await trio.to_thread.run_sync(write_text, folder, VOCABULARY[options.preset])
    run_toml = folder / "run.toml"
    run_toml.write_text(to_toml(run_spec(options.preset, method, folder)))
    async with open_peers(folder, options.device) as peers:
        swarm = Swarm(peers, method, cards)
        first = await swarm.play(run_toml)
        export = ["export", "--hf", str(folder / "export"), "--home", str(first.home.root)]
        done = await trio.run_process([str(console_script()), *export], check=False)
        swarm.found["export"] = done.returncode
    return swarm.found


def measured_on() -> dict[str, Any]:
    """The card, its driver, versions and the commit, as far as they can be asked."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return {
        "machine": machine(),
        "processors": os.cpu_count(),
        "cards": _said(query).splitlines(),
        "versions": {name: version(name) for name in LIBRARIES},
        "commit": _said(["git", "describe", "--always", "--dirty"]),
    }


def _said(command: Sequence[str]) -> str:
    """Empty where there is no such program, or it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ran.stdout.strip()


def main() -> None:
    """Run the parts, one after the other."""
    parts = ("tests", "speed", "memory", "codec", "noloco", "diloco", BOX, "demo")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--out", type=Path, required=True, help="folder, which must not exist")
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--preset", choices=PRESETS, default="125m")
    options = parser.parse_args()
    options.cards = torch.cuda.device_count()
    if options.device.startswith("cuda") and not options.cards:
        print(f"bench.gpu: torch {torch.__version__} finds no CUDA card here", file=sys.stderr)
        sys.exit(WRONG_USAGE)
    if options.out.exists():
        print(f"bench.gpu: {options.out} exists already: name another folder", file=sys.stderr)
        sys.exit(WRONG_USAGE)
    options.out.mkdir(parents=True)
    options.out = options.out.resolve()
    found = measured_on()
    for part in options.parts or parts:
        swarm = part in (*AVERAGED, BOX)
        found[part] = trio.run(run_swarm, part, options) if swarm else run_commands(part, options)
        (options.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
