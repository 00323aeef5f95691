"""The pieces of the corpus in the daemon: served to others, fetched where they are trained on."""

import math
from typing import Final

import trio

from peer.corpus.fetcher import PieceFetcher
from peer.corpus.service import PieceService
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.ports import Network, Work
from peer.rounds.feed import AllHere, DataFeed
from protocol.membership.view import Roster
from protocol.run.layout import DATA_STAGE, stage_of_part
from protocol.run.run_spec import RunSpec
from protocol.schedule.data_plan import DataPlan

from .provision import Supplies

ROUNDS_FIRST: Final = 2
"""Rounds of ours whose blocks are fetched in the order in which they are trained."""
MAX_FIRST_BLOCKS: Final = 1024
"""Beyond so many blocks all pieces of a stratum have begun, and their order means nothing."""


class CorpusPieces:
    """Serves the pieces of one corpus, and brings those that are needed.

    Args:
        max_bytes: of the disk that pieces may take; None for no limit.
    """

    def __init__(
        self,
        supplies: Supplies,
        spec: RunSpec,
        max_bytes: float | None,
        network: Network,
        work: Work,
        roster: Roster,
        facts: Facts,
        events: EventLog,
    ) -> None:
        self.plan = DataPlan(spec.seed, supplies.num_blocks, supplies.piece_blocks)
        self._service: PieceService | None = None
        self._fetcher: PieceFetcher | None = None
        if (store := supplies.store) is None:
            return
        self._service = PieceService(store.manifest.name, store, network, work)
        if stage_of_part(supplies.part) in (None, DATA_STAGE):  # no other stage reads tokens
            batch_size = spec.training.batch_size
            most = math.inf if max_bytes is None else max_bytes // store.manifest.piece_bytes(0)
            self._fetcher = PieceFetcher(
                store,
                self.plan,
                network=network,
                work=work,
                roster=roster,
                facts=facts,
                events=events,
                first_blocks=min(
                    MAX_FIRST_BLOCKS, ROUNDS_FIRST * spec.sync.round_steps * batch_size
                ),
                max_pieces=max(1, most),
            )

    @property
    def feed(self) -> DataFeed:
        """What the outer loop asks for pieces."""
        return self._fetcher or AllHere()

    async def serve(self) -> None:
        """Serve pieces to others from now on."""
        if self._service is not None:
            await self._service.start()

    async def run(self) -> None:
        """Fetch pieces until cancelled."""
        if self._fetcher is not None:
            await self._fetcher.run()
        await trio.sleep_forever()
