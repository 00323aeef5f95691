"""libp2p by hand, for attackers without a p2pd: TCP, multistream-select, TLS and yamux.

A `Bare` connection keeps to no bounds of p2pd or of ours: it opens as many streams as it is told,
says what it is told on them, and leaves what comes back unread.
"""

import datetime as dt
import ssl
import struct
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

from peer.network.identity import Identity
from protocol.address import multiaddr
from protocol.address.peer_id import KEY_PROTOBUF_PREFIX
from protocol.address.varint import encode_uvarint

EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
MULTISTREAM, TLS, YAMUX = "/multistream/1.0.0", "/tls/1.0.0", "/yamux/1.0.0"
SYN, FIN, RST = 1, 4, 8


def said(*texts: str) -> bytes:
    """Messages of multistream-select."""
    return b"".join(encode_uvarint(len(text) + 1) + text.encode() + b"\n" for text in texts)


def frame(stream: int, flags: int, data: bytes = b"") -> bytes:
    """A data frame of yamux."""
    return struct.pack("!BBHII", 0, 0, flags, stream, len(data)) + data


def signed_key(key: bytes, signature: bytes) -> bytes:
    """The extension of a certificate: a peer's key, and what it signed."""
    body = b"\x04" + bytes([len(key)]) + key + b"\x04" + bytes([len(signature)]) + signature
    return b"\x30" + bytes([len(body)]) + body


def self_signed(
    make_extension: Callable[[bytes], bytes | None],
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """A certificate and its key; `make_extension` gets the bytes that the peer's key must sign."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.SERIAL_NUMBER, "1")])
    now = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + dt.timedelta(days=36500))
    )
    own = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    value = make_extension(b"libp2p-tls-handshake:" + own)
    if value is not None:
        extension = x509.UnrecognizedExtension(EXTENSION, value)
        builder = builder.add_extension(extension, critical=False)
    return key, builder.sign(key, hashes.SHA256())


@cache
def _certificate(identity: Identity) -> ssl.SSLContext:
    public = KEY_PROTOBUF_PREFIX + identity.public_key
    key, made = self_signed(lambda data: signed_key(public, identity.sign(data)))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    with tempfile.NamedTemporaryFile() as pem:
        pem.write(private + made.public_bytes(Encoding.PEM))
        pem.flush()
        context.load_cert_chain(pem.name)
    return context


class Bare:
    """A connection that has come as far as yamux.

    Attributes:
        heard: what was said to us on each stream, as far as it was read; as 0, the certificate.
    """

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream
        self._next = 1
        self.heard = defaultdict[int, bytearray](bytearray)

    async def send(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def open_streams(self, number: int, says: bytes, *, flags: int = SYN) -> None:
        """Open so many streams, each with these first bytes."""
        ids = range(self._next, self._next + 2 * number, 2)
        self._next = ids.stop
        await self.send(b"".join(frame(each, flags, says) for each in ids))

    async def ask(self, says: bytes, num_bytes: int) -> bytes:
        """What comes back on a new stream, until there are so many bytes, or its end."""
        asked = self._next
        await self.open_streams(1, says)
        while len(self.heard[asked]) < num_bytes:
            stream, flags = await self._hear()
            if stream == asked and flags & (FIN | RST):
                break
        return bytes(self.heard[asked])

    async def _hear(self) -> tuple[int, int]:
        """Read a frame: its stream, and its flags."""
        header = bytearray()
        await self._read(12, header)
        kind, flags, stream, length = struct.unpack("!xBHII", header)
        if kind == 0:
            await self._read(length, self.heard[stream])
        return stream, flags

    async def _read(self, number: int, into: bytearray) -> None:
        whole = len(into) + number
        while len(into) < whole:
            came = await self._stream.receive_some(whole - len(into))
            if not came:
                raise trio.BrokenResourceError("hung up")
            into += came

    async def drain(self) -> None:
        """Read to the end."""
        try:
            while True:
                await self._hear()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass


async def _read_said(stream: trio.abc.ReceiveStream, number: int) -> bytes:
    seen = b""
    while seen.count(b"\n") < number:
        data = await stream.receive_some(1)  # and not one byte of what follows
        if not data:
            raise trio.BrokenResourceError("hung up")
        seen += data
    return seen


async def dial(address: str, source: str | None = None) -> trio.SocketStream:
    """A TCP connection to a multiaddr, from that IP address of ours."""
    (_, host), (_, port), *_ = multiaddr.parse(address)
    return await trio.open_tcp_stream(host, int(port), local_address=source)


async def agree_on(stream: trio.abc.Stream, protocol: str) -> bytes:
    """Agree on a protocol for the connection; what was answered."""
    await stream.send_all(said(MULTISTREAM, protocol))
    return await _read_said(stream, 2)


@asynccontextmanager
async def bare_connection(
    address: str, identity: Identity, source: str | None = None
) -> AsyncIterator[Bare]:
    """A connection to a TCP multiaddr. Raises trio.BrokenResourceError, OSError: not let in."""
    tcp = await dial(address, source)
    try:
        await agree_on(tcp, TLS)
        secured = trio.SSLStream(tcp, _certificate(identity), https_compatible=True)
        await secured.do_handshake()
        await agree_on(secured, YAMUX)
        bare = Bare(secured)
        bare.heard[0] += secured.getpeercert(binary_form=True)
        yield bare
    finally:
        await trio.aclose_forcefully(tcp)


async def first_answer(address: str, offered: str) -> str:
    """What a TCP multiaddr answers to a connection that would begin with this protocol."""
    (_, host), (_, port), *_ = multiaddr.parse(address)
    async with await trio.open_tcp_stream(host, int(port)) as tcp:
        await tcp.send_all(said(MULTISTREAM, offered))
        await _read_said(tcp, 1)
        answer = b""
        while not answer.endswith(b"\n"):
            answer += await tcp.receive_some(1) or b"\n"
    return answer[1:-1].decode()
