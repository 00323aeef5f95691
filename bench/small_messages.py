"""Do small messages get through while bulk fills the link?

Two peers on hosts of their own (shaped_network.py), each with its p2pd; the link between them
carries less than the sender has. For some time one sends bulk over one stream as fast as it may,
and all the while asks for a short answer over another, ten times a second: what a beat, a proposal
or a question for a result would wait. Once with the pace of peer/network/pacing.py, and once
without; beside it the rate at which bulk arrived.

Without the pace, bulk waits in the buffers of kernel and link, and small messages behind it: all
streams of two peers share one connection.
"""

import statistics
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any, Final

import trio

from .children import Child, start_command
from .report import Goal, Report, options
from .shaped_network import AccessLink, ShapedNetwork, missing, shaped_network
from .small_messages_peer import peer_command

LINKS_MBPS: Final = (5.0, 20.0, 100.0)
SECONDS: Final = 25
FULL_SECONDS: Final = 60
SHARE_OF_LINK: Final = 0.85
FASTER: Final = 5.0


async def measure(seconds: int, links_mbps: Sequence[float]) -> Report:
    """Measure everything; see the top of the file."""
    report = Report(
        "small_messages", "Answers to small questions while bulk fills the link", {"s": seconds}
    )
    for mbps in links_mbps:
        link = AccessLink(mbps * 1e6, mbps * 1e6)
        with shaped_network([link, link]) as network:
            free, paced = [await _once(network, seconds, paced=paced) for paced in (False, True)]
        for name, found in (("free", free), ("paced", paced)):
            report.rows.append({"link Mbit/s": mbps, "bulk": name, **_row(found, mbps)})
        ratio = statistics.median(free["times_s"]) / statistics.median(paced["times_s"])
        report.goals += [
            Goal(f"median answer at {mbps:g} Mbit/s: free / paced", ratio, at_least=FASTER),
            Goal(
                f"share of {mbps:g} Mbit/s for paced bulk",
                paced["bytes_per_s"] * 8e-6 / mbps,
                at_least=SHARE_OF_LINK,
            ),
        ]
    return report


def _row(found: dict[str, Any], mbps: float) -> dict[str, Any]:
    times_ms = sorted(1000 * seconds for seconds in found["times_s"])
    return {
        "answers": len(times_ms),
        "median ms": statistics.median(times_ms),
        "95% within ms": times_ms[int(0.95 * (len(times_ms) - 1))],
        "longest ms": times_ms[-1],
        "bulk Mbit/s": found["bytes_per_s"] * 8e-6,
        "share of link": found["bytes_per_s"] * 8e-6 / mbps,
    }


async def _once(network: ShapedNetwork, seconds: int, *, paced: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="loco") as folder:
        commands = [
            network.command(host, peer_command(folder, host, network.address(host), paced=paced))
            for host in (0, 1)
        ]
        async with (
            start_command("sender", commands[0]) as sender,
            start_command("taker", commands[1]) as taker,
        ):
            return await _talk(sender, taker, seconds)


async def _talk(sender: Child, taker: Child, seconds: int) -> dict[str, Any]:
    hello = await taker.ask("hello")
    await sender.ask("connect", **hello)
    return await sender.ask("send", peer_id=hello["peer_id"], seconds=seconds)


def _parser() -> ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--links", type=float, nargs="+", metavar="MBPS", default=LINKS_MBPS)
    return parser


def main() -> None:
    """Measure and publish."""
    chosen = _parser().parse_args()
    if (sentence := missing()) is not None:
        raise SystemExit(f"small_messages: {sentence}")
    seconds = FULL_SECONDS if chosen.full else SECONDS
    trio.run(measure, seconds, chosen.links).publish(chosen.json)


if __name__ == "__main__":
    main()
