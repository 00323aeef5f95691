"""Network namespaces that are there for as long as a block lasts.

Rules:
- Nothing touches the namespace of the machine. All is removed at the end, also after an error. What
  a process left behind that was killed is removed by the next one that opens some: a namespace's
  name says whose it is.
- Names are of this process and this block.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import psutil

_OWNER: Final = re.compile(r"loco(\d+)-")
_numbers = itertools.count()


class NetworkFailed(Exception):
    """The network could not be built; says what the tool said."""


class Namespaces:
    """Adds namespaces; made by `open_namespaces`.

    Attributes:
        prefix: what their names should begin with.
    """

    def __init__(self, prefix: str, stack: ExitStack) -> None:
        self.prefix = prefix
        self._stack = stack

    def add(self, name: str) -> None:
        """One more, with its loopback up. Raises NetworkFailed."""
        run("ip", "netns", "add", name)
        self._stack.callback(_remove, name)
        run("ip", "-netns", name, "link", "set", "lo", "up")


@contextmanager
def open_namespaces() -> Iterator[Namespaces]:
    """Raises NetworkFailed."""
    _remove_left_behind()
    with ExitStack() as stack:
        yield Namespaces(f"loco{os.getpid()}-{next(_numbers)}", stack)


def in_namespace(name: str, command: Sequence[str]) -> list[str]:
    """The command that runs the given one in a namespace."""
    return [tool_path("ip"), "netns", "exec", name, *command]


def why_none(tools: Sequence[str]) -> str | None:
    """Why there can be no namespaces here, in a sentence; None if nothing speaks against it."""
    if sys.platform != "linux":
        return "network namespaces are of Linux alone"
    if os.geteuid() != 0:
        return "only root may build network namespaces"
    for tool in tools:
        if shutil.which(tool) is None:
            return f"there is no {tool} (package iproute2)"
    return None


def run(tool: str, *arguments: str) -> str:
    """What the tool prints. Raises NetworkFailed."""
    command = [tool_path(tool), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NetworkFailed(f"{' '.join((tool, *arguments))}: {done.stderr.strip()}")
    return done.stdout


def tool_path(name: str) -> str:
    """Raises NetworkFailed."""
    path = shutil.which(name)
    if path is None:
        raise NetworkFailed(f"there is no {name} (package iproute2)")
    return path


def _remove_left_behind() -> None:
    """Namespaces of processes that are gone."""
    for line in run("ip", "netns", "list").splitlines():
        name = line.partition(" ")[0]
        owner = _OWNER.match(name)
        if owner and not psutil.pid_exists(int(owner[1])):
            _remove(name)


def _remove(name: str) -> None:
    """Its interfaces, and so the pairs that they belong to, go with it."""
    subprocess.run(
        [tool_path("ip"), "netns", "delete", name], check=False, stderr=subprocess.DEVNULL
    )
