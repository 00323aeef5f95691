"""Reading peer ids from certificates, and which step a failed probe names."""

import socket
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio
from bare_libp2p import self_signed, signed_key
from cryptography.hazmat.primitives.serialization import Encoding
from network_worlds import SeededEntropy

from peer.network.identity import Identity
from peer.network.tls_probe import peer_id_of_certificate, read_peer_id
from protocol.address.peer_id import KEY_PROTOBUF_PREFIX
from protocol.errors import StreamLost

IDENTITY = Identity(SeededEntropy("tls").token_bytes(32))


def certificate(make_extension: Callable[[bytes], bytes | None]) -> bytes:
    """A self-signed certificate; `make_extension` gets the bytes that the peer's key must sign."""
    _, made = self_signed(make_extension)
    return made.public_bytes(Encoding.DER)


def good(to_sign: bytes) -> bytes:
    return signed_key(KEY_PROTOBUF_PREFIX + IDENTITY.public_key, IDENTITY.sign(to_sign))


def test_a_good_certificate_proves_its_peer() -> None:
    assert peer_id_of_certificate(certificate(good)) == IDENTITY.peer_id


@pytest.mark.parametrize(
    ("make_extension", "words"),
    [
        (lambda _: None, "not a libp2p certificate"),
        (lambda to_sign: good(to_sign + b"x"), "not signed by 12D3KooW"),
        (lambda to_sign: good(to_sign)[:-1], "no Ed25519 key"),
        (lambda to_sign: good(to_sign) + b"x", "no Ed25519 key"),
        (lambda _: b"", "no Ed25519 key"),
        (lambda _: b"\x04\x01x", "no Ed25519 key"),
        (lambda _: signed_key(b"\x08\x00\x12\x01k", b"s"), "no Ed25519 key"),
    ],
)
def test_other_certificates_prove_nothing(
    make_extension: Callable[[bytes], bytes | None], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        peer_id_of_certificate(certificate(make_extension))


def test_certificates_that_cannot_be_read_are_their_makers_fault_and_no_error_of_ours() -> None:
    made = certificate(good)
    curve, version = bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("a003020102")
    odd = made.replace(curve, curve[:-1] + b"\x55"), made.replace(version, version[:-1] + b"\x55")
    for der in odd:
        assert der != made
        with pytest.raises(ValueError, match="cannot be read"):
            peer_id_of_certificate(der)


async def test_who_is_not_there_is_said_with_the_cause() -> None:
    with socket.socket() as held:  # bound, and nobody listens
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(StreamLost) as lost:
            await read_peer_id("127.0.0.1", port)
    assert str(lost.value) == f"dial: cannot connect to 127.0.0.1:{port}: Connection refused"


def test_bytes_that_are_no_certificate_prove_nothing() -> None:
    with pytest.raises(ValueError, match=r"."):
        peer_id_of_certificate(b"certificate")


async def say_http(stream: trio.SocketStream) -> None:
    await stream.receive_some(1024)
    await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")


async def say_noise_only(stream: trio.SocketStream) -> None:
    await stream.receive_some(1024)
    await stream.send_all(b"\x13/multistream/1.0.0\n\x03na\n")


async def say_no_tls(stream: trio.SocketStream) -> None:
    await stream.receive_some(1024)
    await stream.send_all(b"\x13/multistream/1.0.0\n\x0b/tls/1.0.0\n" + bytes(100))


async def hang_up(stream: trio.SocketStream) -> None:
    await stream.receive_some(1024)


@pytest.mark.parametrize(
    ("serve", "words"),
    [
        (say_http, "protocol: .* does not speak libp2p"),
        (say_noise_only, "protocol: .* not over TLS: it said 'na'"),
        (say_no_tls, "handshake: .* did not prove who it is"),
        (hang_up, "protocol: .* it hung up"),
    ],
)
async def test_a_failed_probe_names_its_step(
    serve: Callable[[trio.SocketStream], Awaitable[None]], words: str
) -> None:
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        with pytest.raises(StreamLost, match=words):
            await read_peer_id("127.0.0.1", listener.socket.getsockname()[1])
        nursery.cancel_scope.cancel()


async def test_nobody_there_and_no_such_name() -> None:
    with pytest.raises(StreamLost, match=r"^dial: cannot connect to 127.0.0.1:1"):
        await read_peer_id("127.0.0.1", 1)
    with pytest.raises(
        StreamLost, match=r"^resolve: no address is known for no.such.name.invalid:1"
    ):
        await read_peer_id("no.such.name.invalid", 1)
