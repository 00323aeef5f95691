"""A peer in a container of a provider, as others and health checks see it."""

from pathlib import Path

import pytest
from metadata_service import metadata_service
from swarm import START_S, Swarm, ending, free_port

from peer.observe.event_names import EventName
from peer.options.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def test_others_are_shown_the_address_that_the_provider_says(swarm: Swarm) -> None:
    port = free_port()
    environment = swarm.environment | {
        "PUBLIC_IPADDR": "203.0.113.9",
        f"VAST_TCP_PORT_{port}": "40123",
    }
    peer = swarm.join(swarm.founder, listen=f"0.0.0.0:{port}", environment=environment)
    with ending(peer):
        outside = f"/ip4/203.0.113.9/tcp/40123/p2p/{peer.peer_id}"
        assert peer.ready()["join"] == f"loco-peer join --bootstrap {outside}"
        status = peer.status()
        assert (status["address"], status["address_from"]) == (outside, "Vast.ai's environment")
        home = ("--home", str(peer.home.root))
        shown = swarm.loco("status", *home).stdout
        assert f"{outside}  (Vast.ai's environment" in shown
        assert peer.home.kept_port("listen") == port, "and not the one outside"
        health = swarm.loco("status", "--health", *home)
        assert (health.returncode, health.stdout[:6]) == (ExitCode.OK, "works:")


def test_health_tells_a_peer_that_finds_nobody_from_one_that_works(
    swarm: Swarm, tmp_path: Path
) -> None:
    founder = swarm.loco("status", "--health", "--home", str(swarm.founder.home.root))
    assert founder.returncode == ExitCode.OK, founder.stdout
    none = swarm.loco("status", "--health", "--home", str(tmp_path))
    assert (none.returncode, none.stdout[:20]) == (ExitCode.FAILURE, "no daemon is running")
    lost = swarm.join(f"127.0.0.1:{free_port()}")
    with ending(lost):
        lost.wait_event(EventName.BOOTSTRAP_FAILING, START_S)
        health = swarm.loco("status", "--health", "--home", str(lost.home.root))
    assert health.returncode == ExitCode.FAILURE
    assert health.stdout.startswith("alive, but it has not found its run: "), health.stdout


def test_a_peer_whose_machine_is_taken_away_leaves_with_a_checkpoint(swarm: Swarm) -> None:
    says = [b"FALSE"]
    with metadata_service(lambda *_: (200, says[0])) as where:
        environment = swarm.environment | {"LOCO_NOTICES": f"gcp@{where}"}
        peer = swarm.join(swarm.founder, environment=environment)
        with ending(peer):
            peer.wait_event(EventName.ROUND_OPENED, START_S)
            assert not peer.events(EventName.NOTICE_RECEIVED)
            says[0] = b"TRUE"
            assert peer.wait_exit(START_S) == ExitCode.OK, peer.report()
    ended = [EventName.NOTICE_RECEIVED, EventName.CHECKPOINT_WRITTEN]
    assert [event["event"] for event in peer.events(*ended)][-2:] == ended
