"""What `loco-peer doctor` says of what it has seen."""

import socket
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peer.cli import doctor
from peer.cli.app import app
from peer.cli.doctor import (
    MIN_DISK_BYTES,
    Finding,
    Health,
    announced,
    disk_finding,
    docker_line,
    is_well,
    lines_of,
    machine_findings,
    network_findings,
)
from peer.daemon.examination import Examination, LineRate, Met
from peer.observe.problems import CLOCK_OFFSET_S, PeerProblem, help_of
from peer.options.config import DEFAULT_PORT
from peer.options.exit_codes import ExitCode
from peer.state.home import Home
from protocol.membership.dial_back import NatKind, Reach

OUTER = "/ip4/8.8.8.8/tcp/31337"
GOOD = Met("a:1", None, "12D3a", "loco-peer 0.1.0", 0.1, 0.02, relays=True, rate=LineRate(1e8))
SEEN = Examination(31337, (GOOD,), Reach.YES, NatKind.NONE, (OUTER,), ("8.8.8.8",))


def found(seen: Examination) -> dict[str, Finding]:
    return {finding.subject: finding for finding in network_findings(seen)}


def test_all_is_well() -> None:
    findings = found(SEEN)
    assert {finding.health for finding in findings.values()} == {Health.WELL}
    assert OUTER in findings["dial-back"].says
    assert "800 Mbit/s" in findings["bandwidth"].says


def test_who_answers_nowhere_fails() -> None:
    findings = found(replace(SEEN, met=(Met("b:2", "dial: cannot connect to b:2"),)))
    assert list(findings) == ["peer"]
    assert not is_well(findings.values())
    assert "cannot connect" in findings["peer"].says


def test_who_cannot_be_dialled_needs_a_relay() -> None:
    hidden = replace(SEEN, reach=Reach.NO, nat=NatKind.SYMMETRIC, working=())
    findings = found(hidden)
    assert findings["dial-back"].health is Health.NOTE
    assert "forward 31337/tcp" in findings["dial-back"].cure
    assert "8.8.8.8" in findings["dial-back"].says
    assert findings["relay"].says == "1 of 1 peers would relay"
    assert is_well(findings.values())
    without = found(replace(hidden, met=(replace(GOOD, relays=False),)))
    assert without["relay"].health is Health.ILL


@pytest.mark.parametrize("ahead_s", [-2 * CLOCK_OFFSET_S, 2 * CLOCK_OFFSET_S])
def test_a_wrong_clock_is_told(ahead_s: float) -> None:
    clock = found(replace(SEEN, met=(replace(GOOD, ahead_s=ahead_s),)))["clock"]
    assert clock.health is Health.NOTE
    assert "4.0 s" in clock.says
    assert ("behind" in clock.says) == (ahead_s < 0)
    far = found(replace(SEEN, met=(replace(GOOD, ahead_s=100 * ahead_s),)))["clock"]
    assert far.health is Health.ILL
    assert "no peer is linked" in far.says


def test_a_slow_line_is_told() -> None:
    assert found(replace(SEEN, met=(replace(GOOD, rate=LineRate(1e5)),)))["bandwidth"].cure
    stalled = replace(GOOD, rate=LineRate(1e5, at_most=True))
    bound = found(replace(SEEN, met=(stalled,)))["bandwidth"]
    assert bound.says.startswith("at most 0.8 Mbit/s")
    unknown = found(replace(SEEN, met=(replace(GOOD, rate=None),)))["bandwidth"]
    assert unknown.health is Health.NOTE


def test_a_full_disk_fails() -> None:
    assert disk_finding(Path("/home"), MIN_DISK_BYTES).health is Health.WELL
    assert disk_finding(Path("/home"), MIN_DISK_BYTES - 1).health is Health.ILL


def test_the_line_for_a_container() -> None:
    assert docker_line(5, ("a:1", "b:2"), "8.8.8.8:5", gpu=True) == (
        "docker run --gpus all -v loco:/data -p 5:5 loco-peer join --bootstrap a:1 --bootstrap b:2"
        " --listen 0.0.0.0:5 --announce 8.8.8.8:5"
    )
    assert "--gpus" not in docker_line(5, (), None, gpu=False)
    assert docker_line(5, (), None, gpu=False).endswith("--listen 0.0.0.0:5 --announce HOST:5")


@pytest.mark.parametrize(
    ("seen", "in_container", "told"),
    [
        (["8.8.8.8"], True, "8.8.8.8:5"),
        (["172.17.0.2"], True, None),  # the container's own, which nobody can dial
        (["172.17.0.2", "2001:4860:4860::8888"], True, "[2001:4860:4860::8888]:5"),
        (["192.168.1.5"], False, "192.168.1.5:5"),
        (["127.0.0.1"], False, None),
        ([], False, None),
    ],
)
def test_a_container_announces_no_inner_address(
    seen: list[str], in_container: bool, told: str | None
) -> None:
    assert announced((), seen, 5, in_container=in_container) == told
    given = "/ip4/10.1.1.1/tcp/6"
    assert announced((given,), seen, 5, in_container=in_container) == given


def test_who_refuses_is_no_wrong_address() -> None:
    refused = Met(
        "a:1", "this run takes invited peers alone; join it with --invite TOKEN", refused=True
    )
    peer = found(replace(SEEN, met=(refused,)))["peer"]
    assert peer.health is Health.ILL
    assert "refuses this peer: this run takes invited peers alone" in peer.says
    assert peer.cure == ""


def look(monkeypatch: pytest.MonkeyPatch, home: Path, *options: str) -> tuple[int, str]:
    """The exit code of `doctor`, and what it says of the network alone; with a real p2pd."""
    monkeypatch.setattr(doctor, "machine_findings", lambda _: [])
    done = CliRunner().invoke(app, ["doctor", "--home", str(home), *options])
    return done.exit_code, done.output


@pytest.mark.slow
def test_a_taken_port_is_said_and_the_rest_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other, socket.socket() as nobody:
        for each in (other, nobody):
            each.bind(("127.0.0.1", 0))
        other.listen()
        port, dead = other.getsockname()[1], f"127.0.0.1:{nobody.getsockname()[1]}"
        code, told = look(
            monkeypatch, tmp_path, "--listen", f"127.0.0.1:{port}", "--bootstrap", dead
        )
    assert code == ExitCode.FAILURE
    assert f"port {port} is taken" in told
    assert f"{dead}: dial: cannot connect to {dead}: Connection refused" in told


@pytest.mark.slow
def test_port_0_is_any_port_or_that_of_last_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as usual:  # 31337 is not asked about, free or not
        usual.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            usual.bind(("127.0.0.1", DEFAULT_PORT))
        code, told = look(monkeypatch, tmp_path, "--listen", "127.0.0.1:0")
        assert code == ExitCode.OK
        assert f"{DEFAULT_PORT}/tcp" not in told
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            kept = free.getsockname()[1]
        Home(tmp_path).keep_port("listen", kept)
        code, told = look(monkeypatch, tmp_path, "--listen", "127.0.0.1:0")
    assert code == ExitCode.OK
    assert f"{kept}/tcp is free here" in told


def test_lines_show_what_to_do() -> None:
    lines = list(lines_of([Finding("disk", Health.ILL, "full", "free some")]))
    assert lines[0].split() == ["FAIL", "disk", "full"]
    assert lines[1].split() == ["->", "free", "some"]


@pytest.mark.parametrize(
    ("relays", "wrong", "code", "line"),
    [
        ([], "undialable", 1, "note  wrong       it has figures"),
        (["12D3a"], "undialable", 0, "-> docs/troubleshooting.md#undialable"),
        (["12D3a"], "split", 1, "FAIL  wrong       it has figures"),
    ],
)
def test_of_a_running_peer(
    relays: list[str],
    wrong: str,
    code: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reachable, problem = "no", PeerProblem(wrong, "it has figures", help_of(wrong))
    reach = {"reachable": reachable, "v4": reachable, "v6": "unknown", "nat": "cone"}
    reach |= {"observed": ["8.8.8.8"], "relays": relays}  # type: ignore[dict-item]
    reach |= dict.fromkeys(("relayed_peers", "circuits", "reservations"), 0)  # type: ignore[arg-type]
    address = "/ip4/192.168.1.5/tcp/31337/p2p/12D3KooWEC9aiTnm17ZpGvxQDHoxnTyZ8LecyEC3QhcfNr3Qs4Ur"

    def status(*_: object) -> dict[str, object]:
        return {
            "address": address,
            "address_from": "command line",
            "reachable_from": "this network",
            "reach": reach,
            "peers": [1],
            "state": "training",
            "doing": "training",
            "problems": [asdict(problem)],
        }

    monkeypatch.setattr(doctor, "ask_now", status)
    monkeypatch.setattr(doctor, "machine_findings", lambda _: [])
    done = CliRunner().invoke(app, ["doctor", "--home", str(tmp_path)])
    assert done.exit_code == code, done.output
    assert line in done.output
    assert f"{'note' if relays else 'FAIL'}  dial-back   no (IPv4 no, IPv6 unknown" in done.output
    assert "--announce 8.8.8.8:31337" in done.output
    assert f"{address} (command line; only reachable from this network)" in done.output


def test_this_machine_is_looked_at(tmp_path: Path) -> None:
    findings = list(machine_findings(tmp_path / "not" / "there"))
    subjects = [finding.subject for finding in findings]
    assert subjects == ["versions", "p2pd", "disk", "memory", "GPU"]
    assert "go-libp2p 0.32.1" in findings[1].says
