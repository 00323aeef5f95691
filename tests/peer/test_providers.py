"""Where a provider's environment says that others reach us, and what goes before it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer.daemon.report import join_address
from peer.facts import Facts
from peer.options.config import ConfigError, load_config
from peer.options.values import Origin

VAST = {"PUBLIC_IPADDR": "203.0.113.9", "VAST_TCP_PORT_31337": "40123"}
RUNPOD = {"RUNPOD_PUBLIC_IP": "203.0.113.8", "RUNPOD_TCP_PORT_31337": "10101"}
OUTSIDE = "/ip4/203.0.113.9/tcp/40123"
IMAGE = {"LOCO_LISTEN": "0.0.0.0:31337"}


@pytest.mark.parametrize(
    ("environment", "announce", "origin"),
    [
        (VAST, OUTSIDE, Origin.VAST),
        (VAST | IMAGE, OUTSIDE, Origin.VAST),
        (RUNPOD, "/ip4/203.0.113.8/tcp/10101", Origin.RUNPOD),
        (VAST | {"LOCO_ANNOUNCE": "198.51.100.1:7"}, "/ip4/198.51.100.1/tcp/7", Origin.ENVIRONMENT),
        (VAST | {"PUBLIC_IPADDR": ""}, None, Origin.DEFAULT),
        (VAST | {"LOCO_LISTEN": "31338"}, None, Origin.DEFAULT),  # not mapped: nobody gets through
        ({"PUBLIC_IPADDR": "203.0.113.9"}, None, Origin.DEFAULT),
    ],
)
def test_the_environment_says_where_others_reach_a_container(
    tmp_path: Path, environment: dict[str, str], announce: str | None, origin: Origin
) -> None:
    config = load_config({"home": tmp_path}, environment)
    assert config.announce == (() if announce is None else (announce,))
    assert config.origins["announce"] is origin


def test_command_line_and_file_go_before_it(tmp_path: Path) -> None:
    named = load_config({"home": tmp_path, "announce": ["198.51.100.1:7"]}, VAST)
    assert named.announce == ("/ip4/198.51.100.1/tcp/7",)
    (tmp_path / "peer.toml").write_text('announce = ["198.51.100.2:8"]')
    assert load_config({"home": tmp_path}, VAST).origins["announce"] is Origin.FILE


def test_the_port_that_is_mapped_is_listened_on(tmp_path: Path) -> None:
    """A free one in its place would be reached by nobody; if it is taken, that is an error."""
    config = load_config({"home": tmp_path}, VAST)
    assert str(config.listen) == "0.0.0.0:31337"
    assert f"announce = {OUTSIDE} (Vast.ai's environment)" in config.describe()
    ours = load_config({"home": tmp_path, "listen": "[::]:31337"}, VAST)
    assert (str(ours.listen), ours.origins["listen"]) == ("[::]:31337", Origin.COMMAND_LINE)


def test_a_port_with_one_number_inside_and_outside_is_listened_on(tmp_path: Path) -> None:
    identity = {"PUBLIC_IPADDR": "203.0.113.9", "VAST_TCP_PORT_70000": "41000"}
    for environment in (identity, identity | IMAGE):
        config = load_config({"home": tmp_path}, environment)
        assert str(config.listen) == "0.0.0.0:41000"
        assert config.announce == ("/ip4/203.0.113.9/tcp/41000",)
        assert config.origins["listen"] is Origin.VAST
    mapped = load_config({"home": tmp_path}, identity | VAST)
    assert (str(mapped.listen), mapped.announce) == ("0.0.0.0:31337", (OUTSIDE,))
    named = load_config({"home": tmp_path, "listen": "5000"}, identity)
    assert (str(named.listen), named.announce) == ("0.0.0.0:5000", ())


@pytest.mark.parametrize(
    "wrong", [{"VAST_TCP_PORT_31337": "99999"}, {"PUBLIC_IPADDR": "a b"}, {"PUBLIC_IPADDR": "::"}]
)
def test_what_is_no_address_is_refused_with_what_helps(
    tmp_path: Path, wrong: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match="PUBLIC_IPADDR and VAST_TCP_PORT_.*--announce HOST:PORT"):
        load_config({"home": tmp_path}, VAST | wrong)
    assert load_config({"home": tmp_path, "announce": ["h:1"]}, VAST | wrong).announce


@pytest.mark.parametrize(
    ("origin", "shown"), [(Origin.VAST, "8.8.8.8"), (Origin.ENVIRONMENT, "203.0.113.9")]
)
def test_where_others_get_through_goes_before_what_a_provider_says(
    origin: Origin, shown: str
) -> None:
    """Its variables are written when the container starts, and the address may change."""
    works, inside = "/ip4/8.8.8.8/tcp/40123", "/ip4/172.17.0.5/tcp/31337"
    addresses = tuple(f"{each}/p2p/x" for each in (OUTSIDE, works, inside))
    network: Any = SimpleNamespace(addresses=addresses)
    facts = Facts("x", 1)
    facts.reach.given = {OUTSIDE: origin}
    facts.reach.working = (inside,)  # by a container beside it
    first = join_address(network, facts)
    assert (first.address, first.named_by) == (f"{OUTSIDE}/p2p/x", origin)
    facts.reach.working = (inside, works)
    later = join_address(network, facts)
    assert shown in later.address
    assert later.named_by == (origin if shown in OUTSIDE else None)
