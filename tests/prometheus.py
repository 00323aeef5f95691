"""A real Prometheus server for tests: deploy/prometheus/prometheus.yml with other targets."""

import json
import math
import shutil
import signal
import socket
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest
import trio
import yaml
from dashboard import ROOT, queries
from existing import existing

SCRAPE_INTERVAL_S = 1
START_S = 30
STOP_S = 10

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="no prometheus on PATH (Debian: apt-get install prometheus)",
)


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    url: str

    async def query(self, expression: str) -> list[float]:
        """The values of an instant query, those that are numbers."""
        answer = await self._get("query", query=expression)
        values = [float(sample["value"][1]) for sample in answer["result"]]
        return [value for value in values if math.isfinite(value)]

    async def alerts(self) -> list[str]:
        """Those that fire, or are about to, with the instance."""
        told = [alert["labels"] for alert in (await self._get("alerts"))["alerts"]]
        return [f"{of['alertname']} {of.get('name', '')} {of.get('instance')}" for of in told]

    async def targets(self) -> list[dict[str, Any]]:
        return (await self._get("targets"))["activeTargets"]

    async def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"

        def fetch() -> bytes:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.read()

        tree = json.loads(await trio.to_thread.run_sync(fetch))
        assert tree["status"] == "success", tree
        return tree["data"]


@asynccontextmanager
async def running_prometheus(folder: Path, targets: Sequence[str]) -> AsyncIterator[Prometheus]:
    """Scrape `targets` (host:port) as our configuration says, but each second."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = folder / "prometheus.yml"
    config.write_text(_config(targets))
    arguments = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=info",
    ]
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(_run, ["prometheus", *arguments])
        try:
            await _wait_ready(process)
            nursery.start_soon(_drain, process)
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            process.send_signal(signal.SIGTERM)


def _config(targets: Sequence[str]) -> str:
    tree = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    tree["global"] |= {"scrape_interval": f"{SCRAPE_INTERVAL_S}s", "scrape_timeout": "1s"}
    tree["scrape_configs"][0]["static_configs"] = [{"targets": list(targets)}]
    tree["rule_files"] = [str(ROOT / "deploy/prometheus" / each) for each in tree["rule_files"]]
    return yaml.safe_dump(tree)


async def _run(command: Sequence[str], *, task_status: Any) -> None:
    process = await trio.lowlevel.open_process(list(command), stdout=DEVNULL, stderr=-1)
    task_status.started(process)
    try:
        await process.wait()
    finally:
        with trio.CancelScope(shield=True):
            with trio.move_on_after(STOP_S):
                process.terminate()
                await process.wait()
            process.kill()
            await process.wait()


async def _wait_ready(process: trio.Process) -> None:
    said = b""
    with trio.fail_after(START_S):
        while b"Server is ready" not in said:
            more = await existing(process.stderr).receive_some()
            assert more, said.decode()
            said += more


async def _drain(process: trio.Process) -> None:
    async for _ in existing(process.stderr):
        pass


async def empty_panels(prometheus: Prometheus, *without: str) -> list[str]:
    """Queries of the dashboards that return nothing yet, but for dashboards and metrics `without`.

    A metric is told by how its name begins.
    """
    left_out = {q for q in queries() for each in without if q.board == each or each in q.runnable()}
    asked = [query for query in queries() if query not in left_out]
    return [
        f"{query.board}: {query.panel}: {query.runnable()}"
        for query in asked
        if not await prometheus.query(query.runnable())
    ]
