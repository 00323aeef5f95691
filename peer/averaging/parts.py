"""A way of averaging, as the peer sees it.

Each way has slow weights and an outer momentum, which a joiner takes over; a lock under which they
move; rounds, which drive the trainer; and a server for other peers.
"""

from importlib import import_module
from typing import Protocol

import trio

from peer.rounds.loop import RoundLoop
from peer.rounds.way import AveragingParts
from peer.training.ports import StartTrainer
from protocol.content.samples import Float32Vector
from protocol.run.ways import WAYS


class Averaging(Protocol):
    """A way of averaging, before and while rounds run."""

    slow_P: Float32Vector
    momentum_P: Float32Vector
    lock: trio.Lock

    @property
    def round(self) -> int:
        """The round of the last outer step; -1 before the first."""

    @property
    def senders(self) -> int:
        """Peers that send us their weights at the same time."""

    def set_first_round(self, round_: int) -> None:
        """The vectors hold our first state, as it stood after this round; -1 before the first."""

    def begin(self, start_trainer: StartTrainer) -> RoundLoop: ...

    async def serve(self) -> None:
        """Serve other peers, until cancelled."""


def averaging_of(parts: AveragingParts) -> Averaging:
    """The way of averaging that the run spec names (protocol/run/ways.py), ready to begin."""
    module, _, name = WAYS[parts.spec.sync.method].daemon.partition(":")
    averaging: Averaging = getattr(import_module(module), name)(parts)
    return averaging
