"""Pins of what peers do, and of how far things walk through the code.

    python -m tests.pins                    make event_logs.json anew
    python -m tests.pins check WORLD...     compare the first seed of these with what is kept
    python -m tests.pins logs FOLDER        write all logs, a file for each world and seed
    python -m tests.pins paths              print how long each walk is
    python -m tests.pins paths WALK         print the functions that are called on it

Two folders of logs, one written before a change and one after, can be compared with `diff -r`.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), *(str(HERE.parent / name) for name in ("peer/daemon", "peer/stages"))]

from pinned_logs import (  # noqa: E402 - pytest puts these folders on the path by itself
    happened_in,
    log_of,
    pins_of_all,
    read_pins,
    seed_pin,
    write_pins,
)
from pinned_worlds import WORLDS  # noqa: E402
from walks import WORLDS as WALKS  # noqa: E402
from walks import traced  # noqa: E402


def check(worlds: list[str]) -> None:
    """End with an error if the first seed of one of these worlds is not as it is kept."""
    pinned = read_pins()
    found = {world: seed_pin(happened_in(world, 0)) for world in worlds}
    changed = [world for world in worlds if found[world] != pinned[world]["seeds"]["0"]]
    if changed:
        sys.exit(f"changed: {', '.join(changed)}")


def write_logs(folder: Path) -> None:
    """Write all logs."""
    folder.mkdir(parents=True, exist_ok=True)
    for world, (seeds, _) in WORLDS.items():
        for seed in range(seeds):
            path = folder / f"{world}-{seed}.jsonl"
            path.write_bytes(log_of(happened_in(world, seed).events))


def print_walks() -> None:
    """A line for each."""
    for name in WALKS:
        print(f"{name:22}", *(f"{n:4} {what}" for what, n in traced(name).walk._asdict().items()))


def print_functions(walk: str) -> None:
    """A line for each, by file."""
    for place, function in sorted(traced(walk).calls):
        print(place, function)


match sys.argv[1:]:
    case []:
        write_pins(pins_of_all())
    case ["check", *worlds]:
        check(worlds)
    case ["logs", folder]:
        write_logs(Path(folder))
    case ["paths"]:
        print_walks()
    case ["paths", walk] if walk in WALKS:
        print_functions(walk)
    case _:
        sys.exit(__doc__)
