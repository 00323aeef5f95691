"""The peers of one system in bench/exchange_speed.py: started, asked together, measured."""

import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import trio

from .children import Answer, Child, start_command
from .exchange_speed_data import REPEATED, SCALE, model_layout
from .shaped_network import ShapedNetwork

LARGEST_ERROR: Final = {"ours": 0.02, "hivemind": 0.1, "gloo": 1e-5}
"""Root mean square of the error over that of the mean. Our codes leave 0.009; hivemind codes what
is to be added to the own values, which is larger than the mean: 0.03 among 4. Nothing averaged: 1
and more."""
MAX_WARMUPS: Final = 5
PATIENCE_S: Final = 300.0


class WrongResult(Exception):
    """A system was through with an exchange, but not with the right values."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Some exchanges of one system over one link.

    Attributes:
        times_s: of each exchange.
        peers_cpu_s: of all peers together, median of the exchanges.
        p2pd_cpu_s: of all processes that they have started.
        strange_cpu_s: of all other processes of the machine.
        wire_bytes: of the busiest interface in its busier direction, median of the exchanges.
        error: the largest of any peer.
    """

    times_s: list[float]
    peers_cpu_s: float
    p2pd_cpu_s: float
    strange_cpu_s: float
    wire_bytes: float
    error: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)


@dataclass(frozen=True, slots=True)
class _Once:
    """One exchange."""

    time_s: float
    peers_cpu_s: float
    p2pd_cpu_s: float
    strange_cpu_s: float
    wire_bytes: int
    whole: bool


class Group:
    """All peers of one system. Made by `open_group`."""

    def __init__(self, system: str, network: ShapedNetwork, children: Sequence[Child]) -> None:
        self._system, self._network, self._children = system, network, children

    async def ask_all(self, what: str, **details: Any) -> list[Answer]:
        """Ask all peers at once."""
        answers: dict[int, Answer] = {}

        async def ask(index: int) -> None:
            answers[index] = await self._children[index].ask(what, **details)

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for index in range(len(self._children)):
                    nursery.start_soon(ask, index)
        return [answers[index] for index in range(len(self._children))]

    async def measure(self, repeats: int) -> Measured:
        """Measure so many exchanges, after one (or more, until one is whole) that does not count.

        Raises:
            WrongResult
        """
        for _ in range(MAX_WARMUPS):
            if (await self._exchange()).whole:
                break
        counted = [await self._exchange() for _ in range(repeats)]
        if not all(each.whole for each in counted):
            raise WrongResult(f"{self._system} has left out peers, which the machine held up")
        return Measured(
            [each.time_s for each in counted],
            statistics.median(each.peers_cpu_s for each in counted),
            statistics.median(each.p2pd_cpu_s for each in counted),
            statistics.median(each.strange_cpu_s for each in counted),
            statistics.median(each.wire_bytes for each in counted),
            await self._check(),
        )

    async def _exchange(self) -> _Once:
        await self.ask_all("prepare")
        hosts = range(len(self._children))
        before = [self._network.traffic(host) for host in hosts]
        cpu_before_s = self._cpu_s()
        answers = await self.ask_all("exchange")
        peers_s, p2pd_s, all_s = (
            now_s - before_s for now_s, before_s in zip(self._cpu_s(), cpu_before_s, strict=True)
        )
        passed = [self._network.traffic(host) - before[host] for host in hosts]
        began_s = min(answer["began_s"] for answer in answers)
        return _Once(
            max(answer["ended_s"] for answer in answers) - began_s,
            peers_s,
            p2pd_s,
            max(0.0, all_s - peers_s - p2pd_s),
            max(max(each.sent_bytes, each.received_bytes) for each in passed),
            all(answer.get("whole", True) for answer in answers),
        )

    def _cpu_s(self) -> tuple[float, float, float]:
        """CPU seconds of all peers, of what they have started, and of all processes, so far."""
        peers = [psutil.Process(child.pid) for child in self._children]
        started = [each for peer in peers for each in peer.children(recursive=True)]
        machine = psutil.cpu_times()
        all_s = machine.user + machine.nice + machine.system
        return sum(map(_cpu_s, peers)), sum(map(_cpu_s, started)), all_s

    async def _check(self) -> float:
        """The largest error of any peer."""
        answers = await self.ask_all("check", num_peers=len(self._children))
        if len({answer["digest"] for answer in answers}) != 1:
            raise WrongResult(f"the peers of {self._system} hold different bytes")
        error = max(float(answer["error"]) for answer in answers)
        if not error <= LARGEST_ERROR[self._system]:
            raise WrongResult(f"the average of {self._system} has an error of {error:.3g}")
        return error


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@asynccontextmanager
async def open_group(
    system: str, network: ShapedNetwork, num_values: int, hivemind_python: Path | None
) -> AsyncIterator[Group]:
    """Start the peers of a system, one on each host, and have them know each other."""
    with tempfile.TemporaryDirectory(prefix="loco") as folder:
        async with AsyncExitStack() as children:
            started = []
            for host in range(network.num_hosts):
                command = _command(system, network, host, num_values, folder, hivemind_python)
                child = start_command(f"{system} {host}", network.command(host, command))
                started.append(await children.enter_async_context(child))
            group = Group(system, network, started)
            hellos = await group.ask_all("hello")
            await group.ask_all("join", hellos=hellos)
            yield group


def _command(
    system: str,
    network: ShapedNetwork,
    host: int,
    num_values: int,
    folder: str,
    hivemind_python: Path | None,
) -> list[str]:
    ours = [sys.executable, "-m"]
    who = [str(host), str(num_values)]
    if system == "ours":
        return [*ours, "bench.exchange_speed_peer", folder, network.address(host), *who]
    if system == "gloo":
        return [*ours, "bench.exchange_speed_gloo", network.address(0), *who]
    script = Path(__file__).with_name("hivemind_allreduce.py")
    sizes = [str(entry.padded_size) for entry in model_layout(num_values).entries]
    values = [str(host), str(REPEATED), str(SCALE), *sizes]
    return [str(hivemind_python), "-W", "ignore", str(script), network.address(host), *values]
