"""Ends of streams on a host: what bench/routed_network.py starts in namespaces.

    python -m bench.router.stream receive          prints its port, then [[seconds, bytes], ...]
    python -m bench.router.stream send ADDRESS PORT SECONDS
    python -m bench.router.stream echo             prints its port
    python -m bench.router.stream ask ADDRESS PORT TIMES    prints [seconds, ...]

`receive` takes one connection, and tells how much had come by when (on the monotonic clock, which
all processes of a machine share). Each ends with what it does, or with its input.
"""

import json
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import Final

CHUNK_BYTES: Final = 1 << 17
TOLD_EVERY_S: Final = 0.05
PATIENCE_S: Final = 5.0


def receive() -> None:
    """Take one stream until it ends."""
    with socket.create_server(("", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    seen, received, buffer = [(time.monotonic(), 0)], 0, bytearray(CHUNK_BYTES)
    with connection, suppress(ConnectionResetError):
        while count := connection.recv_into(buffer):
            received += count
            if (now_s := time.monotonic()) - seen[-1][0] >= TOLD_EVERY_S:
                seen.append((now_s, received))
    print(json.dumps(seen), flush=True)


def send(address: str, port: int, seconds: float) -> None:
    """Send as fast as it goes for so long."""
    with socket.create_connection((address, port), PATIENCE_S) as connection:
        connection.settimeout(seconds)
        # What is not out by then is not sent any more: the next measurement begins.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end_s, chunk = time.monotonic() + seconds, bytes(CHUNK_BYTES)
        while time.monotonic() < end_s:
            try:
                connection.send(chunk)
            except TimeoutError:
                break


def echo() -> None:
    """Send back what comes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("", 0))
        print(server.getsockname()[1], flush=True)
        while True:
            data, whence = server.recvfrom(CHUNK_BYTES)
            server.sendto(data, whence)


def ask(address: str, port: int, times: int) -> None:
    """How long small packets take, there and back, one after another."""
    took_s = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(PATIENCE_S)
        client.connect((address, port))
        for _ in range(times):
            began_s = time.monotonic()
            client.send(b"?")
            client.recv(CHUNK_BYTES)
            took_s.append(time.monotonic() - began_s)
    print(json.dumps(took_s), flush=True)


def _end_with_input() -> None:
    while os.read(0, CHUNK_BYTES):
        pass
    os._exit(0)


def main() -> None:
    """Be one end."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    match sys.argv[1:]:
        case ["receive"]:
            receive()
        case ["send", address, port, seconds]:
            send(address, int(port), float(seconds))
        case ["echo"]:
            echo()
        case ["ask", address, port, times]:
            ask(address, int(port), int(times))
        case wrong:
            sys.exit(f"{wrong}? {__doc__}")


if __name__ == "__main__":
    main()
