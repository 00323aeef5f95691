"""What a network keeps count of: bytes by protocol id, and the streams that are open."""

from collections import Counter
from types import MappingProxyType
from typing import Final

from peer.ports import NetworkStatistics

MAX_PROTOCOLS: Final = 64
"""Protocol ids counted one by one; what comes after that is counted together."""
_OTHERS: Final = "other"


class Traffic:
    """Counters of one network. Protocol ids come from our own code, never from peers."""

    def __init__(self) -> None:
        self._sent_bytes: Counter[str] = Counter()
        self._received_bytes: Counter[str] = Counter()
        self.open_streams = 0

    def count_sent(self, protocol: str, num_bytes: int) -> None:
        """Count bytes that were handed to a stream."""
        self._sent_bytes[self._name(protocol)] += num_bytes

    def count_received(self, protocol: str, num_bytes: int) -> None:
        """Count bytes that were taken from a stream."""
        self._received_bytes[self._name(protocol)] += num_bytes

    def _name(self, protocol: str) -> str:
        known = protocol in self._sent_bytes or protocol in self._received_bytes
        if known or len(self._sent_bytes) + len(self._received_bytes) < MAX_PROTOCOLS:
            return protocol
        return _OTHERS

    def statistics(self) -> NetworkStatistics:
        """Counts so far."""
        return NetworkStatistics(
            sent_bytes=MappingProxyType(dict(self._sent_bytes)),
            received_bytes=MappingProxyType(dict(self._received_bytes)),
            open_streams=self.open_streams,
        )
