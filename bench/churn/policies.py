"""What data peers do about microbatches that a dead relay held: ours, and others' policies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from protocol.microbatch.core import Command
from protocol.microbatch.data_peer import DataPeerCore, SentMicrobatch
from protocol.wire.stage_messages import RelaysByStage


class Dropping(DataPeerCore):
    """Gives up what is lost on its way back, as Pluralis' Agora does.

    What is lost on its way to the loss goes another way, as there.
    """

    def _lose(self, sent: SentMicrobatch) -> list[Command]:
        return self._give_up(sent) if sent.reached_loss and not sent.home else super()._lose(sent)


def everybody(relays: RelaysByStage, _column: int) -> RelaysByStage:
    """All relays of a stage serve all data peers."""
    return relays


def one_column(relays: RelaysByStage, column: int) -> RelaysByStage:
    """A data peer's pipeline has one relay of each stage: without it, it waits."""
    return tuple(
        tuple(relay for relay in stage if int(relay.rpartition("-")[2]) == column)
        for stage in relays
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """One of those that are compared.

    Attributes:
        core: of a data peer.
        seen: the relays that a data peer may use, of those that are there.
    """

    name: str
    core: type[DataPeerCore]
    seen: Callable[[RelaysByStage, int], RelaysByStage]

    def serves(self, relay: str, column: int) -> bool:
        """Whether a relay works for the data peer of a column."""
        return self.seen(((relay,),), column) == ((relay,),)


POLICIES: Final = (
    Policy("ours: it sets out again", DataPeerCore, everybody),
    Policy("dropped on the way back (Agora)", Dropping, everybody),
    Policy("waiting for the replacement", DataPeerCore, one_column),
)
