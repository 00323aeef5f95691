"""The experts of a run: who trains which, what each has left, and which is ours.

Nobody assigns them: protocol/run/assignment.py has the rules, and here they are asked with what
beats tell. What is not told is guessed. Another peer fits every expert, and is pinned to none; a
newcomer has the speed of the others. Where that is wrong, a move comes later, or one more is made.

FLOPs left of an expert are those of the steps that it has left, and its step is the middle of those
that its peers tell; where all are gone, of what they told last. A newcomer has not heard that, and
takes such an expert for one that nobody has begun: it is the first to be trained in either case.

Before the branch the generalist alone has any left, and all train it, pinned ones too. At the
branch each of its peers finds its place by one placing of all of them. Those that have just gone
over are for EMPTY_S still where that puts them, so who is late finds the same.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import Final

import blake3
import trio

from peer.facts import Facts, PeerState
from peer.observe.event_names import EventName
from peer.observe.status import ExpertStatus
from peer.process.rejoin import JoinAgain
from peer.runtime import PeerId
from protocol.membership.group import Group
from protocol.membership.view import Member, Roster, View, trusted
from protocol.run.assignment import EMPTY_S, Balance, ExpertTrainer, expert_need, placed, turn_of
from protocol.run.layout import expert_of_part, part_of_expert
from protocol.run.needs import flops_per_token
from protocol.schedule.rounds import LARGEST_RATIO, middle

from .greeting import BEAT_S
from .services import DaemonServices

GENERALIST: Final = 0
HOLDERS: Final = (PeerState.TRAINING, PeerState.PAUSED, PeerState.FINISHED)
COMING: Final = (PeerState.STARTING, PeerState.DOWNLOADING, PeerState.RETURNING)


def has_begun(view: View) -> bool:
    """Whether others hold a state of this group; newcomers among them hold none."""
    told = [member.progress for member in view.alive(trio.current_time())]
    return any(
        each.state in HOLDERS or (each.state == PeerState.RETURNING and each.step) for each in told
    )


class ExpertPeers:
    """The peers of a run by expert, as the roster knows them now."""

    def __init__(self, roster: Roster, facts: Facts) -> None:
        run, run_id = facts.expert_run, facts.run_id
        assert run is not None
        assert run_id is not None
        self._facts = facts
        self._roster = roster
        self.names = [expert.name for expert in run.experts]
        self.groups = [Group(run_id, part_of_expert(n)) for n in range(len(self.names))]
        self._number_of = {group.digest: n for n, group in enumerate(self.groups)}
        self._views = [View(roster, group.digest) for group in self.groups]
        self._step_flops = [each.tokens_per_step * flops_per_token(each) for each in run.models]
        self._branch_step = run.branch_step

    @property
    def own(self) -> int | None:
        """The expert that we train."""
        held = self._facts.held
        return None if held is None else expert_of_part(held.group.part)

    def total_steps(self, number: int) -> int:
        """The budget of an expert, as it has been amended."""
        assert self._facts.spec is not None
        model = self._facts.spec.models[number]
        return model.total_rounds * model.sync.round_steps

    def trainers(self, number: int) -> int:
        """How many train it, we among them."""
        training = len(self._views[number].members_training(trio.current_time()))
        return training + (number == self.own and self._facts.state is PeerState.TRAINING)

    def step_of(self, number: int) -> int:
        if number == self.own and self._facts.state in HOLDERS:
            return self._facts.step
        now_s, view = trio.current_time(), self._views[number]
        alive = [m for m in view.alive(now_s) if m.progress.state in HOLDERS]
        told = [m.progress.step for m in trusted(alive or view.members(), now_s)]
        return min(self.total_steps(number), int(middle(told, 0)))

    @property
    def is_branched(self) -> bool:
        """Whether the generalist has come to the branch; we know that best where we train it."""
        if self.step_of(GENERALIST) >= self._branch_step:
            return True
        others = range(GENERALIST + 1, len(self.names))
        known = self.own == GENERALIST or self._views[GENERALIST].members()
        return not known and any(map(self.step_of, others))

    def flops_left(self) -> list[float]:
        ends = [*map(self.total_steps, range(len(self.names)))]
        if not self.is_branched:
            ends = [self._branch_step, *[0] * (len(ends) - 1)]
        return [
            each * max(0, end - self.step_of(number))
            for number, (each, end) in enumerate(zip(self._step_flops, ends, strict=True))
        ]

    def standing(self) -> list[int]:
        """Numbers of the experts that have FLOPs left, and that nobody trains."""
        left = self.flops_left()
        return [n for n, flops in enumerate(left) if flops > 0 and not self.trainers(n)]

    def status(self) -> tuple[ExpertStatus, ...]:
        standing = self.standing()
        return tuple(
            ExpertStatus(
                name, self.trainers(n), self.step_of(n), self.total_steps(n), n in standing
            )
            for n, name in enumerate(self.names)
        )

    # --- who is where -----------------------------------------------------------------------------
    def others(self) -> tuple[Member, ...]:
        """The others that train an expert, or are about to."""
        alive = self._roster.alive(trio.current_time())
        at_work = (PeerState.TRAINING, *COMING)
        return tuple(
            m for m in alive if m.progress.group in self._number_of and m.progress.state in at_work
        )

    def newcomers(self) -> frozenset[PeerId]:
        return frozenset(m.peer_id for m in self.others() if m.progress.state in COMING)

    def trainers_among(
        self, others: Iterable[Member], own: ExpertTrainer
    ) -> Mapping[PeerId, ExpertTrainer]:
        """We and these others, each with its expert and its speed."""
        everything = frozenset(range(len(self.names)))
        known = {m.peer_id: (m, self._number_of[m.progress.group or ""]) for m in others}
        speeds = {
            peer_id: member.progress.steps_per_s * self._step_flops[number]
            for peer_id, (member, number) in known.items()
        }
        usual = _usual(speeds.values(), own.speed)
        trainers = {
            peer_id: ExpertTrainer(_believed(speeds[peer_id], usual), everything, number)
            for peer_id, (_, number) in known.items()
        }
        mine = ExpertTrainer(own.speed or usual, own.fits, own.expert, own.pinned)
        return {**trainers, self._facts.peer_id: mine}

    def own_trainer(self, fits: frozenset[int]) -> ExpertTrainer:
        number = self.own
        assert number is not None
        return ExpertTrainer(self._facts.steps_per_s * self._step_flops[number], fits, number)

    def place(
        self, others: Iterable[Member], fits: frozenset[int], idle: Collection[PeerId] = ()
    ) -> int | None:
        """The expert that we should begin; None where none is left to be trained that fits.

        Args:
            idle: those of the others that begin anew as we do.
        """
        trainers = self.trainers_among(others, ExpertTrainer(0.0, fits))
        idle_trainers = {each: replace(trainers[each], expert=None) for each in idle}
        return placed({**trainers, **idle_trainers}, self.flops_left()).get(self._facts.peer_id)

    def parted(self, fits: frozenset[int]) -> int | None:
        """The expert that we train from the branch on, by placing all that train the generalist."""
        now_s = trio.current_time()
        near = [m for m in self._views[GENERALIST].members() if now_s - m.last_heard_s <= EMPTY_S]
        parting = {m.peer_id for m in near}
        others = [m for m in self.others() if m.peer_id not in parting]
        return self.place((*others, *near), fits, parting)

    def ended(self) -> tuple[Member, ...]:
        """The others that have trained our expert to its end, and serve it."""
        own, now_s = self.own, trio.current_time()
        there = () if own is None else self._views[own].alive(now_s)
        return tuple(m for m in there if m.progress.state == PeerState.FINISHED)


def _usual(speeds: Iterable[float], own: float) -> float:
    known = [speed for speed in (*speeds, own) if speed > 0]
    return median_low(known) if known else 1.0


def _believed(speed: float, usual: float) -> float:
    """The speed that a peer tells, which nobody checks, within bounds."""
    return min(LARGEST_RATIO * usual, max(usual / LARGEST_RATIO, speed)) if speed > 0 else usual


# --- the choice -----------------------------------------------------------------------------------
LOOK_AROUND_S: Final = 2.0
"""For how long a newcomer listens before it chooses a stage or an expert: its first link has told
it of all others, and they beat every second."""
LATECOMERS: Final = 2
"""The longest listening lasts so many times longer."""
LOOKS: Final = 3
"""A newcomer looks again so often, at most, after LOOK_AROUND_S, who has chosen what."""


async def listen(own_id: PeerId) -> None:
    """Newcomers that come together listen for different times: later ones hear what is chosen."""
    drawn = blake3.blake3(own_id.encode()).digest(length=4)
    share = int.from_bytes(drawn, "big") / 2**32  # in [0, 1), and this peer's own
    await trio.sleep(LOOK_AROUND_S * (1 + LATECOMERS * share))


async def choose_expert(services: DaemonServices, fits: frozenset[int]) -> int:
    """Listen, choose the expert that we train, and let all know.

    Those that had chosen before count where they are. Of those that choose meanwhile only who goes
    before us counts, so no two give way to each other.

    Args:
        fits: those that this machine can train; not empty.
    """
    facts, own_id = services.facts, services.facts.peer_id
    facts.now_doing("checking which expert needs a peer")
    await listen(own_id)
    peers = ExpertPeers(services.roster, facts)
    at_once = peers.newcomers()
    number = _chosen(peers, peers.others(), fits)
    for _ in range(LOOKS):
        facts.chosen_group = peers.groups[number]
        await trio.sleep(LOOK_AROUND_S)
        beside = peers.newcomers() - at_once
        before = [m for m in peers.others() if _goes_before(m.peer_id, own_id, beside)]
        previous, number = number, _chosen(peers, before, fits)
        if number == previous and not beside:
            break
    facts.chosen_group = peers.groups[number]
    return number


async def now_or_at_branch(services: DaemonServices, number: int) -> int:
    """The generalist, as long as all train that; else the expert that is given."""
    services.facts.now_doing("checking whether the generalist is trained")
    await listen(services.facts.peer_id)
    return number if ExpertPeers(services.roster, services.facts).is_branched else GENERALIST


def _chosen(peers: ExpertPeers, others: Iterable[Member], fits: frozenset[int]) -> int:
    place = peers.place(others, fits)
    return min(fits) if place is None else place


def _goes_before(peer_id: PeerId, own_id: PeerId, beside: Collection[PeerId]) -> bool:
    return peer_id not in beside or turn_of(peer_id) < turn_of(own_id)


# --- moves ----------------------------------------------------------------------------------------
class ExpertWatch:
    """Watches the experts while we train one: which stand, and whether another needs us more.

    Args:
        pinned: the one that we train whatever happens; None goes where it is needed.
    """

    def __init__(self, services: DaemonServices, pinned: int | None) -> None:
        self._facts = services.facts
        self._events = services.events
        self._peers = ExpertPeers(services.roster, services.facts)
        self._fits = services.facts.fitting_experts
        self._pinned = pinned
        self._balance = Balance(services.facts.peer_id)
        self._is_before_branch = False
        self._stood: Sequence[int] = ()
        self._trained = frozenset[int]()

    async def until_needed(self) -> JoinAgain:
        """Returns what a new process is to do, when there is something."""
        while True:
            await trio.sleep(BEAT_S)
            self._tell_standing()
            target = self._target()
            if target is not None:
                return self._to(target)

    def after_the_end(self) -> JoinAgain | None:
        """The next work of a new process when our expert is trained to its end, if there is any."""
        target = self._next() if self._pinned is None else self._to_its_pin()
        return None if target is None else self._to(target)

    def _to(self, target: int) -> JoinAgain:
        own = self._peers.own
        assert own is not None
        names = self._peers.names
        why = f"the expert '{names[target]}' needs a peer more than '{names[own]}'"
        return JoinAgain(why, part_of_expert(target))

    def _has_branched(self) -> bool:
        """Whether the generalist, which we train, has come to the branch since our last look."""
        peers, was_before = self._peers, self._is_before_branch
        self._is_before_branch = peers.own == GENERALIST and not peers.is_branched
        return was_before and not self._is_before_branch

    def _to_its_pin(self) -> int | None:
        peers = self._peers
        is_there = peers.own == self._pinned or not peers.is_branched
        return None if is_there else self._pinned

    def _target(self) -> int | None:
        peers, has_branched = self._peers, self._has_branched()
        if self._pinned is not None:
            return self._to_its_pin()
        if has_branched:
            target = peers.parted(self._fits)
            return None if target == GENERALIST else target
        if self._facts.state is PeerState.FINISHED:
            return None if self._stays() else self._next()
        if self._facts.state is not PeerState.TRAINING:
            return None
        trainers = peers.trainers_among(peers.others(), peers.own_trainer(self._fits))
        need = expert_need(trainers, peers.flops_left())
        move = self._balance.due_move(need, trio.current_time())
        return None if move is None else move.target

    def _stays(self) -> bool:
        """Whether we are the one that serves what is trained to its end."""
        own_turn = turn_of(self._facts.peer_id)
        return all(own_turn < turn_of(m.peer_id) for m in self._peers.ended())

    def _next(self) -> int | None:
        peers = self._peers
        ended = peers.ended()
        idle = [m.peer_id for m in ended]
        return peers.place((*peers.others(), *ended), self._fits, idle)

    def _tell_standing(self) -> None:
        """Tell of an expert that was trained, and is no longer."""
        peers = self._peers
        standing = peers.standing()
        for number in standing:
            if number in self._trained and number not in self._stood:
                name, step = peers.names[number], peers.step_of(number)
                self._events.emit(EventName.EXPERT_STANDS, expert=name, step=step)
        self._stood = standing
        self._trained |= {n for n in range(len(peers.names)) if peers.trainers(n)}


def expert_watch(services: DaemonServices, pinned: str | None) -> ExpertWatch | None:
    """The watch over a run's experts; None where it has none."""
    run = services.facts.expert_run
    number = None if run is None or pinned is None else run.expert_named(pinned)
    return None if run is None else ExpertWatch(services, number)
