"""One identity runs once: is the peer that greets us alive elsewhere already?

A life of a peer is one incarnation of its identity. Two at once would train and average under one
name, and each would look to the others like the other's lies. So a newcomer's hello is held against
the other lives of its identity:

  1. Does one that is linked with us beat within DUPLICATE_PROBE_S after the hello, it is alive, and
     the newcomer is refused. A silent one gives way at once.
  2. If none is linked with us, but our roster knows another life, our peers are asked (AskAlive),
     and each looks by rule 1. One yes refuses the newcomer. No answer in time is a no.

A life is judged by what it sends, never by clocks or counters: the newcomer's incarnation may be
the higher or the lower one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from typing import Protocol as Interface

import trio

from peer.ports import PeerId
from protocol.membership.view import Roster
from protocol.outcomes import RefusalReason
from protocol.wire.messages import AliveReply, AskAlive, Refusal

BEAT_S: Final = 1.0
DUPLICATE_PROBE_S: Final = 2.5 * BEAT_S
ANSWER_S: Final = DUPLICATE_PROBE_S + BEAT_S
"""How long our peers may take to answer."""


class Life(Interface):
    """A link, as far as it shows that somebody lives."""

    @property
    def incarnation(self) -> int: ...
    @property
    def last_heard_s(self) -> float: ...


@dataclass(slots=True, eq=False)
class _Question:
    """A question, and the answers so far; `waiting` peers have not answered yet."""

    waiting: int = 0
    alive: bool = False
    decided: trio.Event = field(default_factory=trio.Event)

    def sent(self, num_peers: int) -> None:
        self.waiting += num_peers
        self._decide()

    def answered(self, *, alive: bool) -> None:
        self.waiting -= 1
        self.alive |= alive
        self._decide()

    def _decide(self) -> None:
        if self.alive or self.waiting <= 0:
            self.decided.set()


class Duplicates:
    """Finds the other lives of an identity.

    Args:
        links: the live links by peer; looked at, never changed.
        roster: what is known of everybody.
        ask: sends a question to all linked peers but the one it is about; says to how many.
    """

    def __init__(
        self,
        links: Mapping[PeerId, Sequence[Life]],
        roster: Roster,
        ask: Callable[[AskAlive], int],
    ) -> None:
        self._links = links
        self._roster = roster
        self._ask = ask
        self._questions: dict[AskAlive, _Question] = {}

    def __repr__(self) -> str:
        return f"<Duplicates, {len(self._questions)} questions open>"

    async def fault(self, peer_id: PeerId, incarnation: int) -> Refusal | None:
        """Why a newcomer with this identity is declined; None when it may come."""
        if self._other_lives(peer_id, incarnation):
            alive = await self._beats(peer_id, incarnation)
        else:
            alive = self._known_otherwise(peer_id, incarnation) and await self._peers_say(
                AskAlive(peer_id, incarnation)
            )
        if not alive:
            return None
        sentence = (
            f"{peer_id} is alive elsewhere; one identity can run once. Use another --home here."
        )
        return Refusal(RefusalReason.DUPLICATE_IDENTITY, sentence)

    async def answer(self, question: AskAlive) -> AliveReply:
        """What we see of the other lives that a peer asks about."""
        alive = await self._beats(question.peer_id, question.incarnation)
        return AliveReply(question.peer_id, question.incarnation, alive)

    def answered(self, reply: AliveReply) -> None:
        """A peer has answered; an answer to nothing we asked is ignored."""
        question = self._questions.get(AskAlive(reply.peer_id, reply.incarnation))
        if question is not None:
            question.answered(alive=reply.alive)

    def _other_lives(self, peer_id: PeerId, incarnation: int) -> list[Life]:
        return [life for life in self._links.get(peer_id, ()) if life.incarnation != incarnation]

    async def _beats(self, peer_id: PeerId, incarnation: int) -> bool:
        """Rule 1: whether another life that is linked with us sends anything from now on."""
        asked_s = trio.current_time()
        with trio.move_on_after(DUPLICATE_PROBE_S):
            while lives := self._other_lives(peer_id, incarnation):
                if max(life.last_heard_s for life in lives) > asked_s:
                    return True
                await trio.sleep(BEAT_S / 10)
        return False

    def _known_otherwise(self, peer_id: PeerId, incarnation: int) -> bool:
        """Whether we have heard of another life from itself, or by a record that it signed."""
        known = self._roster.get(peer_id)
        return known is not None and known.incarnation not in (0, incarnation)

    async def _peers_say(self, question: AskAlive) -> bool:
        """Rule 2. Another who asks the same meanwhile waits for the same answers."""
        asked = self._questions.get(question)
        if asked is None:
            asked = self._questions[question] = _Question()
            asked.sent(self._ask(question))
        try:
            with trio.move_on_after(ANSWER_S):
                await asked.decided.wait()
        finally:
            self._questions.pop(question, None)
        return asked.alive
