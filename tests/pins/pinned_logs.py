"""What is kept of the logs of pinned_worlds.py: digests, and counts that say where they differ.

For each world: of each seed, digests of its log and of its numbers; of each kind of event, how many
each seed has, and a digest of all of them, with their fields and times. An event that goes, or
gains a field, changes the digests of the logs, and of the other kinds none.
"""

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

import blake3
from pinned_worlds import WORLDS, Happened

from simulation.swarm import LoggedEvent

FILE: Final = Path(__file__).with_name("event_logs.json")

Pins = dict[str, dict[str, dict[str, str]]]
"""World; `seeds` or `events`; seed or name of an event; what is kept of it."""


def happened_in(world: str, seed: int) -> Happened:
    """Run a world once more."""
    with tempfile.TemporaryDirectory() as folder:
        return WORLDS[world][1](seed, Path(folder))


def log_of(events: Collection[LoggedEvent]) -> bytes:
    """Canonical JSON, a line for each event.

    Of distances and losses four digits count: each processor sums in an order of its own.
    """
    lines = (json.dumps(_rounded(event), sort_keys=True, separators=(",", ":")) for event in events)
    return "".join(f"{line}\n" for line in lines).encode()


def _rounded(event: LoggedEvent) -> LoggedEvent:
    summed = ((name, event.get(name)) for name in ("distance", "loss"))
    return event | {name: float(f"{value:.4g}") for name, value in summed if value is not None}


def pins_of(world: str, seeds: Collection[int]) -> dict[str, dict[str, str]]:
    """What is kept of a world."""
    found = {seed: happened_in(world, seed) for seed in seeds}
    names = sorted({event["event"] for each in found.values() for event in each.events})
    return {
        "seeds": {str(seed): seed_pin(each) for seed, each in found.items()},
        "events": {name: _event_pin(name, list(found.values())) for name in names},
    }


def seed_pin(happened: Happened) -> str:
    """Digests of a log and of its numbers."""
    return f"log {_digest(log_of(happened.events))}, numbers {happened.numbers}"


def _event_pin(name: str, found: Collection[Happened]) -> str:
    logs = [[event for event in each.events if event["event"] == name] for each in found]
    counts = " ".join(str(len(events)) for events in logs)
    return f"{counts}, {_digest(b'|'.join(map(log_of, logs)))}"


def _digest(data: bytes) -> str:
    return blake3.blake3(data).hexdigest(length=8)


def pins_of_all() -> Pins:
    """What is to be kept now."""
    return {world: pins_of(world, range(seeds)) for world, (seeds, _) in WORLDS.items()}


def read_pins() -> Pins:
    """What is kept."""
    pins: Pins = json.loads(FILE.read_text())
    return pins


def write_pins(pins: Pins) -> None:
    """Keep this."""
    FILE.write_text(json.dumps(pins, indent=1) + "\n")


def differences(
    pinned: Mapping[str, Mapping[str, str]], found: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """A line for each seed and kind of event of a world that is not as it is kept."""
    for part in ("seeds", "events"):
        for name in sorted(pinned[part].keys() | found[part].keys()):
            before, now = pinned[part].get(name, "none"), found[part].get(name, "none")
            if before != now:
                yield f"{part[:-1]} {name}: {before} -> {now}"
