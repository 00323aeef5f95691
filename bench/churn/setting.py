"""What is simulated, and what one machine of it is."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from protocol.microbatch.core import Command
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.relay import RelayCore

PATIENCE_S: Final = 600.0
SLOTS: Final = 4
LOOK_S: Final = 0.5
Name = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated; every kill is of a relay drawn at random among those that live.

    Attributes:
        replicas: relays of each stage.
        relay_stages: stages beside the data peers'.
        microbatches: of each data peer in an iteration.
        every_s: between two kills.
        away_s: until a relay that was killed is back.
        notice_s: until a relay that was killed is known to be gone.
        hop_s: a boundary's way; an answer takes `latency_s`.
    """

    data_peers: int = 4
    replicas: int = 3
    relay_stages: int = 3
    microbatches: int = 6
    seconds: float = 300.0
    every_s: float = 15.0
    away_s: float = 30.0
    notice_s: float = 2.0
    hop_s: float = 0.2
    latency_s: float = 0.05
    forward_s: float = 0.15
    backward_s: float = 0.3


@dataclass
class Machine:
    """One life of a peer.

    Attributes:
        added: names whose gradients move its weights at its next step.
        out: a data peer's microbatches that have not ended.
    """

    name: str
    core: DataPeerCore | RelayCore
    column: int
    is_alive: bool = True
    work: deque[Command] = field(default_factory=deque)
    is_busy: bool = False
    held: set[int] = field(default_factory=set)
    added: list[Name] = field(default_factory=list)
    out: set[int] = field(default_factory=set)
    begun: int = 0
