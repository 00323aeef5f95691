"""What the core wants said to other peers, as messages; what comes of it goes back to the core."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final

import trio

from peer.ports import PeerId
from protocol.microbatch.core import (
    Announce,
    Command,
    HaltRelays,
    ResumeRelay,
    StageCore,
    TellLost,
    TellPassed,
)
from protocol.microbatch.data_peer import DataPeerCore
from protocol.wire.stage_messages import Announcement, Halted, Lost, Noted, Passed

from .company import StageCompany
from .notices import halt_message, resume_message
from .transfers import Transfers

TELL_TRIES: Final = 3
PAUSE_S: Final = 0.5
"""Between two of them."""


class Messenger:
    """See the top of the file.

    Args:
        do: does what the core then wants.
    """

    def __init__(
        self,
        core: StageCore,
        company: StageCompany,
        transfers: Transfers,
        do: Callable[[Sequence[Command]], None],
    ) -> None:
        self._core = core
        self._company = company
        self._transfers = transfers
        self._do = do
        self._announcing = set[tuple[PeerId, int]]()

    def jobs(self, command: Command) -> Iterator[Callable[[], Awaitable[None]]]:
        """What is to be run for a command; nothing where nothing is to be said."""
        match command:
            case Announce(iteration, relays):
                for relay in relays:
                    yield partial(self._announce, relay, iteration)
            case TellLost(microbatch, to):
                for peer_id in to or (microbatch.origin,):
                    yield partial(self._tell_lost, peer_id, command)
            case TellPassed():
                yield partial(self._tell_passed, command)
            case HaltRelays(_, _, relays):
                for relay in relays:
                    yield partial(self._halt, relay, command)
            case ResumeRelay():
                yield partial(self._resume, command)

    async def _announce(self, relay: PeerId, iteration: int) -> None:
        """A relay that misses it waits for us, and others for the relay: say it until it is noted.

        It need not be said any more when a later one is. A link that breaks may be back before
        anybody looks around, so a relay that seems to be gone is tried again, too.
        """
        core = self._core
        assert isinstance(core, DataPeerCore), "data peers announce"
        if (relay, iteration) in self._announcing:
            return  # it went, and is back; we have tried all the while
        self._announcing.add((relay, iteration))
        noted = None
        while noted is None and core.announced == iteration:
            group = self._company.group_of(relay)
            if group is not None:
                noted = await self._transfers.ask(relay, Announcement(group, iteration), Noted)
            if noted is None:
                await trio.sleep(PAUSE_S)
        self._announcing.remove((relay, iteration))
        if noted is not None:
            self._do(core.heard(relay, noted.iteration))

    async def _tell_lost(self, peer_id: PeerId, command: TellLost) -> None:
        """A data peer must hear of it, for it waits."""
        for _ in range(TELL_TRIES):
            group = self._company.group_of(peer_id)
            if group is None:
                return
            microbatch = command.microbatch
            lost = Lost(
                group,
                microbatch.iteration,
                microbatch.index,
                command.attempt,
                command.failed,
                command.refused,
            )
            if await self._transfers.ask(peer_id, lost, Noted) or command.to:
                return
            await trio.sleep(PAUSE_S)

    async def _tell_passed(self, command: TellPassed) -> None:
        group, microbatch = self._company.group_of(command.to), command.microbatch
        if group is not None:
            named = microbatch.origin, microbatch.iteration, microbatch.index
            await self._transfers.ask(command.to, Passed(group, *named, command.attempt), Noted)

    async def _halt(self, relay: PeerId, command: HaltRelays) -> None:
        core, group = self._core, self._company.group_of(relay)
        assert isinstance(core, DataPeerCore), "data peers mend"
        halted = None
        if group is not None:
            halted = await self._transfers.ask(relay, halt_message(command, group), Halted)
        standing = None if halted is None else halted.standing
        self._do(core.found(command.microbatch, command.attempt, relay, standing))

    async def _resume(self, command: ResumeRelay) -> None:
        core, trip = self._core, command.trip
        assert isinstance(core, DataPeerCore), "data peers mend"
        group = self._company.group_of(trip.receiver)
        if group is not None:
            message = resume_message(command, group)
            if await self._transfers.ask(trip.receiver, message, Noted) is not None:
                return
        self._do(core.lost(TellLost(trip.microbatch, (), trip.attempt), trip.receiver))
