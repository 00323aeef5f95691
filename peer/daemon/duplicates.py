"""One identity runs once: is the peer that greets us alive elsewhere already?

A life of a peer is one incarnation of its identity. Two at once would train and average under one
name, and each would look to the others like the other's lies. So a newcomer's hello is held against
the other lives of its identity:

  1. Does one that is linked with us beat within DUPLICATE_PROBE_S after the hello, it is alive, and
     the newcomer is refused. A silent one gives way at once.
  2. If none is linked with us, but our roster knows another life, our peers are asked (AskAlive),
     and each looks by rule 1. ALIVE_WITNESSES of them have to say yes, or all, where there are
     fewer: what one peer alone says keeps nobody out. No answer in time is a no.
  3. A link of the same life stays where it is as long as it beats: another hello of that life does
     not end it.

A life is judged by what it sends, never by clocks or counters: the newcomer's incarnation may be
the higher or the lower one.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from typing import Protocol as Interface

import trio

from peer.ports import PeerId
from protocol.limits import ALIVE_WITNESSES
from protocol.membership.view import Roster
from protocol.outcomes import RefusalReason
from protocol.wire.messages import AliveReply, AskAlive, Refusal

BEAT_S: Final = 1.0
DUPLICATE_PROBE_S: Final = 2.5 * BEAT_S
ANSWER_S: Final = DUPLICATE_PROBE_S + BEAT_S
"""How long our peers may take to answer."""


LINKED: Final = Refusal(RefusalReason.TOO_MANY, "we are linked already, and our link lives")


class Life(Interface):
    """A link, as far as it shows that somebody lives."""

    @property
    def incarnation(self) -> int: ...
    @property
    def last_heard_s(self) -> float: ...


@dataclass(slots=True, eq=False)
class _Question:
    """A question, who was asked, and the answers so far; each peer answers once."""

    asked: frozenset[PeerId] = frozenset()
    answers: dict[PeerId, bool] = field(default_factory=dict)
    decided: trio.Event = field(default_factory=trio.Event)

    def sent(self, peers: frozenset[PeerId]) -> None:
        self.asked = peers
        self._decide()

    def answered(self, peer_id: PeerId, *, alive: bool) -> None:
        if peer_id in self.asked:
            self.answers.setdefault(peer_id, alive)
            self._decide()

    @property
    def alive(self) -> bool:
        needed = min(ALIVE_WITNESSES, len(self.asked))
        return needed > 0 and sum(self.answers.values()) >= needed

    def _decide(self) -> None:
        if self.alive or len(self.answers) == len(self.asked):
            self.decided.set()


class Duplicates:
    """Finds the other lives of an identity.

    Args:
        links: the live links by peer; looked at, never changed.
        roster: what is known of everybody.
        ask: sends a question to all linked peers but the one it is about; says to whom.
    """

    def __init__(
        self,
        links: Mapping[PeerId, Sequence[Life]],
        roster: Roster,
        ask: Callable[[AskAlive], frozenset[PeerId]],
    ) -> None:
        self._links = links
        self._roster = roster
        self._ask = ask
        self._questions: dict[AskAlive, _Question] = {}

    async def fault(self, peer_id: PeerId, incarnation: int) -> Refusal | None:
        """Why a newcomer with this identity is declined; None when it may come."""
        if self._other_lives(peer_id, incarnation):
            alive = await self._beats(peer_id, incarnation)
        else:
            alive = self._known_otherwise(peer_id, incarnation) and await self._peers_say(
                AskAlive(peer_id, incarnation)
            )
        if not alive:
            return None if not await self._is_linked(peer_id, incarnation) else LINKED
        sentence = (
            f"{peer_id} is alive elsewhere; one identity can run once. Use another --home here."
        )
        return Refusal(RefusalReason.DUPLICATE_IDENTITY, sentence)

    async def answer(self, question: AskAlive) -> AliveReply:
        """What we see of the other lives that a peer asks about."""
        alive = await self._beats(question.peer_id, question.incarnation)
        return AliveReply(question.peer_id, question.incarnation, alive)

    async def _is_linked(self, peer_id: PeerId, incarnation: int) -> bool:
        """Rule 3: whether a link of this very life beats."""
        return await self._sends(lambda: self._lives(peer_id, {incarnation}))

    def answered(self, witness: PeerId, reply: AliveReply) -> None:
        """A peer has answered; an answer to nothing that it was asked is ignored."""
        question = self._questions.get(AskAlive(reply.peer_id, reply.incarnation))
        if question is not None:
            question.answered(witness, alive=reply.alive)

    def _other_lives(self, peer_id: PeerId, incarnation: int) -> list[Life]:
        return [life for life in self._links.get(peer_id, ()) if life.incarnation != incarnation]

    def _lives(self, peer_id: PeerId, incarnations: Container[int]) -> list[Life]:
        return [life for life in self._links.get(peer_id, ()) if life.incarnation in incarnations]

    async def _beats(self, peer_id: PeerId, incarnation: int) -> bool:
        """Rule 1: whether another life that is linked with us sends anything from now on."""
        return await self._sends(lambda: self._other_lives(peer_id, incarnation))

    async def _sends(self, lives: Callable[[], list[Life]]) -> bool:
        """Whether one of these lives sends anything from now on."""
        asked_s = trio.current_time()
        with trio.move_on_after(DUPLICATE_PROBE_S):
            while present := lives():
                if max(life.last_heard_s for life in present) > asked_s:
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
