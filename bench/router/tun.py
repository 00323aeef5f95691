"""TUN devices in other network namespaces, with segmentation left to whoever reads them."""

import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

DEVICE: Final = Path("/dev/net/tun")
INTERFACE: Final = "eth0"
_NAMESPACES: Final = Path("/run/netns")
_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_IFF_VNET_HDR: Final = 0x4000
_CHECKSUM_AND_TCP: Final = 0x01 | 0x02 | 0x04 | 0x08
"""TUN_F_CSUM, TSO4, TSO6, TSO_ECN: checksums and segments are not made here."""


def open_tun(namespace: str) -> int:
    """Make the interface of a namespace; its packets are read from the descriptor. It does not
    block.

    Raises:
        OSError
    """
    with _inside(namespace):
        descriptor = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _CHECKSUM_AND_TCP)
    return descriptor


@contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """Be in a namespace: a device belongs to where /dev/net/tun was opened."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    there = os.open(_NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(there)
        yield
    finally:
        _enter(here)
        os.close(there)
        os.close(here)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
