"""The commands of "Start here" and the recipes do what the pages say, one page after the other.

Each page has a folder of its own, and each machine that it names a home of its own. What stays in
the foreground, as a peer does, counts as come up when it trains, and must have ended well when the
page is over.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from console import ROOT, Written, commands_of, tried_pages
from swarm import START_S, Swarm, free_port, open_swarm, within

TRAINS: Final = re.compile(r"training [\d,]+ parameters")
FIRST: Final = ("", "first")
"""Names of the machine whose address the others join by."""
WITH_RUNS: Final = [page for page in tried_pages() if any(not c.not_run for c in commands_of(page))]


@dataclass(frozen=True, slots=True)
class Reader:
    """Somebody who types what a page says, on all of its machines.

    The pages' ports may be taken here, so others stand for them.
    """

    folder: Path
    swarm: Swarm
    port: int = field(default_factory=free_port)
    metrics: int = field(default_factory=free_port)
    peers: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)

    def type(self, written: Written, number: int) -> None:
        """Wait until the command has ended well, or its peer trains."""
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
        within(lambda: process.poll() is not None or TRAINS.search(said.read_text()), START_S)
        if process.poll() is None:
            assert TRAINS.search(said.read_text()), f"{line}: goes on\n{said.read_text()}"
            self.peers.append((f"{line}\n", process))
        else:
            assert process.returncode == 0, f"{line}: {process.returncode}\n{said.read_text()}"

    def environment(self, written: Written) -> dict[str, str]:
        """Of a small machine, whose default home is its own."""
        first = written.machine in FIRST and "--home" not in written.line
        return self.swarm.environment | {
            "HOME": str(self.folder),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_DATA_HOME": str(self.folder / f"data-{written.machine}"),
            "LOCO_DEVICE": "cpu",
            "LOCO_LISTEN": f"127.0.0.1:{self.port if first else 0}",
            "LOCO_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    (tmp_path / "loco-peer").symlink_to(ROOT)
    with open_swarm(tmp_path) as swarm:
        yield Reader(tmp_path, swarm)


@pytest.mark.e2e
@pytest.mark.parametrize("page", WITH_RUNS, ids=lambda page: page.stem)
def test_each_command_does_what_its_page_says(page: Path, reader: Reader) -> None:
    for number, written in enumerate(commands_of(page)):
        if not written.not_run:
            reader.type(written, number)
    for line, process in reader.peers:
        within(partial(_ended, process), START_S)
        assert process.poll() == 0, f"{line}: {process.poll()}"


def _ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None
