"""Files for clouds: each says what loco-peer reads, and its own tool accepts it.

The tools are many and large. They are installed into environments of their own, by long tests
alone, and what cannot be had is skipped, with the reason.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from console import commands_of
from dashboard import ROOT

from peer.options.config import DEFAULT_PORT, ENVIRONMENT_PREFIX, load_config
from peer.options.values import parse_host_port

DEPLOY: Final = ROOT / "deploy"
GUIDE: Final = ROOT / "docs/clouds.md"
UNIT: Final = DEPLOY / "loco-peer@.service"
IMAGE: Final = "registry.example/loco-peer:cuda"
P2P: Final = str(DEFAULT_PORT)


def text_of(name: str) -> str:
    return (DEPLOY / name).read_text()


def yaml_of(name: str) -> Any:
    return yaml.safe_load(text_of(name))


# --- what each says -------------------------------------------------------------------------------
def unit() -> dict[str, list[str]]:
    """Settings by name, in order; one that is given twice has two values."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if re.match(r"[A-Z]\w+=", line):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def unit_environment() -> dict[str, str]:
    words = " ".join(unit()["Environment"]).replace("%i", "0").replace("%S", "/var/lib").split()
    return dict(word.split("=", 1) for word in words)


def stateful_set() -> dict[str, Any]:
    _, found = yaml.safe_load_all(text_of("kubernetes.yaml"))
    return found


def pod() -> dict[str, Any]:
    return stateful_set()["spec"]["template"]["spec"]


def vast_command() -> list[str]:
    (line,) = [each.line for each in commands_of(GUIDE) if each.line.startswith("vastai create")]
    return shlex.split(line)


def option_of(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def vast_environment() -> dict[str, str]:
    return dict(re.findall(r"-e (\w+)=(\S+)", option_of(vast_command(), "--env")))


def cloud_init_environment() -> dict[str, str]:
    (written,) = yaml_of("cloud-init.yaml")["write_files"]
    return dict(line.split("=", 1) for line in written["content"].splitlines())


def environments() -> dict[str, dict[str, str]]:
    """What a peer of each template finds in its environment."""
    (container,) = pod()["containers"]
    return {
        UNIT.name: unit_environment(),
        "kubernetes.yaml": {each["name"]: each["value"] for each in container["env"]},
        "runpod.json": json.loads(text_of("runpod.json"))["env"],
        "skypilot.yaml": yaml_of("skypilot.yaml")["envs"],
        "cloud-init.yaml": cloud_init_environment(),
        "dstack.yml": dict(each.split("=", 1) for each in yaml_of("dstack.yml")["env"]),
        GUIDE.name: vast_environment(),
    }


def docker_run(name: str) -> list[str]:
    """The command of a template that runs a container by itself."""
    if name == "skypilot.yaml":
        return shlex.split(yaml_of(name)["run"].replace("\\\n", " "))
    (command,) = yaml_of(name)["runcmd"]
    return command


@pytest.mark.parametrize("name", environments())
def test_settings_are_those_of_this_version(name: str, tmp_path: Path) -> None:
    """An option that is renamed or takes other values is refused here."""
    given = {
        key: value
        for key, value in environments()[name].items()
        if key.startswith(ENVIRONMENT_PREFIX)
    }
    assert load_config({"home": tmp_path}, given).grace_s > 0
    assert given


def test_every_file_for_a_cloud_is_named_in_the_guide_and_looked_at_here() -> None:
    files = {path.name for path in DEPLOY.iterdir() if path.is_file()}
    looked_at = {name for name in environments() if name != GUIDE.name}
    assert files - {"compose.yaml", "run.toml"} == looked_at
    named = set(re.findall(r"`deploy/([^`]+)`", GUIDE.read_text()))
    assert looked_at <= named


def test_all_name_one_image_to_put_yours_for() -> None:
    images = {
        pod()["containers"][0]["image"],
        json.loads(text_of("runpod.json"))["imageName"],
        yaml_of("dstack.yml")["image"],
        option_of(vast_command(), "--image"),
        *(word for name in ("skypilot.yaml", "cloud-init.yaml") for word in docker_run(name)),
    }
    assert {image for image in images if image.startswith("registry.")} == {IMAGE}
    assert f"docker push {IMAGE}" in GUIDE.read_text()


@pytest.mark.parametrize("name", environments())
def test_others_are_joined_by_an_address_of_nobody(name: str) -> None:
    """A reader who forgets to change it joins no stranger's run."""
    bootstrap = environments()[name].get("LOCO_BOOTSTRAP", "192.0.2.2:31337")
    assert bootstrap == f"192.0.2.2:{P2P}"


def test_the_port_that_is_opened_is_the_one_listened_on() -> None:
    (container,) = pod()["containers"]
    ports = {each["name"]: each for each in container["ports"]}
    assert ports["p2p"]["containerPort"] == ports["p2p"]["hostPort"] == DEFAULT_PORT
    metrics = parse_host_port(environments()["kubernetes.yaml"]["LOCO_METRICS"]).port
    assert ports["metrics"]["containerPort"] == metrics
    assert "hostPort" not in ports["metrics"], "metrics are for the cluster alone"
    assert json.loads(text_of("runpod.json"))["ports"] == [f"{P2P}/tcp"]
    assert yaml_of("skypilot.yaml")["resources"]["ports"] == [DEFAULT_PORT]
    assert re.findall(r"-p (\S+)", option_of(vast_command(), "--env")) == [f"{P2P}:{P2P}"]
    for name in ("skypilot.yaml", "cloud-init.yaml"):
        assert option_of(docker_run(name), "--network") == "host"


def test_homes_outlive_their_containers() -> None:
    (container,) = pod()["containers"]
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    (claim,) = stateful_set()["spec"]["volumeClaimTemplates"]
    assert mounts["/data"] == claim["metadata"]["name"]
    assert json.loads(text_of("runpod.json"))["volumeMountPath"] == "/data"
    for name in ("skypilot.yaml", "cloud-init.yaml"):
        assert option_of(docker_run(name), "-v") == "loco:/data"
    assert unit_environment()["LOCO_HOME"] == "/var/lib/loco-peer/0"
    assert unit()["StateDirectory"] == ["loco-peer/%i"]


def test_a_peer_has_ended_before_it_is_killed() -> None:
    """Each waits longer than the peer's grace; RunPod kills five seconds after it has asked."""
    grace_s = {
        name: load_config({"home": Path("/x")}, {"LOCO_GRACE": env["LOCO_GRACE"]}).grace_s
        for name, env in environments().items()
        if "LOCO_GRACE" in env
    }
    assert pod()["terminationGracePeriodSeconds"] > grace_s["kubernetes.yaml"]
    assert int(unit()["TimeoutStopSec"][0]) > grace_s[UNIT.name]
    assert grace_s["runpod.json"] < 5
    for name in ("skypilot.yaml", "cloud-init.yaml"):
        stop_s = int(option_of(docker_run(name), "--stop-timeout"))
        assert grace_s[name] < stop_s < 30, "GCP ends a spot machine 30 s after it has asked"


def test_what_comes_again_at_each_start_is_not_tried_for_ever() -> None:
    assert unit()["Restart"] == ["on-failure"]
    assert unit()["RestartPreventExitStatus"] == ["2 3"]
    assert option_of(docker_run("cloud-init.yaml"), "--restart") == "on-failure:5"


def test_peers_have_no_more_rights_than_they_need() -> None:
    (container,) = pod()["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod()["securityContext"]["runAsUser"] == pod()["securityContext"]["fsGroup"] == 1000
    assert unit()["DynamicUser"] == ["yes"]
    assert unit()["CapabilityBoundingSet"] == [""]
    (written,) = yaml_of("cloud-init.yaml")["write_files"]
    assert written["permissions"] == "0600", "it may hold an invitation"


def test_a_pod_that_is_alive_is_kept_and_one_that_works_is_ready() -> None:
    (container,) = pod()["containers"]
    assert container["livenessProbe"]["exec"]["command"] == ["loco-peer", "status", "--json"]
    assert container["readinessProbe"]["exec"]["command"] == ["loco-peer", "status", "--health"]
    assert pod()["enableServiceLinks"] is False


def test_a_trainer_out_of_memory_ends_no_unit() -> None:
    """The daemon starts it again, with a smaller micro-batch."""
    assert unit()["OOMPolicy"] == ["continue"]


RUNPOD_FIELDS: Final = """
    allowedCudaVersions cloudType computeType containerDiskInGb containerRegistryAuthId countryCodes
    cpuFlavorIds cpuFlavorPriority dataCenterIds dataCenterPriority dockerEntrypoint dockerStartCmd
    env globalNetworking gpuCount gpuTypeIds gpuTypePriority imageName interruptible locked
    minDiskBandwidthMBps minDownloadMbps minRAMPerGPU minUploadMbps minVCPUPerGPU name
    networkVolumeId ports supportPublicIp templateId vcpuCount volumeInGb volumeMountPath
"""
"""Of docs.runpod.io/api-reference/pods/POST/pods; there is no validator that works offline."""


def test_runpod_is_sent_fields_that_it_knows() -> None:
    body = json.loads(text_of("runpod.json"))
    assert set(body) <= set(RUNPOD_FIELDS.split())
    assert all(isinstance(value, str) for value in body["env"].values())
    assert body["dockerStartCmd"] == ["join"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on PATH")
@pytest.mark.parametrize(("old", "new"), [("", ""), ("StateDirectory=", "StateDirectry=")])
def test_systemd_understands_the_unit(tmp_path: Path, old: str, new: str) -> None:
    """It says what it does not understand, and exits with 0 all the same."""
    text = UNIT.read_text().replace("/opt/loco-peer/bin/loco-peer", sys.executable)
    (tmp_path / UNIT.name).write_text(text.replace(old, new) if old else text)
    (tmp_path / "loco-peer@0.service").symlink_to(UNIT.name)
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "loco-peer@0.service"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (UNIT.name in done.stderr or "Unknown" in done.stderr) == bool(old), done.stderr


# --- and their tools ------------------------------------------------------------------------------
LIGHT: Final = ("check-jsonschema==0.39.0", "kubernetes-validate==1.37.0", "vastai==1.9.1")
HEAVY: Final = {"dstack": "dstack==0.22.5", "sky": "skypilot==0.14.1"}
INSTALL_S: Final = 900


def environment_of(folder: Path, *packages: str) -> Path:
    """The programs of an environment with these packages; skips the test where they are not had."""
    made: list[str | Path] = [sys.executable, "-m", "venv", folder]
    pip: list[str | Path] = [
        folder / "bin/python",
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-cache-dir",
        *packages,
    ]
    for command in (made, pip):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=INSTALL_S
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["?"])[-1]
            pytest.skip(f"{', '.join(packages)} cannot be installed here: {last}")
    return folder / "bin"


@pytest.fixture(scope="session")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_of(tmp_path_factory.mktemp("validators"), *LIGHT)


def ran(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_S,
        env=os.environ | environment,
    )


def spoilt(path: Path, folder: Path, old: str, new: str) -> Path:
    assert old in path.read_text()
    found = folder / path.name
    found.write_text(path.read_text().replace(old, new))
    return found


@pytest.mark.long
def test_compose_is_what_its_schema_says(light: Path, tmp_path: Path) -> None:
    check = (light / "check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    done = ran(*check, DEPLOY / "compose.yaml")
    assert done.returncode == 0, done.stdout
    bad = spoilt(DEPLOY / "compose.yaml", tmp_path, "pids_limit:", "pid_limit:")
    assert ran(*check, bad).returncode == 1


@pytest.mark.long
def test_kubernetes_knows_every_key(light: Path, tmp_path: Path) -> None:
    check = (light / "kubernetes-validate", "--strict", "-k", "1.30")
    done = ran(*check, DEPLOY / "kubernetes.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    bad = spoilt(DEPLOY / "kubernetes.yaml", tmp_path, "replicas: 4", 'replicas: "4"')
    assert ran(*check, bad).returncode != 0


@pytest.fixture(scope="session")
def cloud_init_schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Out of Debian's package, which is unpacked and not installed."""
    folder = tmp_path_factory.mktemp("cloud-init")
    if shutil.which("apt-get") is None:
        pytest.skip("no apt-get on PATH, to take the schema out of Debian's cloud-init")
    got = subprocess.run(
        ["apt-get", "download", "-q", "cloud-init"], cwd=folder, capture_output=True, check=False
    )
    if got.returncode:
        pytest.skip("Debian's cloud-init cannot be downloaded here")
    (package,) = folder.glob("cloud-init_*.deb")
    subprocess.run(["dpkg", "-x", package, folder], check=True)
    (schema,) = folder.rglob("schema-cloud-config-v1.json")
    return schema


@pytest.mark.long
def test_cloud_init_knows_every_key(light: Path, cloud_init_schema: Path, tmp_path: Path) -> None:
    check = (light / "check-jsonschema", "--schemafile", cloud_init_schema)
    done = ran(*check, DEPLOY / "cloud-init.yaml")
    assert done.returncode == 0, done.stdout
    assert set(yaml_of("cloud-init.yaml")) == {"write_files", "runcmd"}, "no key of its own is bad"
    bad = spoilt(DEPLOY / "cloud-init.yaml", tmp_path, "permissions:", "permission:")
    assert ran(*check, bad).returncode == 1


@pytest.fixture
def fake_vast() -> Iterator[tuple[str, list[Any]]]:
    """A server that takes every order; its URL, and the bodies that it was sent."""
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"success": true, "new_contract": 1}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.long
def test_vast_is_ordered_what_the_guide_says(
    light: Path, fake_vast: tuple[str, list[Any]], tmp_path: Path
) -> None:
    url, bodies = fake_vast
    program, *order = [word.replace("OFFER", "1") for word in vast_command()]
    done = ran(
        light / program,
        *("--url", url, "--api-key", "none"),
        *order,
        HOME=str(tmp_path),
        XDG_CONFIG_HOME=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (body,) = bodies
    assert (body["image"], body["runtype"], body["args"]) == (IMAGE, "args", ["join"])
    assert body["env"] == {f"-p {P2P}:{P2P}": "1"} | vast_environment()


@pytest.mark.long
def test_dstack_knows_every_key(tmp_path: Path) -> None:
    python = environment_of(tmp_path / "venv", HEAVY["dstack"]) / "python"
    code = (
        "import sys, yaml\n"
        "from dstack._internal.core.models.configurations import parse_run_configuration\n"
        "parse_run_configuration(yaml.safe_load(open(sys.argv[1])))\n"
    )
    done = ran(python, "-c", code, DEPLOY / "dstack.yml", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    bad = spoilt(DEPLOY / "dstack.yml", tmp_path, "spot_policy:", "spot_polic:")
    assert ran(python, "-c", code, bad, HOME=str(tmp_path)).returncode != 0


@pytest.mark.long
def test_skypilot_knows_every_key(tmp_path: Path) -> None:
    python = environment_of(tmp_path / "venv", HEAVY["sky"]) / "python"
    code = "import sys, sky; sky.Task.from_yaml(sys.argv[1])"
    done = ran(python, "-c", code, DEPLOY / "skypilot.yaml", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    bad = spoilt(DEPLOY / "skypilot.yaml", tmp_path, "use_spot:", "use_spots:")
    assert ran(python, "-c", code, bad, HOME=str(tmp_path)).returncode != 0
