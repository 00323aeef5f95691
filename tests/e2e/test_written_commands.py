"""The commands of "Start here" and the recipes do what the pages say, one page after the other.

Each page has a folder of its own, and each machine that it names a home of its own. What stays in
the foreground, as a peer does, counts as come up when it has trained, and must have ended well when
the page is over.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from console import ROOT, Written, commands_of, tried_pages
from swarm import START_S, Swarm, free_port, open_swarm, within

UP: Final = re.compile(r"step [\d,]+ of|waiting for a peer that holds")
"""A peer has trained, or waits for another stage's."""
COMMAND_S: Final = 2 * START_S
FIRST: Final = ("", "first")
"""Names of the machine whose address the others join by."""
IN_CI: Final = "one-machine"
PAGES: Final = [
    pytest.param(page, id=page.stem, marks=() if page.stem == IN_CI else pytest.mark.long)
    for page in tried_pages()
    if any(not written.not_run for written in commands_of(page))
]
"""They take minutes together, so `make test` leaves out all but one. What the page of two machines
does, other tests of this folder do in the short run too: `doctor`, `export --swarm`, `leave`."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Somebody who types what a page says, on all of its machines.

    The pages' ports may be taken here, so others stand for them.
    """

    folder: Path
    swarm: Swarm
    port: int = field(default_factory=free_port)
    metrics: int = field(default_factory=free_port)
    typed: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)

    def type(self, written: Written, number: int) -> None:
        """Wait until the command has ended well, or its peer has trained."""
        line = re.sub(r"(192\.0\.2\.2|127\.0\.0\.1):31337", f"127.0.0.1:{self.port}", written.line)
        line = line.replace(":9464", f":{self.metrics}")
        said = self.folder / f"{number}.said"
        with said.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", line],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment(written),
                start_new_session=True,
            )
        self.typed.append((line, process))
        within(lambda: process.poll() is not None or UP.search(said.read_text()), COMMAND_S)
        ended, words = process.poll(), said.read_text()
        assert ended == 0 or (ended is None and UP.search(words)), f"{line}: {ended}\n{words}"

    def environment(self, written: Written) -> dict[str, str]:
        """Of a small machine, whose default home is its own."""
        first = written.machine in FIRST and "--home" not in written.line
        return self.swarm.environment | {
            "HOME": str(self.folder),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_DATA_HOME": str(self.folder / f"data-{written.machine}"),
            "LOCO_DEVICE": "cpu",
            "LOCO_GRACE": "60",
            "LOCO_LISTEN": f"127.0.0.1:{self.port if first else 0}",
            "LOCO_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    (tmp_path / "loco-peer").symlink_to(ROOT)
    with open_swarm(tmp_path) as swarm:
        reader = Reader(tmp_path, swarm)
        yield reader
    for _, process in reader.typed:
        process.wait()


@pytest.mark.e2e
@pytest.mark.parametrize("page", PAGES)
def test_each_command_does_what_its_page_says(page: Path, reader: Reader) -> None:
    for number, written in enumerate(commands_of(page)):
        if not written.not_run:
            reader.type(written, number)
    for line, process in reader.typed:
        assert process.wait(COMMAND_S) == 0, line
