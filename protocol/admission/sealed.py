"""Sealed statements: bytes under an Ed25519 signature, of one form only.

    statement   msgpack [body, signature]
    body        msgpack [kind, ...fields]; what signs it is found in the body

A signature covers DOMAIN and the body, so that none that was made for anything else can pass for
one of a statement. There is exactly one encoding: what does not encode to the same bytes again is
refused, so statements can be compared as bytes.
"""

from collections.abc import Callable
from typing import Any, Final

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_STATEMENT_BYTES

DOMAIN: Final = b"loco/v1/admission\0"
KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64

Sign = Callable[[bytes], bytes]


def seal(fields: list[Any], sign: Sign) -> bytes:
    """A statement."""
    body: bytes = msgpack.packb(fields)
    sealed: bytes = msgpack.packb([body, sign(DOMAIN + body)])
    return sealed


def opened(data: bytes) -> tuple[list[Any], bytes, bytes]:
    """The fields of a statement, its body and its signature, which is yet to be checked.

    Raises:
        RemoteProtocolError: it is none.
    """
    if len(data) > MAX_STATEMENT_BYTES:
        raise RemoteProtocolError(f"a statement of {len(data)} bytes")
    try:
        body, signature = msgpack.unpackb(data, max_map_len=0, max_ext_len=0)
        fields = msgpack.unpackb(body, max_map_len=0, max_ext_len=0)
        again = msgpack.packb([msgpack.packb(fields), signature])
    except Exception as error:  # whatever a stranger's bytes may do to the decoder
        raise RemoteProtocolError(f"not a statement: {error}") from error
    is_list = isinstance(fields, list) and isinstance(signature, bytes)
    if not is_list or len(signature) != SIGNATURE_BYTES or again != data:
        raise RemoteProtocolError("a statement that is not in canonical form")
    return fields, body, signature


def check(key: bytes, body: bytes, signature: bytes) -> None:
    """Raises RemoteProtocolError: this key did not sign this body."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, DOMAIN + body)
    except (InvalidSignature, ValueError) as error:
        raise RemoteProtocolError("a statement's signature is not its signer's") from error
