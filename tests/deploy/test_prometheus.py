"""A real Prometheus server scrapes peers, and every query of the dashboard returns data there."""

import shutil
import subprocess
from urllib.parse import urlsplit

import pytest
import trio
from prometheus import empty_panels, needs_prometheus, running_prometheus
from snapshots import full_metrics, full_record

from peer.facts import RoundTiming
from peer.observe.endpoint import Site, pages_of, serve
from peer.observe.metrics import Metrics
from peer.options.values import HostPort
from protocol.microbatch.core import MicrobatchEvent


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


@pytest.mark.long
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
        now.facts.count_averaged()
        now.facts.microbatches[MicrobatchEvent.DONE] += 1
        now.facts.pipeline.other_plans += 1
        if scrapes == 5:
            scraped_often.set()
        return now

    now = full_record()
    metrics = Metrics(read, version="0.1.0")
    async with trio.open_nursery() as nursery:
        site = Site(pages_of(metrics, lambda history: {}))
        url = await nursery.start(serve, HostPort("127.0.0.1", 0), site)
        async with running_prometheus(tmp_path, [urlsplit(url).netloc]) as prometheus:
            with trio.fail_after(60):
                await scraped_often.wait()
            (target,) = await prometheus.targets()
            assert target["health"] == "up", target
            assert await empty_panels(prometheus) == []
        nursery.cancel_scope.cancel()
