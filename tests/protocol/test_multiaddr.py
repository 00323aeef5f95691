"""Multiaddrs as text and as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.address import multiaddr
from protocol.address.multiaddr import InvalidAddress
from protocol.address.peer_id import peer_id_from_public_key

PEER, OTHER = (peer_id_from_public_key(bytes([n]) * 32) for n in (1, 2))


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("/ip4/127.0.0.1/tcp/4001", "047f000001060fa1"),
        ("/ip6/::1/tcp/80", "29" + "00" * 15 + "01" + "060050"),
        ("/ip4/1.2.3.4/udp/5/quic-v1", "0401020304" + "91020005" + "cd03"),
        ("/dns4/a.example/tcp/1", "3609" + b"a.example".hex() + "060001"),
        ("/unix/tmp/a.sock", "90030b" + b"/tmp/a.sock".hex()),
    ],
)
def test_known_bytes(text: str, data: str) -> None:
    assert multiaddr.to_bytes(text).hex() == data
    assert multiaddr.from_bytes(bytes.fromhex(data)) == text


@pytest.mark.parametrize(
    "text",
    [
        f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}",
        f"/dns/relay.example/tcp/5/p2p/{PEER}/p2p-circuit/p2p/{OTHER}",
        f"/dns6/v6.example/tcp/65535/p2p/{PEER}",
    ],
)
def test_there_and_back(text: str) -> None:
    assert multiaddr.from_bytes(multiaddr.to_bytes(text)) == text


@given(st.binary(max_size=80))
def test_other_bytes_are_refused_and_nothing_worse(data: bytes) -> None:
    try:
        text = multiaddr.from_bytes(data)
    except InvalidAddress:
        return
    assert multiaddr.from_bytes(multiaddr.to_bytes(text)) == text


@given(st.text(alphabet="/ip46tcpudns.:0159ax", max_size=60))
def test_other_texts_are_refused_and_nothing_worse(text: str) -> None:
    try:
        data = multiaddr.to_bytes(text)
    except InvalidAddress:
        return
    assert multiaddr.to_bytes(multiaddr.from_bytes(data)) == data


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("127.0.0.1/tcp/1", "must begin with '/'"),
        ("/ip4/127.0.0.1/sctp/1", "unknown part 'sctp'"),
        ("/ip4/127.0.0.1/tcp", "'/tcp' needs a value"),
        ("/ip4/127.0.0.1/tcp/65536", "not a port"),
        ("/ip4/127.0.0.1/tcp/-1", "not a port"),
        ("/ip4/300.0.0.1/tcp/1", "300"),
        ("/dns4/bad name/tcp/1", "not a host name"),
        ("/dns4/a..b/tcp/1", "not a host name"),
        (f"/dns4/{'a' * 64}.b/tcp/1", "not a host name"),
        ("/unix/" + "a" * 200, "at most 107 bytes"),
        (
            "/ip4/1.2.3.4/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
            "hash of its key",
        ),
    ],
)
def test_bad_addresses_are_refused_with_a_reason(text: str, words: str) -> None:
    with pytest.raises(InvalidAddress, match=words):
        multiaddr.to_bytes(text)


def test_the_peer_id_is_split_off_and_put_on_once() -> None:
    full = f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}"
    assert multiaddr.split_peer_id(full) == ("/ip4/1.2.3.4/tcp/5", PEER)
    assert multiaddr.with_peer_id(full, PEER) == full
    assert multiaddr.with_peer_id("/ip4/1.2.3.4/tcp/5", PEER) == full
