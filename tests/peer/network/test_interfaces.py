"""Which of this machine's addresses others are told."""

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from peer.network import reachability
from peer.network.p2pd import P2pdConfig
from peer.network.reachability import (
    InterfaceAddress,
    is_bridge,
    own_addresses,
    reachable_hosts,
)

DOCKER = InterfaceAddress("docker0", "172.17.0.1", is_bridge=True)
ETHERNET = InterfaceAddress("eth0", "192.168.1.5")
TUNNEL = InterfaceAddress("a-tunnel", "10.8.0.2")
LOOPBACK = InterfaceAddress("lo", "127.0.0.1")


def test_bridges_of_containers_are_not_told() -> None:
    assert reachable_hosts([DOCKER, ETHERNET, LOOPBACK], "192.168.1.5") == ["192.168.1.5"]
    assert reachable_hosts([DOCKER, ETHERNET], None) == ["192.168.1.5"]
    assert reachable_hosts([DOCKER, LOOPBACK], None) == []


def test_the_address_of_the_default_route_comes_first() -> None:
    second = InterfaceAddress("eth0", "192.168.1.6")
    hosts = reachable_hosts([TUNNEL, second, ETHERNET], "192.168.1.5")
    assert hosts == ["192.168.1.5", "192.168.1.6", "10.8.0.2"]


def test_a_bridge_that_is_the_way_out_is_told() -> None:
    bridge = InterfaceAddress("br0", "192.168.1.9", is_bridge=True)
    assert reachable_hosts([DOCKER, bridge], "192.168.1.9") == ["192.168.1.9"]


def test_a_bridge_is_known_by_its_kind_or_its_name(tmp_path: Path) -> None:
    (tmp_path / "lan" / "bridge").mkdir(parents=True)
    (tmp_path / "eth0").mkdir()
    assert is_bridge("lan", tmp_path)
    assert not is_bridge("eth0", tmp_path)
    made = ("docker0", "br-5a1b", "virbr0", "cni0", "podman1", "veth12ab", "lxcbr0", "cali7f")
    assert all(is_bridge(name, tmp_path) for name in made)
    ordinary = ("enp3s0", "wlan0", "bond0", "tailscale0", "wg0", "ens5", "brave0", "en0")
    assert not any(is_bridge(name, tmp_path) for name in ordinary)


def test_what_is_listened_on_everywhere_is_told_by_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of(host: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(family=socket.AF_INET, address=host)]

    hosts = {"docker0": of("172.17.0.1"), "eth0": of("192.168.1.5"), "lo": of("127.0.0.1")}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: hosts)
    up = {name: SimpleNamespace(isup=True) for name in hosts}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: up)
    monkeypatch.setattr(reachability, "_way_out", lambda _: "192.168.1.5")
    assert own_addresses(["/ip4/0.0.0.0/tcp/5"]) == ["/ip4/192.168.1.5/tcp/5"]
    named = "/ip4/172.17.0.1/tcp/5"
    assert own_addresses([named]) == [named], "who names a bridge wants it"
    del hosts["eth0"]
    monkeypatch.setattr(reachability, "_way_out", lambda _: None)
    config = P2pdConfig(Path("key"), Path("control"), ("/ip4/0.0.0.0/tcp/5",))
    assert config.announced() == ["/ip4/127.0.0.1/tcp/5"]
