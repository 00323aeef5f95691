"""The image, built and run by a real Docker engine."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Final

import pytest
from dashboard import ROOT
from docker_engine import Docker, build, missing, running_engine, wait_until

from peer.options.config import OPTIONS
from peer.options.exit_codes import ExitCode

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

IMAGE: Final = "loco-peer"
NETWORK: Final = "loco"
SUBNET: Final = "10.231.77.0/24"
FOUNDER: Final = "10.231.77.10"
"""Its address: names are looked up through rules of iptables, which is not everywhere."""
MAX_BYTES: Final = 2.3e9
MAX_CODE_BYTES: Final = 30e6
AVERAGING_S: Final = 600
HEALTH_S: Final = 300
STOPPED_TOGETHER: Final = 5
DOCKER_WAITS_S: Final = 10


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    try:
        with running_engine(tmp_path_factory.mktemp("docker")) as docker:
            build(docker, IMAGE)
            docker("network", "create", "--subnet", SUBNET, NETWORK)
            yield docker
            for container in docker("ps", "-aq").split():
                docker("rm", "-f", "-v", container)
            docker("volume", "prune", "-f")
            docker("network", "rm", NETWORK)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"packages of the engine cannot be downloaded here: {error}")


def run(docker: Docker, name: str, *words: str, options: tuple[str, ...] = ()) -> None:
    """A container that runs on, with a volume of its name."""
    threads = ("-e", "LOCO_THREADS=1", "-e", "OMP_NUM_THREADS=1")
    docker("run", "-d", "--name", name, "--network", NETWORK, "-v", f"{name}:/data", *threads,
           *options, IMAGE, *words)  # fmt: skip


def status(docker: Docker, name: str) -> dict[str, Any]:
    """Empty while it does not answer."""
    done = docker.start("exec", name, "loco-peer", "status", "--json")
    tree: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return tree


def wait_health(docker: Docker, name: str, health: str) -> None:
    def has_it() -> bool:
        return docker.inspect(name, ".State.Health.Status") == health

    wait_until(f"{name} is {health}", has_it, HEALTH_S)


def home_of(docker: Docker, name: str) -> Path:
    return Path(docker("volume", "inspect", "--format", "{{.Mountpoint}}", name))


def events(docker: Docker, name: str, event: str) -> list[dict[str, Any]]:
    log = home_of(docker, name) / "log/events.jsonl"
    told = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [each for each in told if each["event"] == event]


def average(docker: Docker, *names: str) -> None:
    """Wait until each has averaged since it was started."""

    def all_have() -> bool:
        for name in names:
            assert docker.inspect(name, ".State.Running") == "true", f"{name} has ended"
        told = [status(docker, name) for name in names]
        return all(each and each["outcomes"]["averaged"] > 0 for each in told)

    try:
        wait_until(f"{names} average", all_have, AVERAGING_S)
    except AssertionError as error:
        said = "\n".join(docker.start("logs", "--tail", "30", name).stderr for name in names)
        raise AssertionError(f"{error}\n{said}") from error


@pytest.fixture(scope="module")
def swarm(docker: Docker) -> tuple[str, str]:
    """A founder and a joiner that average."""
    options = ("-v", f"{ROOT}/deploy/run.toml:/run.toml:ro", "--ip", FOUNDER)
    run(docker, "founder", "start", "/run.toml", options=options)
    run(docker, "joiner", "join", "--bootstrap", f"{FOUNDER}:31337")
    average(docker, "founder", "joiner")
    return "founder", "joiner"


def test_the_image_is_small_and_runs_as_nobody_special(docker: Docker) -> None:
    (image,) = json.loads(docker("image", "inspect", IMAGE))
    config = image["Config"]
    assert config["User"] == "1000"
    assert config["Entrypoint"] == ["loco-peer"]
    assert list(config["Volumes"]) == ["/data"]
    assert list(config["ExposedPorts"]) == ["31337/tcp"]
    assert image["Size"] < MAX_BYTES
    assert version_of("loco-peer") in docker("run", "--rm", "--network", "none", IMAGE, "version")


def test_code_is_a_small_layer_behind_the_dependencies(docker: Docker) -> None:
    layers = docker("history", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", IMAGE)
    sizes = [(int(line.split()[0]), line) for line in layers.splitlines()]
    dependencies = next(i for i, (size, _) in enumerate(sizes) if size > MAX_CODE_BYTES)
    assert "/opt/venv" in sizes[dependencies][1]
    assert any("/wheel" in line for _, line in sizes[:dependencies])
    assert sum(size for size, _ in sizes[:dependencies]) < MAX_CODE_BYTES


def test_peers_average_and_are_healthy_with_the_usual_shared_memory(
    docker: Docker, swarm: tuple[str, str]
) -> None:
    for name in swarm:
        assert docker.inspect(name, ".HostConfig.ShmSize") == str(64 << 20)
        wait_health(docker, name, "healthy")


def test_peers_that_are_stopped_together_end_well_with_a_checkpoint(
    docker: Docker, swarm: tuple[str, str]
) -> None:
    for again in range(STOPPED_TOGETHER):
        before = {name: len(events(docker, name, "CheckpointWritten")) for name in swarm}
        began_s = time.monotonic()
        docker("stop", "-t", str(DOCKER_WAITS_S), *swarm)
        took_s = time.monotonic() - began_s
        for name in swarm:
            logs = docker.start("logs", "--tail", "30", name).stderr
            assert docker.inspect(name, ".State.ExitCode") == "0", f"{again}: {logs}"
            assert len(events(docker, name, "CheckpointWritten")) > before[name], logs
        assert took_s < DOCKER_WAITS_S * len(swarm)
        docker("start", *swarm)
        average(docker, *swarm)


def test_a_new_container_with_the_volume_is_the_same_peer(
    docker: Docker, swarm: tuple[str, str]
) -> None:
    _, name = swarm
    peer_id = status(docker, name)["peer_id"]
    starts = int((home_of(docker, name) / "incarnation").read_text())
    docker("rm", "-f", name)
    run(docker, name, "start")
    average(docker, name)
    assert status(docker, name)["peer_id"] == peer_id
    assert int((home_of(docker, name) / "incarnation").read_text()) == starts + 1


def test_a_volume_of_root_is_refused_with_what_helps(docker: Docker, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    done = docker.start(
        "run", "--rm", "--network", "none", "-v", f"{home}:/data",
        IMAGE, "join", "--bootstrap", "192.0.2.2:31337",
    )  # fmt: skip
    assert done.returncode == ExitCode.USAGE
    for cure in ("chown it to 1000", "fsGroup: 1000", "docker run --user 0"):
        assert cure in done.stderr
    os.chown(home, 1000, 1000)


def test_variables_of_a_cloud_say_the_address_and_those_of_services_do_not_matter(
    docker: Docker, swarm: tuple[str, str]
) -> None:
    cloud = {
        "LOCO_PEER_PORT": "tcp://10.0.0.1:31337",
        "LOCO_PEER_SERVICE_HOST": "10.0.0.1",
        "RUNPOD_PUBLIC_IP": "203.0.113.9",
        "RUNPOD_TCP_PORT_31337": "40123",
    }
    options = tuple(word for name, value in cloud.items() for word in ("-e", f"{name}={value}"))
    run(docker, "rented", "join", "--bootstrap", f"{FOUNDER}:31337", options=options)
    wait_until("a peer that is linked", lambda: bool(status(docker, "rented").get("peers")), 300)
    told = status(docker, "rented")
    assert told["address"] == f"/ip4/203.0.113.9/tcp/40123/p2p/{told['peer_id']}"
    assert told["address_from"] == "RunPod's environment"


def test_a_peer_that_finds_nobody_is_alive_and_not_healthy(docker: Docker) -> None:
    quick = ("--health-interval", "2s", "--health-start-period", "1s", "--health-retries", "2")
    run(docker, "lost", "join", "--bootstrap", "192.0.2.2:31337", options=quick)
    wait_health(docker, "lost", "unhealthy")
    wait_until("it answers", lambda: bool(status(docker, "lost")), 120)
    done = docker.start("exec", "lost", "loco-peer", "status", "--health")
    assert (done.returncode, done.stdout[:5]) == (ExitCode.FAILURE, "alive")
    assert docker.inspect("lost", ".State.Running") == "true"


def test_docker_waits_longer_than_the_grace() -> None:
    assert OPTIONS["grace"].default < DOCKER_WAITS_S
