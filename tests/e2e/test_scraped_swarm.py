"""A real Prometheus scrapes a swarm: each query of the dashboards has data, no alert is near."""

from urllib.parse import urlsplit

import pytest
import trio
from dashboard import OF_EXPERTS, OF_STAGES
from prometheus import empty_panels, needs_prometheus, running_prometheus
from swarm import POLL_S, START_S

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@needs_prometheus
@pytest.mark.long
async def test_every_query_returns_data_from_a_live_swarm_and_no_alert_is_near(swarm, tmp_path):
    targets = [urlsplit(peer.ready()["metrics"]).netloc for peer in swarm.at_least(2)]
    missing = alerts = ["nothing was asked yet"]
    async with running_prometheus(tmp_path, targets) as prometheus:
        with trio.move_on_after(START_S):
            while missing := await empty_panels(prometheus, OF_STAGES, OF_EXPERTS):
                await trio.sleep(POLL_S)
            while alerts := [each for each in await prometheus.alerts() if not of_others(each)]:
                await trio.sleep(POLL_S)
        assert missing == []
        assert alerts == []
        assert {target["health"] for target in await prometheus.targets()} == {"up"}


def of_others(alert: str) -> bool:
    """Whether it tells of a stranger: a test that ran before may have sent one to this swarm."""
    return alert.startswith("LocoNote peer-refused ")
