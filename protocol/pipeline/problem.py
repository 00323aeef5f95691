"""The planning problem of a pipeline, as data: machines, links, work, and the rules of paths.

A model is cut into S stages, and a machine holds one. Those that hold stage 0 (embedding, first
layers, head and loss) are *data peers*, all others *relays*. A microbatch starts at its data peer,
visits relays of `visited` - 1 different stages and comes back for the loss; its gradient walks the
same path in reverse. `visited` = S is the full pipeline, fewer is SkipPipe.

    CC1  stage 0 is never skipped nor moved: each path begins and ends at its data peer
    CC2  every relay stage trains the same number of microbatches: at most the rounded-up mean
         plus `stage_slack`
    CC3  stages rise along a path, from each to the next by `max_jump` at most. SkipPipe's releases
         let a few change places; that cost learning and saved no time
         (docs/results/pipeline_learning.md)
    TC1  memory: a machine holds at most `slots` microbatches. A forward takes a slot, its backward
         frees it
    TC2  collisions: a machine does one thing at a time

Plans keep CC1 to CC3; the simulator keeps TC1 and TC2, and prices the waiting.

A `Problem` is a snapshot of integers (microseconds, bytes, parts in a thousand), named by the
blake3 of its canonical bytes: JSON with sorted keys. All that hold it compute the same plan.

Source: SkipPipe (arXiv 2502.19913) and its published code, of which the constants of `StageWork`
are, and the largest jump of its last release; that paths only skip, and never go back, is the rule
of its later fork.

Legal orders of stages are few (10 for six stages of which four are visited), so they are enumerated
once; a problem with too many is refused. The cheapest machines along one order are found by dynamic
programming over the prices of hops, both ways.

Draws come from SplitMix64 (Steele, Lea and Flood 2014), a mixed counter: the same on every machine,
and no secret.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from typing import Final, TypeVar

import blake3

from protocol.errors import LocalProtocolError
from protocol.limits import MAX_STAGES

# --- problem --------------------------------------------------------------------------------------
RelayNumbers = tuple[int, ...]
"""The machines that a microbatch visits after its data peer, in order."""
Stages = tuple[int, ...]
Matrix = tuple[tuple[int, ...], ...]
"""A row for each source, a column for each destination."""

MAX_PEERS: Final = 1024
US_PER_S: Final = 1_000_000
THOUSAND: Final = 1000


@dataclass(frozen=True, slots=True)
class PipelinePeer:
    """A machine.

    Attributes:
        forward_us: of one microbatch through one stage.
        slots: microbatches whose activations it can hold.
    """

    name: str
    forward_us: int
    slots: int


@dataclass(frozen=True, slots=True)
class StageWork:
    """The work of one microbatch beside its forward.

    Attributes:
        boundary_bytes: what travels between two stages, each way, as coded.
        backward_permille: backward through a stage, of its forward.
        input_permille: the share of a backward that the stage before waits for; the rest, the
            gradient of the weights, is done when there is time. 1000 does not split.
        loss_permille: norm, head and loss at the data peer, of its forward.
        hop_us: copies between device and host, beside the line.
        gap_us: how long a machine stays busy after a piece of work.
        origin_gap_us: the same after the first forward of a data peer.
    """

    boundary_bytes: int
    backward_permille: int = 1500
    input_permille: int = 1000
    loss_permille: int = 250
    hop_us: int = 0
    gap_us: int = 0
    origin_gap_us: int = 0


@dataclass(frozen=True, slots=True)
class PathRules:
    """The limits of CC2 and CC3."""

    max_jump: int = 4
    stage_slack: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """A snapshot to plan for.

    Attributes:
        latency_us: one way, between any two.
        bytes_per_s: of a link, one way.
        queued_links: a link carries one boundary at a time; else transfers do not meet.
        stage_sizes: machines of each stage, data peers first.
        visited: stages on each path, stage 0 among them.
        microbatches: of one iteration, of all data peers together.
    """

    peers: tuple[PipelinePeer, ...]
    latency_us: Matrix
    bytes_per_s: Matrix
    work: StageWork
    stage_sizes: tuple[int, ...]
    visited: int
    microbatches: int
    rules: PathRules = field(default_factory=PathRules)
    queued_links: bool = False

    def __post_init__(self) -> None:
        """Raises LocalProtocolError: it is no problem."""
        number = len(self.peers)
        checks = (
            (2 <= len(self.stage_sizes) <= MAX_STAGES, "a pipeline has two stages or more"),
            (number <= MAX_PEERS, f"at most {MAX_PEERS} machines"),
            (sum(self.stage_sizes) == number, "stage_sizes must add up to the machines"),
            (min(self.stage_sizes) >= 1, "every stage needs a machine"),
            (2 <= self.visited <= len(self.stage_sizes), "a path visits two stages to all"),
            (self.microbatches >= 1, "an iteration has a microbatch"),
            (len({peer.name for peer in self.peers}) == number, "names must differ"),
            (all(p.slots >= 1 and p.forward_us >= 1 for p in self.peers), "slots, forward_us >= 1"),
            (_square(self.latency_us, number, 0), "latency_us: a row and column for each, >= 0"),
            (_square(self.bytes_per_s, number, 1), "bytes_per_s: a row and column for each, > 0"),
        )
        for holds, sentence in checks:
            if not holds:
                raise LocalProtocolError(sentence)

    @property
    def num_stages(self) -> int:
        return len(self.stage_sizes)

    @property
    def stage_cap(self) -> int:
        """The most microbatches that a relay stage may train (CC2)."""
        visits = self.microbatches * (self.visited - 1)
        return -(-visits // (self.num_stages - 1)) + self.rules.stage_slack

    def transfer_us(self, source: int, destination: int) -> int:
        """How long a boundary occupies the link."""
        return -(-self.work.boundary_bytes * US_PER_S // self.bytes_per_s[source][destination])

    def travel_us(self, source: int, destination: int) -> int:
        """From the end of the work at one machine to the start of it at the next, at best."""
        waiting = self.latency_us[source][destination] + self.work.hop_us
        return waiting + self.transfer_us(source, destination)

    def to_bytes(self) -> bytes:
        return canonical(asdict(self))

    def digest(self) -> str:
        return blake3.blake3(self.to_bytes()).hexdigest(length=16)


def canonical(tree: object) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def _square(matrix: Matrix, number: int, least: int) -> bool:
    rows = len(matrix) == number and all(len(row) == number for row in matrix)
    return rows and all(
        value >= least for a, row in enumerate(matrix) for b, value in enumerate(row) if a != b
    )


# --- stage orders ---------------------------------------------------------------------------------
MAX_ORDERS: Final = 20_000


def stage_orders(num_stages: int, visited: int, rules: PathRules) -> tuple[Stages, ...]:
    """The orders in which relay stages may be visited (CC1, CC3), sorted.

    Raises:
        LocalProtocolError: there are none, or too many to enumerate.
    """
    found = tuple(islice(_orders((), num_stages, visited - 1, rules), MAX_ORDERS + 1))
    if not found or len(found) > MAX_ORDERS:
        raise LocalProtocolError(
            f"{'no' if not found else f'more than {MAX_ORDERS}'} orders to visit {visited} of"
            f" {num_stages} stages within these limits; change stages, visited or max_jump"
        )
    return found


def within(order: Stages, rules: PathRules) -> bool:
    """Whether stages may be visited in this order (CC3)."""
    return all(0 < after - before <= rules.max_jump for before, after in pairwise((0, *order)))


def cheapest_relays(
    origin: int, layers: Sequence[Sequence[int]], price: Sequence[Sequence[int]]
) -> tuple[int, RelayNumbers] | None:
    """The cheapest closed path from `origin` through one machine of each layer.

    Args:
        price: of a hop, there and back, the work at its end included.

    Returns:
        Its price and relays, the lowest numbers among equals; None if a layer is empty.
    """
    if not all(layers):
        return None
    ends: list[tuple[int, RelayNumbers]] = [(0, ())]
    for layer in layers:
        ends = [
            min(
                (so_far + price[path[-1] if path else origin][machine], (*path, machine))
                for so_far, path in ends
            )
            for machine in layer
        ]
    closed = [(so_far + price[path[-1]][origin], path) for so_far, path in ends if path]
    return min(closed, default=None)


def _orders(order: Stages, num_stages: int, left: int, rules: PathRules) -> Iterator[Stages]:
    if not left:
        yield order
        return
    before = order[-1] if order else 0
    for stage in range(before + 1, min(before + rules.max_jump + 1, num_stages)):
        yield from _orders((*order, stage), num_stages, left - 1, rules)


# --- draws ----------------------------------------------------------------------------------------
T = TypeVar("T")
_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
_MIX: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Draws:
    def __init__(self, seed: str) -> None:
        self._state = int.from_bytes(blake3.blake3(seed.encode()).digest(length=8), "big")

    def below(self, bound: int) -> int:
        """An integer from 0 to bound - 1; with bounds far below 2^64 none is likelier."""
        self._state = (self._state + _STEP) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * _MIX[0]) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * _MIX[1]) & _MASK
        return (mixed ^ (mixed >> 31)) % bound

    def of(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]
