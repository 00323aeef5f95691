"""The hello of a link: what we say of ourselves, and what in theirs makes us decline.

A hello also carries the sender's clock, which corrects ours when we join
(protocol/membership/clock_offset.py). Clocks are never compared to judge whether somebody is alive.
"""

from typing import Final

from peer.facts import Facts
from peer.ports import Directory, Network, PeerId
from protocol.limits import MAX_LINKS, MAX_LINKS_PER_PREFIX, MAX_PER_PEER
from protocol.membership.book import Shares
from protocol.membership.clock_offset import ClockOffsetEstimator
from protocol.outcomes import RefusalReason
from protocol.wire.messages import Hello, Refusal
from protocol.wire.versions import SPOKEN, missing, version_sentence

from .door import Door

LINK_PLACES: Final = Shares(2 * MAX_LINKS, MAX_PER_PEER, MAX_LINKS_PER_PREFIX)
"""Links that others have opened to us."""
NO_ROOM: Final = Refusal(
    RefusalReason.TOO_MANY, "I hold as many links as I can, or as I have for you; ask another peer"
)


class Greeter:
    """Writes our hellos and reads theirs.

    Args:
        software: our name and version, for people.
        door: decides who may come in at all.
    """

    def __init__(
        self, *, network: Network, directory: Directory, facts: Facts, software: str, door: Door
    ) -> None:
        self._network = network
        self._directory = directory
        self._facts = facts
        self._software = software
        self._door = door
        self._clock = ClockOffsetEstimator()
        self._clock_offset_s = 0.0

    def hello(self) -> Hello:
        """What we say of ourselves."""
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
            pass_shown=self._door.own_pass,
        )

    def fault(self, peer_id: PeerId, theirs: Hello) -> Refusal | None:
        """Why we decline a link with somebody who says this; None when we do not.

        A stranger is told no more than that it is one: not even which run this is.
        """
        facts = self._facts
        if missing(SPOKEN, theirs.protocols):
            sentence = version_sentence(SPOKEN, theirs.protocols, self._software, theirs.software)
            return Refusal(RefusalReason.VERSION, sentence)
        stranger = self._door.greeted(peer_id, theirs)
        if stranger is not None:
            return stranger
        if facts.run_id and theirs.run_id and facts.run_id != theirs.run_id:
            sentence = (
                f"this swarm trains run {facts.run_id}; you are in run {theirs.run_id}."
                " Join with a home of its own for each run."
            )
            return Refusal(RefusalReason.OTHER_RUN, sentence)
        return None

    def compare_clocks(self, peer_id: PeerId, theirs: Hello, round_trip_s: float) -> None:
        """Note what the time was for them, at the end of such a round trip."""
        uncorrected_s = self._directory.swarm_time_s() - self._clock_offset_s
        self._clock.add(peer_id, theirs.swarm_time_s, round_trip_s, uncorrected_s)

    def correct_clock(self) -> None:
        """Follow the clocks of the peers that we have dialled, as a newcomer does.

        Our own clock has no say: the swarm was there first, and does not follow us in turn.
        """
        estimate = self._clock.estimate()
        if estimate is not None:
            self._clock_offset_s = estimate.offset_s
            self._directory.correct_clock(estimate.offset_s)
