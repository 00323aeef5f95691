"""One message with its length before it, as libp2p's own protocols write them, from a stream."""

from peer.network.circuit_messages import MAX_CIRCUIT_MESSAGE_BYTES
from peer.ports import Stream
from protocol.address.varint import decode_uvarint
from protocol.errors import RemoteProtocolError


async def receive_delimited(stream: Stream, max_bytes: int = MAX_CIRCUIT_MESSAGE_BYTES) -> bytes:
    """The next message, and not one byte of what follows it.

    Raises:
        RemoteProtocolError: it is longer than allowed.
        StreamLost
    """
    prefix = b""
    while not prefix or prefix[-1] & 0x80:
        prefix += await _exactly(stream, 1)
        if len(prefix) > 3:
            raise RemoteProtocolError("the length of a message does not end")
    length, _ = decode_uvarint(prefix)
    if length > max_bytes:
        raise RemoteProtocolError(f"a message of {length} bytes; at most {max_bytes}")
    return await _exactly(stream, length)


async def _exactly(stream: Stream, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    if num_bytes:
        await stream.receive_into(memoryview(data))
    return bytes(data)
