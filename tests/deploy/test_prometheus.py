"""A real Prometheus server scrapes peers, and every query of the dashboard returns data there."""

import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trio
from dashboard import queries
from prometheus import Prometheus, needs_prometheus, running_prometheus
from snapshots import full_metrics, full_record

from peer.facts import RoundTiming
from peer.observe.endpoint import serve_metrics
from peer.observe.metrics import Metrics
from peer.options.addresses import HostPort

LIVE_S = 300
"""Two peers on a busy machine: start, a few rounds, a few scrapes."""

RUN_SPEC = """
name = "scraped"

[model]
hidden_size = 32
intermediate_size = 64
num_layers = 1
num_heads = 2
context_length = 32

[data]
validation_blocks = 4

[optimizer]
warmup_steps = 5

[training]
total_steps = 1000000
batch_size = 2

[sync]
inner_steps = 200
"""


async def empty_panels(prometheus: Prometheus, without: str = "nothing") -> list[str]:
    """Queries of the dashboard that return nothing yet, but for those whose titles say this."""
    asked = [query for query in queries() if without not in query.panel + query.legend]
    return [
        f"{query.panel}: {query.runnable()}"
        for query in asked
        if not await prometheus.query(query.runnable())
    ]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on PATH")
def test_promtool_approves_of_names_units_and_help_texts():
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=full_metrics().render(),
        capture_output=True,
        check=False,
    )
    assert (done.stdout + done.stderr, done.returncode) == (b"", 0)


@pytest.mark.slow
@pytest.mark.e2e
@needs_prometheus
async def test_every_query_returns_data_from_a_peer_that_knows_everything(tmp_path):
    scrapes = 0
    scraped_often = trio.Event()

    def read():
        nonlocal scrapes
        scrapes += 1
        now.facts.count_timing(RoundTiming(0.5, 0.5, 0.5, 0.5))
        if scrapes == 5:
            scraped_often.set()
        return now

    now = full_record()
    metrics = Metrics(read, version="0.1.0")
    async with trio.open_nursery() as nursery:
        url = await nursery.start(
            serve_metrics, HostPort("127.0.0.1", 0), metrics.render, metrics.content_type
        )
        async with running_prometheus(tmp_path, [urlsplit(url).netloc]) as prometheus:
            with trio.fail_after(60):
                await scraped_often.wait()
            (target,) = await prometheus.targets()
            assert target["health"] == "up", target
            assert await empty_panels(prometheus) == []
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def running_peer(
    home: Path, news: trio.MemorySendChannel[None], *command: str
) -> AsyncIterator[dict[str, Any]]:
    """A peer of the command line; yields its line of `--json-ready`.

    Each line of its event log is news.
    """
    arguments = [
        Path(sys.executable).parent / "loco-peer",
        *command,
        "--home",
        home,
        "--json-ready",
    ]
    arguments += ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    arguments += ["--log-format", "json", "--device", "cpu", "--threads", "1"]
    async with trio.open_nursery() as nursery:
        process = await trio.lowlevel.open_process(
            [str(a) for a in arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        log = bytearray()
        try:
            nursery.start_soon(_listen, process.stderr, log, news)
            yield json.loads(await _first_line(process.stdout, log))
        finally:
            with trio.CancelScope(shield=True):
                process.terminate()
                with trio.move_on_after(20):
                    await process.wait()
                process.kill()
                await process.wait()
            nursery.cancel_scope.cancel()
    assert process.returncode == 0, log.decode()


async def _listen(stream: Any, log: bytearray, news: trio.MemorySendChannel[None]) -> None:
    async for chunk in stream:
        log += chunk
        with suppress(trio.WouldBlock):  # there is news already
            news.send_nowait(None)


async def _first_line(stream: Any, log: bytearray) -> bytes:
    line = b""
    while b"\n" not in line:
        more = await stream.receive_some()
        assert more, f"it ended before it was ready:\n{log.decode()}"
        line += more
    return line.partition(b"\n")[0]


@pytest.mark.slow
@pytest.mark.e2e
@needs_prometheus
async def test_every_query_of_the_dashboard_returns_data_from_a_live_swarm(tmp_path):
    spec = tmp_path / "run.toml"
    spec.write_text(RUN_SPEC)
    news, heard = trio.open_memory_channel[None](1)
    missing = ["nothing was asked yet"]
    with trio.move_on_after(LIVE_S):
        async with running_peer(tmp_path / "a", news, "start", str(spec)) as founder:
            bootstrap = founder["addresses"][0]
            async with running_peer(
                tmp_path / "b", news, "join", "--bootstrap", bootstrap
            ) as joiner:
                targets = [urlsplit(peer["metrics"]).netloc for peer in (founder, joiner)]
                async with running_prometheus(tmp_path, targets) as prometheus:
                    while missing := await empty_panels(prometheus, "(pipelines)"):
                        await heard.receive()
                    assert {t["health"] for t in await prometheus.targets()} == {"up"}
    assert missing == []
