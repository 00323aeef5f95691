"""Whether a link begins: what we say of ourselves, and what makes us decline.

A hello also carries the sender's clock, which corrects ours when we join
(protocol/membership/clock_offset.py). Clocks are never compared to judge whether somebody is alive.

A life of a peer is one incarnation of its identity. Two at once would train and average under one
name, and each would look to the others like the other's lies. A newcomer's hello is therefore held
against the other lives of its identity:

  1. A life that is linked with us and beats within DUPLICATE_PROBE_S after the hello is alive, and
     the newcomer is refused. A silent one gives way at once.
  2. If none is linked with us, but our roster knows another life, our peers are asked (AskAlive),
     and each looks by rule 1. ALIVE_WITNESSES of them have to say yes, or all, where there are
     fewer: what one peer alone says keeps nobody out. No answer in time is a no.
  3. A link of the same life stays as long as it beats: another hello of that life does not end it.

A life is judged by what it sends, never by clocks or counters: the newcomer's incarnation may be
the higher or the lower one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from peer.runtime import PeerId
from protocol.errors import LocoError
from protocol.limits import ALIVE_WITNESSES, MAX_CLOCK_OFFSET_S
from protocol.membership.clock_offset import ClockOffsetEstimator
from protocol.membership.view import Roster
from protocol.outcomes import RefusalReason
from protocol.run.ways import conversations_of
from protocol.wire.messages import AliveReply, AskAlive, Hello, Refusal, printable_sentence
from protocol.wire.versions import REQUIRED, SPOKEN, missing, version_sentence

from .admission import Admission
from .link import Link
from .services import DaemonServices

NO_ROOM: Final = Refusal(
    RefusalReason.TOO_MANY, "I hold as many links as I can, or as I have for you; ask another peer"
)


class Greeter:
    def __init__(self, services: DaemonServices, admission: Admission) -> None:
        self._network = services.network
        self._directory = services.directory
        self._facts = services.facts
        self._software = f"loco-peer {services.version}"
        self._admission = admission
        self._clock = ClockOffsetEstimator()
        self._clock_offset_s = 0.0
        self._follows = False

    def hello(self) -> Hello:
        facts = self._facts
        return Hello(
            software=self._software,
            protocols=SPOKEN,
            run_id=facts.run_id,
            incarnation=facts.incarnation,
            addresses=tuple(self._network.addresses),
            swarm_time_s=self._directory.swarm_time_s(),
            state=str(facts.state),
            round=facts.round,
            layout_digest=facts.layout_digest,
            step=facts.step,
            group=facts.group,
            pass_shown=self._admission.own_pass,
        )

    def refusal_of(self, peer_id: PeerId, theirs: Hello) -> Refusal | None:
        """Why we decline a link with a peer that says this.

        A stranger is told no more than that it is one: not even which run this is.
        """
        facts = self._facts
        if missing(SPOKEN, theirs.protocols, self._required):
            return Refusal(RefusalReason.VERSION, self._version_sentence(theirs, self.hello()))
        stranger = self._admission.greeted(peer_id, theirs)
        if stranger is not None:
            return stranger
        if facts.run_id and theirs.run_id and facts.run_id != theirs.run_id:
            sentence = (
                f"this swarm trains run {facts.run_id}; you are in run {theirs.run_id}."
                " Join with a home of its own for each run."
            )
            return Refusal(RefusalReason.OTHER_RUN, sentence)
        return None

    def told_here(self, refusal: Refusal, theirs: Hello) -> str:
        """Why we declined them, for our own user: the other way round, where versions differ."""
        if refusal.reason is not RefusalReason.VERSION:
            return refusal.sentence
        return self._version_sentence(self.hello(), theirs)

    def _version_sentence(self, you: Hello, other: Hello) -> str:
        sentence = version_sentence(
            you.protocols, other.protocols, you.software, other.software, self._required
        )
        return printable_sentence(sentence)

    @property
    def _required(self) -> tuple[str, ...]:
        spec = self._facts.spec
        if spec is None:
            return REQUIRED
        run = spec.founding
        return (*REQUIRED, *conversations_of(run.sync.method, run.pipeline.stages))

    def compare_clocks(self, peer_id: PeerId, theirs: Hello, round_trip_s: float) -> None:
        """Note the clock of a peer that we have dialled. Raises LocoError: it is too far off."""
        uncorrected_s = self._directory.swarm_time_s() - self._clock_offset_s
        ahead_s = self._clock.add(peer_id, theirs.swarm_time_s, round_trip_s, uncorrected_s)
        if abs(ahead_s) > MAX_CLOCK_OFFSET_S:
            where = "ahead of" if ahead_s > 0 else "behind"
            if self._clock.estimate() is None:
                self._facts.clock_ahead_s = ahead_s
            raise LocoError(
                f"clock: that of {peer_id} is {abs(ahead_s) / 60:,.0f} minutes {where} this"
                f" machine's, and no more than {MAX_CLOCK_OFFSET_S / 60:.0f} are put right"
            )
        self._facts.clock_ahead_s = self._clock.estimate() or 0.0
        if self._follows:
            self.correct_clock()

    def correct_clock(self) -> None:
        """Follow the clocks of the peers that we have dialled, from now on, as a newcomer does.

        The first that we meet may be wrong: the middle moves with each further one. Our own clock
        has no say: the swarm was there first, and does not follow us in turn.
        """
        self._follows = True
        offset_s = self._clock.estimate()
        if offset_s is not None:
            self._clock_offset_s = offset_s
            self._directory.correct_clock(offset_s)


BEAT_S: Final = 1.0
DUPLICATE_PROBE_S: Final = 2.5 * BEAT_S
LINKED: Final = Refusal(RefusalReason.TOO_MANY, "we are linked already, and our link lives")


@dataclass(slots=True, eq=False)
class _Question:
    asked: frozenset[PeerId]
    answers: dict[PeerId, bool] = field(default_factory=dict)
    decided: trio.Event = field(default_factory=trio.Event)

    @property
    def alive(self) -> bool:
        needed = min(ALIVE_WITNESSES, len(self.asked))
        return needed > 0 and sum(self.answers.values()) >= needed

    def decide(self) -> None:
        if self.alive or len(self.answers) == len(self.asked):
            self.decided.set()


@dataclass(eq=False)
class Duplicates:
    """Finds the other lives of an identity.

    Args:
        links: the live links by peer; looked at, never changed.
        ask: sends a question to all linked peers but the one it is about; says to whom.
    """

    links: Mapping[PeerId, Sequence[Link]]
    roster: Roster
    ask: Callable[[AskAlive], frozenset[PeerId]]
    _questions: dict[AskAlive, _Question] = field(default_factory=dict)

    async def refusal_of(self, peer_id: PeerId, incarnation: int) -> Refusal | None:
        newcomer = AskAlive(peer_id, incarnation)
        if self._lives(newcomer, same=False):
            alive = await self._sends(newcomer, same=False)
        else:
            known = self.roster.get(peer_id)  # from itself, or by a record that it signed
            alive = (
                known is not None
                and known.incarnation not in (0, incarnation)
                and await self._peers_say(newcomer)
            )
        if alive:
            sentence = (
                f"{peer_id} is alive elsewhere; one identity can run once. Use another --home here."
            )
            return Refusal(RefusalReason.DUPLICATE_IDENTITY, sentence)
        return LINKED if await self._sends(newcomer, same=True) else None

    async def answer(self, question: AskAlive) -> AliveReply:
        alive = await self._sends(question, same=False)
        return AliveReply(question.peer_id, question.incarnation, alive)

    def answered(self, witness: PeerId, reply: AliveReply) -> None:
        """Note an answer; one to nothing that the peer was asked is ignored."""
        question = self._questions.get(AskAlive(reply.peer_id, reply.incarnation))
        if question is not None and witness in question.asked:
            question.answers.setdefault(witness, reply.alive)
            question.decide()

    def _lives(self, of: AskAlive, *, same: bool) -> list[Link]:
        """Links of this very life, or those of all others of its identity."""
        links = self.links.get(of.peer_id, ())
        return [link for link in links if (link.incarnation == of.incarnation) == same]

    async def _sends(self, of: AskAlive, *, same: bool) -> bool:
        """Whether one of these lives sends anything from now on (rules 1 and 3)."""
        asked_s = trio.current_time()
        with trio.move_on_after(DUPLICATE_PROBE_S):
            while lives := self._lives(of, same=same):
                if max(life.last_heard_s for life in lives) > asked_s:
                    return True
                await trio.sleep(BEAT_S / 10)
        return False

    async def _peers_say(self, question: AskAlive) -> bool:
        """Rule 2. Another who asks the same meanwhile waits for the same answers."""
        asked = self._questions.get(question)
        if asked is None:
            asked = self._questions[question] = _Question(self.ask(question))
            asked.decide()
        try:
            with trio.move_on_after(DUPLICATE_PROBE_S + BEAT_S):
                await asked.decided.wait()
        finally:
            self._questions.pop(question, None)
        return asked.alive
