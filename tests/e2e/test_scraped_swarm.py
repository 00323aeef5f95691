"""A real Prometheus scrapes peers, and every query of the dashboard returns data there."""

from urllib.parse import urlsplit

import pytest
import trio
from prometheus import empty_panels, needs_prometheus, running_prometheus
from swarm import POLL_S, START_S

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@needs_prometheus
async def test_every_query_of_the_dashboard_returns_data_from_a_live_swarm(swarm, tmp_path):
    targets = [urlsplit(peer.ready()["metrics"]).netloc for peer in swarm.at_least(2)]
    missing = ["nothing was asked yet"]
    async with running_prometheus(tmp_path, targets) as prometheus:
        with trio.move_on_after(START_S):
            while missing := await empty_panels(prometheus, "(pipelines)"):
                await trio.sleep(POLL_S)
        assert missing == []
        assert {target["health"] for target in await prometheus.targets()} == {"up"}
