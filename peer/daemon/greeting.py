"""Whether a link begins: what we say of ourselves, and what makes us decline.

A hello also carries the sender's clock, which corrects ours when we join
(protocol/membership/clock_offset.py). Clocks are never compared to judge whether somebody is alive.

A life of a peer is one incarnation of its identity. Two at once would train and average under one
name, and each would look to the others like the other's lies. A newcomer's hello is therefore held
against the other lives of its identity:

  1. A life that is linked with us and beats within DUPLICATE_PROBE_S after the hello is alive, and
     the newcomer is refused. A silent one gives way at once.
  2. A link of the same life stays as long as it beats: another hello of that life does not end it.

Each peer looks for itself, for what others say of a life would let them keep an identity out. Up to
MAX_LINKS peers are all linked with each other, so whoever is alive is seen by each.

A life is judged by what it sends, never by clocks or counters: the newcomer's incarnation may be
the higher or the lower one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from peer.runtime import PeerId
from protocol.errors import LocoError
from protocol.limits import MAX_CLOCK_OFFSET_S
from protocol.membership.clock_offset import ClockOffsetEstimator
from protocol.outcomes import RefusalReason
from protocol.run.ways import conversations_of
from protocol.wire.messages import Hello, Refusal, printable_sentence
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


async def duplicate_refusal(
    links: Mapping[PeerId, Sequence[Link]], peer_id: PeerId, incarnation: int
) -> Refusal | None:
    """Why a life that says hello gets no link; of live links by peer, looked at while they last."""
    if await _sends(lambda: [e for e in links.get(peer_id, ()) if e.incarnation != incarnation]):
        sentence = (
            f"{peer_id} is alive elsewhere; one identity can run once. Use another --home here."
        )
        return Refusal(RefusalReason.DUPLICATE_IDENTITY, sentence)
    if await _sends(lambda: [e for e in links.get(peer_id, ()) if e.incarnation == incarnation]):
        return LINKED
    return None


async def _sends(lives: Callable[[], Sequence[Link]]) -> bool:
    """Whether one of these sends anything from now on."""
    asked_s = trio.current_time()
    with trio.move_on_after(DUPLICATE_PROBE_S):
        while there := lives():
            if max(life.last_heard_s for life in there) > asked_s:
                return True
            await trio.sleep(BEAT_S / 10)
    return False
