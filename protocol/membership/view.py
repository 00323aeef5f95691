"""The peers of a run, and those of a group in it, as one peer sees them.

There is no list of members anywhere. Each peer keeps a roster of its own of all peers of the run,
fed by directory records (somebody says it exists) and by whatever arrives from peers themselves (it
lives). A view is what the roster shows of one group: those who say that they hold its part of the
model. Rosters and views differ between peers, and everything built on them allows for that.

Rules:
- Liveness is judged on our own monotonic clock: any byte from a peer is a sign of life. A record
  is no such sign: it may be old, so it introduces a peer that is not yet known to be alive.
- An incarnation is one life of an identity. A newer one replaces the older at once, with everything
  known about it; an older one is ignored, so that nothing that was delayed brings a dead life back.
- `gone` ends one incarnation. That incarnation may return by a sign of life, since a link can
  break while the peer lives; neither leaving nor silence bars a peer.
- Silence for longer than the bound takes a peer out of the living; one late beat does not.
- A peer may be alive and stuck: it beats, and what it tells of its work stays the same. It is a
  member still, and nobody uses its position (`goes_on`).
- A peer is in the group that it last told with its progress, and in none before. Only it can say
  so: a record or hearsay puts nobody into a view.
- An address that cannot be read is dropped here, so that nobody who dials, relays or asks by an
  address of a member meets one.
- MAX_MEMBERS bound the roster. When it is full, a newcomer takes the place of the peer that is
  not alive and was heard longest ago; when all are alive, it is not taken in. (To look for that
  peer takes long, so 1 in ROOM_SHARE of all places is made free at once.)

Whose claims count. Anybody can say hello under any number of identities and claim any step, and
claims decide how many steps a peer owes to a round, where it jumps, and whether it gives up its
weights. So a median of claims counts *trusted* peers only: those that are *established*, that is,
have sent BEATS beats at least, over TRUSTED_AFTER_S at least. Where none of the peers asked about
is established, all count: at the start of a run nobody has been heard for long. A liar that beats
for as long is trusted too; then its identity is there to be seen, it has one place in the median,
and it holds a link for it. All peers of one network (book.py, rule 8) count as one, with the
medians of what they tell, because addresses in many networks cost more than identities. Peers of
our own network are beside us, and count one each.

Invariant: `alive` is a subset of the members, sorted by peer id, so that equal views give equal
answers.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Final

from protocol.address.multiaddr import is_relayed, readable
from protocol.limits import MAX_ADDRESSES_PER_PEER, MAX_MEMBERS

from .records import PeerRecord

TRAINING: Final = "training"
NEVER: Final = -math.inf
ROOM_SHARE: Final = 64
STUCK_S: Final = 10.0
STUCK_STEPS: Final = 8
"""Steps of its own that a peer may be silent about, where they are long."""
BEATS: Final = 4
TRUSTED_AFTER_S: Final = 5.0
"""Less than a peer that is back listens before it leads (returning.py)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A peer's work, as its newest beat tells (`Beat` in wire/messages.py)."""

    state: str = "unknown"
    round: int = 0
    fraction: float = 0.0
    steps_per_s: float = 0.0
    epoch: int = 0
    position: int = 0
    step: int = 0
    free: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """(round, nominal step) by fragment."""
    ended: bool = False
    group: str | None = None
    validation_loss: float | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    """An expert's loss on each domain, by its number."""


@dataclass(frozen=True, slots=True)
class Member:
    """One peer of the run.

    Attributes:
        last_heard_s: our monotonic clock at the last sign of life; NEVER before the first.
        told_s, changed_s: our clock when it last told of its progress, and when that last changed.
        beats: number of beats of this life; the first one came at `first_beat_s`.
        network: that its link comes from or leads to (book.py); None where it is beside us.
        alive: heard within the silence bound, and not gone.
    """

    peer_id: str
    incarnation: int
    addresses: tuple[str, ...] = ()
    last_heard_s: float = NEVER
    alive: bool = False
    progress: Progress = Progress()
    told_s: float = NEVER
    changed_s: float = NEVER
    beats: int = 0
    first_beat_s: float = math.inf
    rtt_s: float | None = None
    network: str | None = None

    @property
    def relayed(self) -> bool:
        """Whether others reach it through relays, as it says; then it is chosen last."""
        return any(map(is_relayed, self.addresses))

    def goes_on(self, now_s: float) -> bool:
        """Whether its progress has changed recently, for a peer of the speed that it tells."""
        speed = self.progress.steps_per_s
        step_s = 1 / speed if speed > 0 else 0.0
        return now_s - self.changed_s <= max(STUCK_S, STUCK_STEPS * step_s)


class Roster:
    """All peers of the run that one peer knows, except itself; dead ones included."""

    def __init__(self, silence_s: float, max_members: int = MAX_MEMBERS) -> None:
        self.silence_s = silence_s
        self._max_members = max_members
        self._members: dict[str, Member] = {}

    def heard(
        self,
        now_s: float,
        peer_id: str,
        incarnation: int,
        *,
        addresses: tuple[str, ...] | None = None,
        progress: Progress | None = None,
        rtt_s: float | None = None,
        network: str | None = None,
    ) -> bool:
        """Note a sign of life from the peer itself; what is None stays as it was.

        Returns:
            Whether it was taken in: not an older incarnation, nor a newcomer in a full roster.
        """
        known = self._current(peer_id, incarnation)
        if known is None:
            return False
        moved = progress not in (None, known.progress)
        self._members[peer_id] = replace(
            known,
            addresses=known.addresses if addresses is None else _taken(addresses),
            last_heard_s=max(now_s, known.last_heard_s),
            alive=True,
            progress=known.progress if progress is None else progress,
            told_s=known.told_s if progress is None else now_s,
            changed_s=now_s if moved else known.changed_s,
            rtt_s=known.rtt_s if rtt_s is None else rtt_s,
            network=known.network if network is None else network,
        )
        return True

    def heartbeat(
        self,
        now_s: float,
        peer_id: str,
        incarnation: int,
        progress: Progress,
        rtt_s: float | None = None,
    ) -> None:
        """Note a beat, which counts for more than a greeting (`trusted`)."""
        if self.heard(now_s, peer_id, incarnation, progress=progress, rtt_s=rtt_s):
            known = self._members[peer_id]
            first_s = min(known.first_beat_s, now_s)
            self._members[peer_id] = replace(known, beats=known.beats + 1, first_beat_s=first_s)

    def record(self, record: PeerRecord) -> bool:
        """Note a directory record: a life that once was, and where. Whether it was news."""
        before = self._members.get(record.peer_id)
        known = self._current(record.peer_id, record.incarnation)
        if known is None:
            return False
        heard_itself = known.last_heard_s > NEVER and bool(known.addresses)
        if before is known and (heard_itself or known.addresses == record.addresses):
            return False  # what the peer itself says of its addresses is newer than any record
        self._members[record.peer_id] = replace(known, addresses=record.addresses)
        return True

    def introduced(self, peer_id: str, addresses: tuple[str, ...]) -> bool:
        """Note hearsay, which brings no new life of a known peer. Whether it was news."""
        known = self._members.get(peer_id)
        incarnation = 0 if known is None else known.incarnation
        return self.record(PeerRecord(peer_id, incarnation, _taken(addresses), math.inf))

    def gone(self, peer_id: str, incarnation: int) -> bool:
        """Note that the link to this life is lost, or that it leaves. Whether that is new."""
        known = self._members.get(peer_id)
        if known is None or incarnation < known.incarnation or not known.alive:
            return False
        self._members[peer_id] = replace(known, alive=False)
        return True

    def forget(self, peer_id: str) -> None:
        self._members.pop(peer_id, None)

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Take peers that are silent for longer than the bound out of the living; their ids."""
        members = self.members()
        silent = tuple(m.peer_id for m in members if m.alive and self._is_silent(m, now_s))
        for peer_id in silent:
            self._members[peer_id] = replace(self._members[peer_id], alive=False)
        return silent

    def alive(self, now_s: float) -> tuple[Member, ...]:
        """Everybody alive now, by peer id; exact between two calls of `expire` too."""
        return tuple(member for member in self.members() if self._lives(member, now_s))

    def living(self, peer_id: str, now_s: float) -> Member | None:
        """One peer, if it is alive now."""
        member = self._members.get(peer_id)
        return member if member is not None and self._lives(member, now_s) else None

    def members_training(self, now_s: float) -> tuple[Member, ...]:
        """Peers that are alive and train, by peer id."""
        return tuple(member for member in self.alive(now_s) if member.progress.state == TRAINING)

    def members(self) -> tuple[Member, ...]:
        """Everybody known, alive or not, by peer id."""
        return tuple(member for _, member in sorted(self._members.items()))

    @property
    def has_room(self) -> bool:
        """Whether one more peer is taken in without driving anybody out."""
        return len(self._members) < self._max_members

    def get(self, peer_id: str) -> Member | None:
        return self._members.get(peer_id)

    def _lives(self, member: Member, now_s: float) -> bool:
        return member.alive and not self._is_silent(member, now_s)

    def _is_silent(self, member: Member, now_s: float) -> bool:
        return now_s - member.last_heard_s > self.silence_s

    def _current(self, peer_id: str, incarnation: int) -> Member | None:
        """The member to update, a fresh one for a new life; None for what is not taken in."""
        known = self._members.get(peer_id)
        if known is not None and incarnation <= known.incarnation:
            return known if incarnation == known.incarnation else None
        if known is None and not self._make_room():
            return None
        return Member(peer_id, incarnation)

    def _make_room(self) -> bool:
        if self.has_room:
            return True
        dead = [member for member in self._members.values() if not member.alive]
        dead.sort(key=lambda member: (member.last_heard_s, member.peer_id))
        for oldest in dead[: max(1, self._max_members // ROOM_SHARE)]:
            del self._members[oldest.peer_id]
        return bool(dead)


def direct_if_any(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """The members that others reach without relays, to be given work; all, if there are none."""
    return tuple(member for member in members if not member.relayed) or members


def established(members: Iterable[Member], now_s: float) -> tuple[Member, ...]:
    """The members that have sent beats for long enough; all, where none has."""
    everybody = tuple(members)
    old = (m for m in everybody if now_s - m.first_beat_s >= TRUSTED_AFTER_S)
    return tuple(member for member in old if member.beats >= BEATS) or everybody


def trusted(members: Iterable[Member], now_s: float) -> tuple[Member, ...]:
    """The established members, one per network, whose claims are used."""
    networks: dict[str, list[Member]] = {}
    for member in established(members, now_s):
        networks.setdefault(member.network or member.peer_id, []).append(member)
    return tuple(each[0] if len(each) == 1 else _voice(each) for each in networks.values())


def known_positions(members: Iterable[Member], now_s: float) -> list[tuple[int, int]]:
    """Where in the data they are told to be; a peer that has said no more than hello tells none."""
    told = [(m.progress.epoch, m.progress.position) for m in trusted(members, now_s)]
    return [position for position in told if position != (0, 0)]


def _voice(members: list[Member]) -> Member:
    """One member in place of several of one network.

    It is the one that progressed last, with the median of each number.
    """
    told = [member.progress for member in members]
    newest = max(members, key=lambda member: member.changed_s)
    epoch, position = median_low((each.epoch, each.position) for each in told)
    losses = [each.validation_loss for each in told if each.validation_loss is not None]
    middle = replace(
        newest.progress,
        round=median_low(each.round for each in told),
        step=median_low(each.step for each in told),
        steps_per_s=median_low(each.steps_per_s for each in told),
        epoch=epoch,
        position=position,
        validation_loss=median_low(losses) if losses else None,
    )
    return replace(newest, progress=middle)


class View:
    """The members of one group, named by its digest, in the run's roster."""

    def __init__(self, roster: Roster, group: str) -> None:
        self._roster = roster
        self.group = group

    def alive(self, now_s: float) -> tuple[Member, ...]:
        return self._ours(self._roster.alive(now_s))

    def members(self) -> tuple[Member, ...]:
        return self._ours(self._roster.members())

    def members_training(self, now_s: float) -> tuple[Member, ...]:
        return self._ours(self._roster.members_training(now_s))

    def is_linked(self, peer_id: str, now_s: float) -> bool:
        """Whether a peer lives, and is of the group as far as it has told."""
        member = self._roster.living(peer_id, now_s)
        return member is not None and member.progress.group in (None, self.group)

    def _ours(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        return tuple(member for member in members if member.progress.group == self.group)


def _taken(addresses: tuple[str, ...]) -> tuple[str, ...]:
    return readable(addresses[:MAX_ADDRESSES_PER_PEER])
