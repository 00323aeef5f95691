"""The doors to the outside: what the daemon touches beside its own memory and trio's clock.

Each port has a real and a simulated implementation, and one test suite checks both. No socket,
thread, `time.time()` or unseeded random gets past them: the same code runs a thousand peers in one
process in virtual time. Keys and invitations alone are made of `os.urandom`.

Peer ids are the base58 text of a libp2p peer id (`12D3KooW...`); addresses are multiaddr text.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:  # a command says its first line before these are imported
    from protocol.membership.book import Fault
    from protocol.wire.messages import Refusal

T = TypeVar("T")
PeerId = str
Address = str


OnBytes = Callable[[int], None]
"""Told of bytes as they come; must not raise."""


class Stream(Protocol):
    """A two-way byte stream to one authenticated peer.

    There is no half-close: the receiver acknowledges, the sender closes last. All methods raise
    `protocol.errors.StreamLost` when the stream ends early; a clean end of input is `b""` from
    `receive_some` and `StreamLost` from `receive_into`.
    """

    @property
    def remote_peer_id(self) -> PeerId: ...
    @property
    def remote_address(self) -> Address:
        """The address that the peer is connected from, or to; empty where it is not known."""

    async def turn(self, num_bytes: int) -> int:
        """Wait until bulk may go; how much of it may go now, at least one byte.

        Bulk is sent after asking, and no more of it. Small messages need not ask.
        """

    async def send_all(self, data: bytes | bytearray | memoryview) -> None: ...
    async def receive_some(self, max_bytes: int = 65536) -> bytes: ...
    async def receive_into(self, buffer: memoryview, arrived: OnBytes | None = None) -> None:
        """Fill `buffer` completely; `arrived` is told how much of it is there, as it comes."""

    async def aclose(self) -> None: ...


StreamHandler = Callable[[Stream], Awaitable[None]]


@dataclass(slots=True)
class NetworkStatistics:
    """Traffic of a network since it started.

    Attributes:
        sent_bytes, received_bytes: by protocol id, between us and the streams.
        refused_streams: streams from outside that were closed because a bound was reached.
        failed_streams: streams from outside that a bug of ours has ended.
        relayed_peers: peers that we are connected to through other peers alone.
        restarts: of p2pd.
        last_failure: why p2pd last ended; empty when it never did.
    """

    sent_bytes: dict[str, int]
    received_bytes: dict[str, int]
    refused_streams: int = 0
    failed_streams: int = 0
    relayed_peers: int = 0
    restarts: int = 0
    p2pd_pid: int | None = None
    last_failure: str = ""


class Judge(Protocol):
    """Decides which peers are served; implemented by `peer.daemon.admission.Reputation`."""

    def refusal_of(self, peer_id: PeerId) -> "Refusal | None":
        """Why a peer is not served."""

    def conduct_refusal_of(self, peer_id: PeerId) -> "Refusal | None":
        """Why a peer is not even greeted."""

    def wait_s(self, peer_id: PeerId) -> float:
        """How long a stream of this peer waits before it is served."""

    def blame(self, peer_id: PeerId, fault: "Fault") -> None: ...


class Network(Protocol):
    """Streams to peers, by peer id and protocol id."""

    @property
    def peer_id(self) -> PeerId: ...
    @property
    def addresses(self) -> Sequence[Address]:
        """Full multiaddrs with /p2p/, those worth telling others first."""

    def announce(self, addresses: Sequence[Address]) -> None:
        """Announce these beside our own addresses, in place of those announced before."""

    async def probe(self, address: Address) -> PeerId:
        """The peer that answers at an address, asked over a connection of its own.

        Raises `StreamLost` with a sentence that names the step that failed.
        """

    async def connect(self, peer_id: PeerId, addresses: Sequence[Address]) -> None:
        """Make `peer_id` dialable at `addresses` and connect. Raises as `probe`."""

    def note_addresses(self, peer_id: PeerId, addresses: Sequence[Address]) -> None:
        """Make a peer dialable where we know no address of it, without connecting."""

    async def open_stream(self, peer_id: PeerId, protocol: str) -> Stream:
        """Raises `StreamLost` if the peer is unreachable or does not speak `protocol`."""

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` in a task of its own for each stream, and close the stream when it ends.

        `LocoError` and trio's resource errors raised by a handler end that stream alone.
        """

    def admit_by(self, judge: Judge) -> None: ...

    def statistics(self) -> NetworkStatistics: ...


class Directory(Protocol):
    """Small signed records, found by key; and the swarm's idea of the time."""

    def swarm_time_s(self) -> float:
        """Unix time as the swarm sees it: our wall clock plus the corrected offset."""

    def correct_clock(self, offset_s: float) -> None: ...

    async def store(self, key: bytes, value: bytes) -> None:
        """Store our own record; returning means nothing but that the attempt is over."""

    async def get(self, key: bytes) -> Mapping[PeerId, bytes]:
        """Every live record found, by its peer; empty when nothing answers."""

    async def add_peers(self, addresses: Sequence[Address]) -> None:
        """Nodes to enter by, already connected through the network."""


class ProcessorTime(NamedTuple):
    """Seconds of processors, counted on: taken by processes of ours, and idle on this machine."""

    taken_s: float
    idle_s: float


class Work(Protocol):
    """Where blocking work runs: a thread in real life, inline in simulation."""

    def processor_time(self, pid: int | None) -> ProcessorTime:
        """Time that this process has taken, and another of ours; as far as the system tells."""

    async def run(self, function: Callable[..., T], *args: Any, may_be_cut_off: bool = False) -> T:
        """`function(*args)`; cancelling waits for it, unless it may be cut off at any moment."""

    def check_cancelled(self) -> None:
        """Raises trio.Cancelled in a function under way if its `run` was cancelled.

        A function that may take long calls it now and then, and leaves nothing behind.
        """


# The Trainer port stands in peer/training/ports.py: its messages belong to the trainer.
