"""Configuration: who wins, and what is refused."""

from pathlib import Path

import pytest

from peer.options.config import OPTIONS, ConfigError, load_config, resolve_home
from peer.options.values import (
    HostPort,
    LogFormat,
    Origin,
    parse_announce,
    parse_bootstrap,
    parse_host_port,
)

PEER_ID = "12D3KooWQYV9dGMFoRzNStwpXztXaBUjtPqi6aU76ZgUriHhKust"


def write_file(home: Path, text: str) -> None:
    (home / "peer.toml").write_text(text)


def test_command_line_over_environment_over_file_over_default(tmp_path: Path) -> None:
    write_file(tmp_path, 'device = "cpu"\nthreads = 1\ngrace = 1.5\n')
    environment = {
        "LOCO_HOME": str(tmp_path),
        "LOCO_THREADS": "2",
        "LOCO_GRACE": "2.5",
        "PATH": "x",
    }
    config = load_config({"grace": 3.5, "bootstrap": []}, environment)
    assert (config.grace_s, config.threads, config.device) == (3.5, 2, "cpu")
    assert config.log_format is LogFormat.CONSOLE
    assert config.origins["grace"] is Origin.COMMAND_LINE
    assert config.origins["threads"] is Origin.ENVIRONMENT
    assert config.origins["device"] is Origin.FILE
    assert config.origins["bootstrap"] is Origin.DEFAULT
    assert "threads = 2 (environment)" in config.describe()


def test_every_option_has_a_line_and_an_origin(tmp_path: Path) -> None:
    config = load_config({"home": tmp_path}, {})
    assert len(config.describe()) == len(OPTIONS) == len(config.origins)
    assert config.home == tmp_path


def test_home_comes_from_the_command_line_first(tmp_path: Path) -> None:
    assert resolve_home(tmp_path, {"LOCO_HOME": "/elsewhere"}) == tmp_path
    assert resolve_home(None, {"LOCO_HOME": "/elsewhere"}) == Path("/elsewhere")
    assert resolve_home(None, {}).name == "loco-peer"


def test_bootstrap_is_a_list_everywhere(tmp_path: Path) -> None:
    expected = ("a.example:1", f"/ip4/1.2.3.4/tcp/5/p2p/{PEER_ID}")
    on_line = load_config({"home": tmp_path, "bootstrap": [*expected, expected[0]]}, {})
    in_environment = load_config({"home": tmp_path}, {"LOCO_BOOTSTRAP": ", ".join(expected)})
    write_file(tmp_path, f"bootstrap = {list(expected)}")
    in_file = load_config({"home": tmp_path}, {})
    assert on_line.bootstrap == in_environment.bootstrap == in_file.bootstrap == expected


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"LOCO_GRASE": "1"}, "unknown environment variable LOCO_GRASE; did you mean 'LOCO_GRACE'"),
        ({"LOCO_GRACE": "-1"}, "LOCO_GRACE: must be from 0"),
        ({"LOCO_GRACE": "nan"}, "LOCO_GRACE: must be from 0"),
        ({"LOCO_DEVICE": "cpu:1"}, "LOCO_DEVICE: use 'cpu', 'cuda' or 'cuda:N'"),
        ({"LOCO_MAX_UPLOAD_MBPS": "20 Mbit"}, "LOCO_MAX_UPLOAD_MBPS: use a number of megabits"),
        ({"LOCO_MAX_DOWNLOAD_MBPS": "0"}, "LOCO_MAX_DOWNLOAD_MBPS: must be from 1 to 1000000"),
        ({"LOCO_THREADS": "two"}, "LOCO_THREADS: use a whole number"),
        ({"LOCO_THREADS": "-1"}, "LOCO_THREADS: must be from 1 to 4096"),
        ({"LOCO_OVERLAP_STEPS": "1.5"}, "LOCO_OVERLAP_STEPS: use a whole number"),
        ({"LOCO_OVERLAP_STEPS": "-1"}, "LOCO_OVERLAP_STEPS: must be from 0 to 1000"),
        ({"LOCO_VERBOSE": "maybe"}, "LOCO_VERBOSE: use 'true' or 'false'"),
        ({"LOCO_LOG_FORMAT": "xml"}, "LOCO_LOG_FORMAT: use 'console' or 'json'"),
        ({"LOCO_BOOTSTRAP": "http://h:1/x"}, "write HOST:PORT without http://, as h:1"),
        ({"LOCO_METRICS": "http://"}, "write HOST:PORT without http://, as HOST:PORT"),
        ({"LOCO_METRICS": "x:y"}, "LOCO_METRICS: the port must be a number"),
        (
            {"LOCO_ANNOUNCE": "203.0.113.5"},
            "port is missing: write HOST:PORT, as 203.0.113.5:31337",
        ),
        ({"LOCO_BOOTSTRAP": " ".join(f"h:{n}" for n in range(1, 70))}, "at most 64 addresses"),
    ],
)
def test_bad_environment_is_refused(
    tmp_path: Path, environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config({"home": tmp_path}, environment)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("grase = 1", "unknown key 'grase' in .*peer.toml; did you mean 'grace'"),
        ('home = "/x"', "unknown key 'home'"),
        ("threads = true", "threads in peer.toml: use a whole number"),
        ("bootstrap = 3", "bootstrap in peer.toml: use a list"),
        ("grace =", "is not TOML"),
        ("#" * 300_000, "longer than"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    write_file(tmp_path, text)
    with pytest.raises(ConfigError, match=sentence):
        load_config({"home": tmp_path}, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("31337", HostPort("0.0.0.0", 31337)),
        ("127.0.0.1:0", HostPort("127.0.0.1", 0)),
        ("[::1]:80", HostPort("::1", 80)),
        ("gpu-1.example.org:1", HostPort("gpu-1.example.org", 1)),
        ("/ip4/1.2.3.4/tcp/5", HostPort("1.2.3.4", 5)),
    ],
)
def test_host_port_as_people_write_it(text: str, expected: HostPort) -> None:
    assert parse_host_port(text) == expected
    assert parse_host_port(str(expected)) == expected
    assert parse_host_port(expected.multiaddr()) == expected


@pytest.mark.parametrize(
    "text", ["", "host", "::1:80", "a b:1", "h:65536", "/ip4/::1/tcp/5", "/dns/x", "/dns/a b/tcp/1"]
)
def test_what_is_no_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_host_port(text)


def test_bootstrap_needs_a_port_and_may_carry_a_peer_id() -> None:
    relayed = f"/ip4/1.2.3.4/tcp/5/p2p/{PEER_ID}/p2p-circuit"
    for good in (
        "h:1",
        "[::1]:2",
        "/dns4/h/tcp/1",
        f"/ip4/1.2.3.4/tcp/5/p2p/{PEER_ID}",
        f"{relayed}/p2p/{PEER_ID}",
    ):
        assert parse_bootstrap(f" {good} ") == good
    for bad in (
        "h",
        "h:0",
        "31337",
        "/ip4/1.2.3.4/tcp/0",
        "/ip4/1.2.3.4/tcp/5/p2p/x",
        "/ip4/1.2.3.4",
        "/ip4/1.2.3.4/udp/5",
        "/unix/tmp/x",
        relayed,
    ):
        with pytest.raises(ValueError, match=r"\w"):
            parse_bootstrap(bad)


def test_what_nobody_can_dial_is_not_announced() -> None:
    assert parse_announce("h.example:7") == "/dns/h.example/tcp/7"
    assert parse_announce("[2001:db8::1]:7") == "/ip6/2001:db8::1/tcp/7"
    for bad in ("h:0", "0.0.0.0:7", "[::]:7", "7"):
        with pytest.raises(ValueError, match="cannot be announced"):
            parse_announce(bad)


def test_variables_of_kubernetes_services_are_passed_over(tmp_path: Path) -> None:
    links = {
        "LOCO_PEER_SERVICE_HOST": "10.0.0.1",
        "LOCO_PEER_SERVICE_PORT": "31337",
        "LOCO_PEER_SERVICE_PORT_P2P": "31337",
        "LOCO_PEER_PORT": "tcp://10.0.0.1:31337",
        "LOCO_PEER_PORT_31337_TCP": "tcp://10.0.0.1:31337",
        "LOCO_PEER_PORT_31337_TCP_ADDR": "10.0.0.1",
    }
    assert load_config({"home": tmp_path}, links).bootstrap == ()
    with pytest.raises(ConfigError, match="unknown environment variable LOCO_PEER_PORT"):
        load_config({"home": tmp_path}, {"LOCO_PEER_PORT": "31337"})
