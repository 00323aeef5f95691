"""The Dockerfile and the compose file, as far as they can be checked without a Docker engine."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboard import ROOT

from peer.options.config import OPTIONS, check_environment
from peer.options.values import parse_host_port
from protocol.run.run_spec import parse_toml


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments), comments out and continued lines joined."""
    lines = [li for li in (ROOT / "Dockerfile").read_text().splitlines() if not li.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (word, rest) for word, _, rest in (li.partition(" ") for li in joined.splitlines()) if word
    ]


def arguments_of(instruction: str) -> list[str]:
    return [rest for word, rest in instructions() if word == instruction]


def environment() -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(arguments_of("ENV"))))


def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())


def peers() -> dict[str, dict[str, Any]]:
    return {name: s for name, s in compose()["services"].items() if s["image"] == "loco-peer"}


@pytest.mark.slow
def test_hadolint_has_nothing_to_say():
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("", 0)


def test_environment_is_one_that_loco_peer_reads():
    check_environment(environment())
    assert environment()["LOCO_HOME"] in arguments_of("VOLUME")


def test_ports_that_are_exposed_are_the_ones_listened_on():
    assert arguments_of("EXPOSE") == [str(parse_host_port(environment()["LOCO_LISTEN"]).port)]


def test_pages_of_the_compose_file_are_for_this_machine_alone_and_take_the_token_of_prometheus():
    assert "LOCO_METRICS" not in environment()
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    for peer in peers().values():
        check_environment(peer["environment"])
        assert peer["environment"]["LOCO_METRICS_TOKEN"] == job["authorization"]["credentials"]
        port = parse_host_port(peer["environment"]["LOCO_METRICS"]).port
        (published,) = [each for each in peer["ports"] if each.endswith(f":{port}")]
        assert published.startswith("127.0.0.1:")


def test_containers_of_the_compose_file_have_no_more_rights_than_they_need():
    for service in compose()["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    written = {"/data", "/tmp", "/home/loco/.cache"}
    for peer in peers().values():
        assert peer["read_only"] is True
        volumes = [volume.split(":")[1] for volume in peer["volumes"] if ":ro" not in volume]
        assert {place.split(":")[0] for place in [*peer["tmpfs"], *volumes]} == written


def test_the_peer_is_no_root_and_gets_the_signals():
    assert arguments_of("USER") not in ([], ["root"], ["0"])
    assert arguments_of("ENTRYPOINT") == ['["loco-peer"]'], "a shell would keep SIGTERM for itself"
    assert arguments_of("STOPSIGNAL") == ["SIGTERM"]
    grace_s = {int(service["stop_grace_period"].rstrip("s")) for service in peers().values()}
    assert min(grace_s) > OPTIONS["grace"].default


def test_everything_copied_reaches_the_build_and_nothing_else():
    sources = {
        source
        for rest in arguments_of("COPY")
        if not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    let_in = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert sources == let_in
    assert all((ROOT / source).exists() for source in sources)


def test_prometheus_scrapes_every_peer_of_the_compose_file():
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    targets = [t for c in config["scrape_configs"][0]["static_configs"] for t in c["targets"]]
    (metrics,) = {peer["environment"]["LOCO_METRICS"] for peer in peers().values()}
    port = parse_host_port(metrics).port
    assert sorted(targets) == sorted(f"{name}:{port}" for name in peers())


def test_joiners_know_the_founder():
    founders = [name for name, service in peers().items() if service["command"][0] == "start"]
    assert len(founders) == 1
    assert len(peers()) == 3
    port = parse_host_port(environment()["LOCO_LISTEN"]).port
    for name in set(peers()) - set(founders):
        assert peers()[name]["command"] == ["join", "--bootstrap", f"{founders[0]}:{port}"]


def test_peers_start_again_by_themselves_and_not_for_ever():
    """Docker cannot tell exit codes 2 and 3, which come again at each start, from a failure.

    `start` is restarted too: a home that has a run goes on with it.
    """
    assert {peer["restart"] for peer in peers().values()} == {"on-failure:5"}


def test_peers_of_the_compose_file_have_limits():
    for peer in peers().values():
        assert peer["mem_limit"]
        assert peer["pids_limit"]
        assert peer["logging"]["options"]["max-size"]


def test_code_comes_behind_the_dependencies_and_asks_whether_it_works():
    """A new version moves the last layers alone; a version's number is not in what they hang on."""
    words = instructions()
    last = words[max(i for i, (word, _) in enumerate(words) if word == "FROM") :]
    copied = [rest for word, rest in last if word == "COPY"]
    assert copied == ["--from=dependencies /opt/venv /opt/venv", "--from=build /wheel /wheel"]
    first = words.index(("FROM", "python:${PYTHON}-slim AS dependencies"))
    until = words.index(("FROM", "dependencies AS build"))
    taken = [rest for word, rest in words[first:until] if word == "COPY"]
    assert taken == ["constraints.txt ./", "--from=names /src/requirements.txt ./"]
    (check,) = arguments_of("HEALTHCHECK")
    assert check.endswith('CMD ["loco-peer", "status", "--health"]')


def test_run_spec_of_the_compose_file_is_valid():
    assert parse_toml((ROOT / "deploy/run.toml").read_text()).name == "compose"


def test_peers_keep_their_homes_apart():
    homes = [
        v.split(":")[0] for s in peers().values() for v in s["volumes"] if v.endswith(":/data")
    ]
    assert len(homes) == len(set(homes)) == len(peers())
    assert set(homes) <= set(compose()["volumes"])


@pytest.mark.slow
@pytest.mark.e2e
def test_the_build_makes_a_wheel_of_peer_and_protocol_alone(tmp_path):
    """The Dockerfile's own last step, on the files that reach the build."""
    context = tmp_path / "src"
    context.mkdir()
    pip = [sys.executable, "-m", "pip"]
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "peer", "protocol", "LICENSE", "README.md", "pyproject.toml"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, tracked):
        target = context / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [*pip, "wheel", "-qq", "--no-build-isolation", "--no-deps", ".", "--wheel-dir", tmp_path],
        cwd=context, check=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    rooms = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert rooms == {"peer", "protocol"}
    needed = {name for name in tracked if "/" in name and not name.endswith("README.md")}
    assert needed - set(names) == set()


def test_the_image_has_a_python_the_project_supports():
    (version,) = re.findall(r"^PYTHON=(\d+\.\d+)$", "\n".join(arguments_of("ARG")), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
