"""A real peer tells a service what is wrong and that it is over, and shows its URL to nobody."""

import pytest
from loopback_service import open_service
from swarm import START_S, Swarm, ending, open_swarm, wait_until

from peer.observe.notify import SETTLE_S

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.e2e]


def test_a_founder_tells_that_it_is_alone_until_somebody_comes(tmp_path_factory):
    with open_service() as service, open_swarm(tmp_path_factory.mktemp("notified")) as swarm:
        environment = swarm.environment | {"LOCO_NOTIFY": service.url}
        founder = swarm.found(environment=environment)
        wait_until(lambda: service.got, "a message", timeout_s=START_S + SETTLE_S, peers=[founder])
        assert [each["name"] for each in founder.status()["problems"]] == ["alone"]
        assert founder.metric("loco_problem") == 1
        assert "wrong" in told_by(swarm, founder.name)
        with ending(swarm.join(founder)) as joiner:
            peers = [founder, joiner]
            wait_until(
                lambda: len(service.got) > 1, "it", timeout_s=START_S + SETTLE_S, peers=peers
            )
            assert founder.status()["problems"] == []
        first, second = (body.splitlines() for _, body in service.got)
        assert first[0] == second[0] == f"loco-peer {founder.status()['peer_id'][-8:]} of run 'e2e'"
        assert first[1].startswith("wrong: no other peer is linked; ")
        assert first[1].endswith(" (docs/troubleshooting.md#alone)")
        assert second[1:] == ["over: alone"]
        files = [path for path in founder.home.root.rglob("*") if path.is_file()]
        assert not [path for path in files if b"secret-topic" in path.read_bytes()]


def told_by(swarm: Swarm, name: str) -> str:
    return swarm.loco("status", "--home", str(swarm.folder(name))).stdout
