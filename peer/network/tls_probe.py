"""Read the libp2p peer id of the peer at host:port from a TLS handshake.

`--bootstrap host:port` needs this, where the user gives no peer id: the id is read once, shown and
pinned (trust on first use).

The steps, as every libp2p TCP connection begins (specs: connections, multistream-select, tls):

    resolve      the name has an address
    dial         TCP
    protocol     multistream-select: both sides say /multistream/1.0.0, we propose /tls/1.0.0, the
                 peer repeats it
    handshake    TLS 1.3, ALPN "libp2p". The certificate is self-signed and carries an extension
                 with the peer's public key and that key's signature over "libp2p-tls-handshake:" +
                 the certificate's own key. TLS proves that the other side has the certificate's
                 key; the signature proves that the peer's key vouches for it.

We show no certificate of our own: under TLS 1.3 the client is done before the server can mind.
"""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import trio
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from peer.runtime import PeerId
from protocol.address.peer_id import (
    KEY_PROTOBUF_PREFIX,
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    peer_id_from_public_key,
)
from protocol.address.varint import encode_uvarint, read_delimited
from protocol.errors import StreamLost, leaves
from protocol.limits import ANSWER_S
from protocol.membership.records import verify_with_peer_id

from .protobuf import receive_exactly

_MULTISTREAM: Final = "/multistream/1.0.0"
_TLS: Final = "/tls/1.0.0"
_EXTENSION: Final = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SIGNED_PREFIX: Final = b"libp2p-tls-handshake:"
_SIGNED_KEY: Final = bytes.fromhex("30680424") + KEY_PROTOBUF_PREFIX, bytes.fromhex("0440")
"""The bytes of the extension before an Ed25519 key (32 bytes), and before its signature (64): DER
writes SEQUENCE { OCTET STRING, OCTET STRING } of these lengths in this way alone."""


_UNREADABLE: Final = (
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
    UnsupportedAlgorithm,
)
"""What a certificate raises beside ValueError."""


async def read_peer_id(host: str, port: int) -> PeerId:
    """The peer that listens there. Raises StreamLost, with the step that failed."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with _step(f"resolve: no address is known for {where}"):
        await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    with _step(f"dial: cannot connect to {where}"):
        connection = await trio.open_tcp_stream(host, port)
    try:
        with _step(f"protocol: {where} does not speak libp2p"):
            await connection.send_all(_select_message(_MULTISTREAM) + _select_message(_TLS))
            greeting = await _receive_select_message(connection)
            answer = await _receive_select_message(connection)
        if greeting != _MULTISTREAM:
            raise StreamLost(f"protocol: {where} does not speak libp2p: it said {greeting!r}")
        if answer != _TLS:
            sentence = f"{where} speaks libp2p, but not over TLS: it said {answer!r}"
            raise StreamLost(f"protocol: {sentence}")
        with _step(f"handshake: {where} did not prove who it is"):
            secured = trio.SSLStream(connection, _context(), https_compatible=True)
            await secured.do_handshake()
            return peer_id_of_certificate(secured.getpeercert(binary_form=True) or b"")
    finally:
        await trio.aclose_forcefully(connection)


@contextmanager
def _step(sentence: str) -> Iterator[None]:
    """Raise StreamLost, with this sentence and the cause, for what fails or takes too long."""
    try:
        with trio.fail_after(ANSWER_S):
            yield
    except (OSError, ValueError, trio.BrokenResourceError, trio.TooSlowError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__ or error
        raise StreamLost(f"{sentence}: {_words(cause)}") from error


def _select_message(text: str) -> bytes:
    data = text.encode() + b"\n"
    return encode_uvarint(len(data)) + data


async def _receive_select_message(connection: trio.SocketStream) -> str:
    data = await read_delimited(partial(receive_exactly, connection))
    if not data.endswith(b"\n"):
        raise ValueError("a message did not end in a newline")
    return data[:-1].decode("ascii", errors="replace")


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # no authority stands behind it; the extension is verified
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    return context


def peer_id_of_certificate(der: bytes) -> PeerId:
    """The peer id that a libp2p certificate (DER) proves. Raises ValueError: none."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        extension = certificate.extensions.get_extension_for_oid(_EXTENSION).value
        own_key = certificate.public_key()
    except x509.ExtensionNotFound as error:
        raise ValueError("its certificate is not a libp2p certificate") from error
    except _UNREADABLE as error:
        raise ValueError(f"its certificate cannot be read: {error}") from error
    assert isinstance(extension, x509.UnrecognizedExtension)
    before, between = _SIGNED_KEY
    proof = extension.value.removeprefix(before)
    key, signature = proof[:PUBLIC_KEY_BYTES], proof[PUBLIC_KEY_BYTES:].removeprefix(between)
    if extension.value != before + key + between + signature or len(signature) != SIGNATURE_BYTES:
        raise ValueError("its certificate holds no Ed25519 key, which every peer of a run needs")
    peer_id = peer_id_from_public_key(key)
    own_bytes = own_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if not verify_with_peer_id(peer_id, _SIGNED_PREFIX + own_bytes, signature):
        raise ValueError(f"its certificate is not signed by {peer_id}, as it claims")
    return peer_id


def _words(error: BaseException) -> str:
    if isinstance(error, trio.TooSlowError):
        return f"nothing came in {ANSWER_S:.0f} s"
    if isinstance(error, OSError) and error.__cause__ is not None:  # of each address that it has
        return ", ".join(dict.fromkeys(map(_words, leaves(error.__cause__))))
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
