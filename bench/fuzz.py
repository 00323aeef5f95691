"""Messages drawn from the wire schema, thrown at the codec and at swarms that train.

First the codec: of every type of message so many examples, each said and read again, and read with
one thing in it replaced, removed or added (bench/fuzzing/headers.py). All that may come of it is
the same message, or RemoteProtocolError. The same is done with what travels inside payloads, under
a signature of the liar's own: run specs, link vectors, snapshots, records, statements of admission.

Then sieges: three honest peers train in virtual time, and a hostile one opens streams of every
conversation at them, says one to three messages on each, and answers what it is asked with more
(bench/fuzzing/hostile.py): once as a member that has said a proper hello and beats, once as a
stranger. They relay, so it speaks to relays as well. Volleys begin with each type of message a
twentieth as often as the codec reads it. An error that nobody expected ends the simulation;
afterwards the honest peers must be there, linked, and average on. One more siege is of the
directory, with real p2pds and tables (bench/fuzzing/directories.py).

A finding is shown with what was said; the exit code is 1 then.

    python -m bench.fuzz [--examples N] [--seed N] [--full] [--json FILE]
"""

import itertools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from bench.fuzzing.directories import besieged_directory
from bench.fuzzing.headers import KINDS, check, with_damage
from bench.fuzzing.payloads import KINDS as PAYLOADS
from bench.fuzzing.payloads import check_payload, damaged_payloads
from bench.fuzzing.swarms import METHODS, Siege, besieged
from bench.fuzzing.values import Values
from bench.report import Goal, Report, Row, options
from protocol.wire.fields import Message

SHORT: Final = 1_000
FULL: Final = 10_000
"""Examples of each type."""
PER_VOLLEY: Final = 20
POOL: Final = 60
SHOWN_CHARS: Final = 6_000


def codec_row(examples: int, seed: int, kind: type[Message]) -> Row:
    """Say and read messages of one type."""
    strategy = with_damage(kind)
    return _tried(f"codec: {kind.__name__}", examples, seed, strategy, lambda told: check(*told))


def payload_row(examples: int, seed: int, name: str) -> Row:
    """Read payloads of one kind."""
    strategy = damaged_payloads(name)
    return _tried(f"payload: {name}", examples, seed, strategy, partial(check_payload, name))


def _tried(
    what: str, examples: int, seed: int, strategy: Values, check: Callable[[Any], object]
) -> Row:
    """Check so many examples of a strategy."""
    told = 0

    @seeded(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def read(drawn: object) -> None:
        nonlocal told
        told += 1
        check(drawn)

    def play() -> int:
        read()
        return told

    return _row(what, play)


def siege_row(siege: Siege) -> Row:
    """Besiege a swarm."""
    with tempfile.TemporaryDirectory() as folder:
        who = "member" if siege.linked else "stranger"
        return _row(f"{siege.method}, a {who}", lambda: besieged(siege, Path(folder)).total())


def directory_row(examples: int, seed: int) -> Row:
    """Besiege a directory."""
    with tempfile.TemporaryDirectory() as folder:
        play = partial(besieged_directory, Path(folder), examples, POOL, seed)
        return _row("directory, a stranger", lambda: trio.run(play).total())


def _row(what: str, play: Callable[[], int]) -> Row:
    began_s, messages, found = time.perf_counter(), 0, 0
    try:
        messages = play()
    except Exception:  # noqa: BLE001 - whatever it is, it was not expected
        found = 1
        shown = traceback.format_exc()
        print(f"FOUND in {what}:\n...{shown[-SHOWN_CHARS:]}", file=sys.stderr)
    return {
        "what": what,
        "messages": messages,
        "seconds": time.perf_counter() - began_s,
        "found": found,
    }


def main() -> int:
    """Fuzz; 1 where something was found."""
    parser = options(__doc__)
    parser.add_argument("--examples", type=int, help="of each type of message")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    examples = arguments.examples or (FULL if arguments.full else SHORT)
    per_type = max(1, examples // PER_VOLLEY)
    sieges = [
        Siege(method, linked, per_type, POOL, arguments.seed)
        for method in METHODS
        for linked in (True, False)
    ]
    began_s = time.perf_counter()
    report = Report("fuzz", "Messages drawn from the wire schema", {"examples": examples})
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        done = itertools.chain(
            processes.map(siege_row, sieges),
            processes.map(partial(directory_row, per_type), [arguments.seed]),
            processes.map(partial(payload_row, examples, arguments.seed), PAYLOADS),
            processes.map(partial(codec_row, examples, arguments.seed), KINDS),
        )
        for row in done:
            print(" ".join(map(str, row.values())), file=sys.stderr)
            report.rows.append(row)
    total, found = (sum(int(row[name]) for row in report.rows) for name in ("messages", "found"))
    report.notes.append(f"{total} messages in {time.perf_counter() - began_s:.0f} s")
    report.goals.append(Goal("errors that nobody expected", found, at_most=0))
    report.publish(arguments.json)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
