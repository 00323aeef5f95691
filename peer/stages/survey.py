"""Paths over measured links: what we have measured is told, and data peers agree on what to plan.

    beats, boundaries, trainer -> Measures -> our signed vector  <- asked for by the proposer
    vectors of all -> Proposals -> snapshot                      <- asked for by other data peers
    snapshot -> plan, in a thread -> PlannedRouter -> paths of the iterations that set out from now

Every LOOK_S each data peer looks who proposes (protocol/routing/snapshots.py). The proposer gathers
the vectors of all, another asks for its snapshot. Nothing is sent unasked; until a peer answers,
what was known of it stands.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio

from peer.network.conversation import Conversation
from peer.rounds.services import Services
from peer.runtime import PeerId
from peer.training.shared import SLOTS
from protocol.errors import LocoError
from protocol.limits import ANSWER_S, MAX_LINK_VECTOR_BYTES, MAX_SNAPSHOT_BYTES
from protocol.membership.view import TRAINING
from protocol.names import short_id
from protocol.routing.measures import Measures, decode_vector, encode_vector
from protocol.routing.routers import PlannedPaths, PlannedRouter, terms_of
from protocol.routing.snapshots import LinkSnapshot, Proposals, Terms
from protocol.run.run_spec import RunSpec
from protocol.wire.stage_messages import GetLinks, GetSnapshot, LinksReply, SnapshotReply
from protocol.wire.versions import STAGE

from .peers import StagePeers

LOOK_S: Final = 2.0
Planner = Callable[[LinkSnapshot, Terms, int], PlannedPaths | None]
"""Plans for a snapshot and a number of visited stages, in a thread; None where there is no plan."""


class Survey:
    """Signs our link vector, agrees with data peers on a snapshot, and has it planned.

    Args:
        router: takes the plans; None at relays, and where paths are drawn.

    Attributes:
        slots: microbatches that our trainer has room for.
    """

    def __init__(
        self,
        spec: RunSpec,
        stage: int,
        peers: StagePeers,
        services: Services,
        router: PlannedRouter | None,
        plan: Planner,
    ) -> None:
        assert services.facts.run_id is not None, "a stage belongs to a run"
        self._run_id = services.facts.run_id
        self._services, self._facts = services, services.facts.pipeline
        self._stage, self._peers = stage, peers
        self._terms = terms_of(spec)
        self._router, self._plan = router, plan
        self._full = spec.pipeline.full_every > 0
        self._proposals = Proposals(self._run_id)
        self._signed = b""
        self._snapshot: LinkSnapshot | None = None
        self.measures = Measures()
        self.slots = SLOTS

    async def answer(self, talk: Conversation, question: GetLinks | GetSnapshot) -> None:
        if isinstance(question, GetLinks):
            await talk.send(LinksReply(), self._signed, stall_s=ANSWER_S)
            return
        snapshot = self._snapshot
        if snapshot is None or snapshot.digest == question.known:
            await talk.send(SnapshotReply(question.known if snapshot else None), stall_s=ANSWER_S)
        else:
            await talk.send(SnapshotReply(snapshot.digest), snapshot.data, stall_s=ANSWER_S)

    async def run(self) -> None:
        while True:
            await trio.sleep(LOOK_S)
            self._look()
            if self._router is not None:
                await self._agree(self._router)

    def _look(self) -> None:
        others = self._peers.others()
        self.measures.keep(member.peer_id for member in others)
        for member in others:
            if member.rtt_s is not None:
                self.measures.round_trip(member.peer_id, member.rtt_s)
        self._facts.links, self._facts.work = self.measures.links(), self.measures.work()
        ours, incarnation = self._services.network.peer_id, self._services.facts.incarnation
        vector = self.measures.vector(ours, incarnation, self._stage, self.slots)
        if vector is not None:
            self._signed = encode_vector(vector, self._run_id, self._services.sign)
            self._proposals.take(vector, self._signed)

    async def _agree(self, router: PlannedRouter) -> None:
        ours = self._services.network.peer_id
        training = [m.peer_id for m in self._peers.data_peers() if m.progress.state == TRAINING]
        proposer = min([ours, *training])
        snapshot = await (self._proposed() if proposer == ours else self._fetched(proposer))
        if snapshot is not None:
            self._snapshot = snapshot
            self._adopt(router, await self._services.work.run(self._planned, snapshot))

    def _planned(self, snapshot: LinkSnapshot) -> tuple[PlannedPaths | None, PlannedPaths | None]:
        """The plan, and that of iterations that skip nothing; runs in a thread."""
        terms = self._terms
        full = self._plan(snapshot, terms, terms.stages) if self._full else None
        return self._plan(snapshot, terms, terms.visited), full

    def _adopt(
        self, router: PlannedRouter, plans: tuple[PlannedPaths | None, PlannedPaths | None]
    ) -> None:
        router.plan, router.full = plans
        plan, facts = router.plan, self._facts
        facts.snapshot = None if plan is None else plan.snapshot
        facts.plan = None if plan is None else plan.digest
        facts.planned_s = None if plan is None else plan.iteration_s
        own = () if plan is None else plan.paths.get(self._services.network.peer_id, ())
        facts.paths = tuple(
            " ".join(f"{s}:{short_id(p)}" for s, p in zip(path.stages, path.relays, strict=True))
            for path in own
        )

    async def _proposed(self) -> LinkSnapshot | None:
        async with trio.open_nursery() as nursery:
            for member in self._peers.others():
                nursery.start_soon(self._ask_links, member.peer_id)
        self._proposals.keep({**self._peers.stages(), self._services.network.peer_id: self._stage})
        return self._proposals.due(self._snapshot, trio.current_time())

    async def _ask_links(self, peer_id: PeerId) -> None:
        signed = await self._ask(peer_id, GetLinks(), LinksReply, MAX_LINK_VECTOR_BYTES)
        if not signed:
            return
        with suppress(LocoError):  # what is no vector: its links are those that others measure
            vector = decode_vector(signed, self._run_id)
            if vector.peer_id == peer_id:
                self._proposals.take(vector, signed)

    async def _fetched(self, proposer: PeerId) -> LinkSnapshot | None:
        known = None if self._snapshot is None else self._snapshot.digest
        data = await self._ask(proposer, GetSnapshot(known), SnapshotReply, MAX_SNAPSHOT_BYTES)
        if not data:
            return None
        try:
            return await self._services.work.run(LinkSnapshot.read, data, self._run_id)
        except LocoError:
            return None  # we go on with what we have

    async def _ask(
        self,
        peer_id: PeerId,
        question: GetLinks | GetSnapshot,
        reply: type[LinksReply | SnapshotReply],
        max_bytes: int,
    ) -> bytes:
        """The payload of an answer; empty where none came."""
        try:
            with trio.move_on_after(ANSWER_S):
                stream = await self._services.network.open_stream(peer_id, STAGE)
                async with Conversation(stream) as talk:
                    await talk.send(question, stall_s=ANSWER_S)
                    _, payload = await talk.receive(reply, max_payload_bytes=max_bytes)
                    return payload
        except LocoError:
            pass
        return b""
