"""Two real peers that send int8 codes as differences, over real p2pd and IPv6."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from swarm import START_S, Peer, Swarm, open_swarm
from test_other_families import check_export, spec_of

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

LOOPBACK = "[::1]:0"
FAMILY = "mixtral"
SPEC = spec_of(FAMILY).replace("[sync]", '[sync]\ncodec = "int8-diff"')


@pytest.fixture(scope="module")
def packing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with open_swarm(tmp_path_factory.mktemp("packing"), SPEC) as swarm:
        founder = swarm.found(listen=LOOPBACK)
        *_, port, _, _ = founder.address.split("/")
        swarm.join(f"[::1]:{port}", listen=LOOPBACK)
        yield swarm


def has_packed(peer: Peer, vectors: int) -> bool:
    return peer.metric("loco_packed_vectors_total", came="packed") >= vectors


def has_saved(peer: Peer) -> bool:
    sent, codes = (peer.metric("loco_packing_bytes_total", of=of) for of in ("sent", "codes"))
    return 0 < sent < codes


def test_two_real_peers_average_by_differences(packing: Swarm) -> None:
    for peer in packing.at_least(2):
        peer.wait_for("two packed vectors", partial(has_packed, peer, 2), START_S)
        assert peer.metric("loco_packed_vectors_total", came="whole") == 0
        # The first vectors may be far apart, so that most of their blocks are sent again.
        peer.wait_for("fewer bytes than codes", partial(has_saved, peer), START_S)
        assert peer.events(EventName.ROUND_AVERAGED)[-1]["distance"] > 0


def test_peers_with_ipv6_addresses_alone_dial_each_other_back(packing: Swarm) -> None:
    for peer in packing.at_least(2):
        assert all(address.startswith("/ip6/::1/") for address in peer.ready()["addresses"])
        peer.wait_event(EventName.REACHABILITY_CHANGED, START_S, reachable="yes")
        reach = peer.status()["reach"]
        assert (reach["v4"], reach["v6"]) == ("unknown", "yes")


def test_transformers_loads_the_export_of_another_family(packing: Swarm, tmp_path: Path) -> None:
    check_export(packing, packing.members[-1], tmp_path / "hf", FAMILY)
