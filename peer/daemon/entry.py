"""How a peer comes to its run: it founds one, joins one, or comes back to that of its home.

An entry ends with the signed run spec and with what the run trains with here. beginning.py says
where the first state comes from; returning.py has the entry of one that comes back.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.runtime import PeerId
from peer.stages.peers import StagePeers
from protocol.address.multiaddr import with_peer_id
from protocol.errors import InvalidRunSpec, LocoError
from protocol.membership.group import Group
from protocol.membership.returning import UNREACHED_S
from protocol.run.assignment import needed_stage, newcomers_stage
from protocol.run.layout import part_of_expert, part_of_stage
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.wire.messages import Hello
from protocol.wire.versions import how_to_install

from .bootstrap import Bootstrap
from .domains import BlobsOfPeers
from .experts import LOOK_AROUND_S, LOOKS, choose_expert, listen, now_or_at_branch
from .parts import PeerParts
from .provision import ChoosePart, ChosenPart, Supplies
from .services import DaemonServices

CheckSpec = Callable[[RunSpec, int | None], None]
"""Raises when this peer's options do not fit a run, or its machine that, or an expert of it by its
number: InvalidRunSpec, ConfigError, HomeError."""
Entered = tuple[SignedSpec, Supplies]
Entry = Callable[[PeerParts, CheckSpec, trio.Nursery], Awaitable[Entered]]
"""One way to come to a run; meanwhile, it says in status and events what goes on.

In the nursery it may go on looking for the swarm while the run is trained. Raises, here and there,
Refused: trying again cannot change that; and what `CheckSpec` does."""


async def found(
    spec: RunSpec, expert: str | None, parts: PeerParts, check_spec: CheckSpec, _: trio.Nursery
) -> Entered:
    number = spec.expert_named(expert or first_expert(spec))
    if number is not None and spec.branch_round:
        number = 0  # which all train until then
    check_spec(spec, number)
    founder = parts.keys.founder
    assert founder is not None, "a home that founds a run has a founder's key"
    parts.facts.now_doing("preparing the data", PeerState.STARTING)
    frozen, supplies = await parts.provision.found(spec, number)
    closed = parts.admission.closed(frozen)
    signed = SignedSpec.signed_by(closed, founder.public_key, founder.sign)
    parts.admission.founded(signed, number)
    if number is not None:
        note_fitting(parts, frozen)
    return signed, supplies


def first_expert(spec: RunSpec) -> str | None:
    """The name of the generalist, which a founder trains if it is told nothing else."""
    return spec.experts[0].name if spec.experts else None


def expert_to_go_on_with(spec: RunSpec, kept: str | None, pinned: str | None) -> str | None:
    """The name of the expert: the one that the home has trained last, or its user names.

    The generalist is gone on with until the branch, and left by itself then.
    """
    if kept is not None and kept == first_expert(spec) and spec.branch_round:
        return kept
    return pinned or kept


@dataclass(frozen=True, slots=True)
class Following:
    """A run that a home goes over to, from one that is over; `move` makes it that run's home."""

    run_id: str
    move: Callable[[SignedSpec], None]


async def join(
    addresses: Sequence[str],
    stage: int | None,
    expert: str | None,
    parts: PeerParts,
    check_spec: CheckSpec,
    _: trio.Nursery,
    following: Following | None = None,
) -> Entered:
    """Join the run that the addresses lead to: run spec and data come from the swarm.

    Args:
        stage: of a pipeline, to be held; None lets it choose.
        expert: the name of that to be trained, of a run that has any; None lets it choose.
        following: the run that it must be, of a home that leaves another for it.

    Raises LocoError: that run is not there.
    """
    facts = parts.facts
    facts.now_doing("looking for the swarm", PeerState.CONNECTING)
    bootstrap = Bootstrap(parts, parts.links, addresses)
    if following is None:
        first, hello = await enter_swarm(parts, bootstrap)
    else:
        first, hello = await _enter_successor(parts, bootstrap, following)
    facts.now_doing("fetching the run spec", PeerState.DOWNLOADING)
    signed = await parts.sources.fetch(
        lambda client: client.spec(hello.run_id), parts.roster, first
    )
    spec = usable_spec(signed, hello.software)
    check_spec(spec, None)
    if following is not None:
        following.move(signed)
    parts.admission.entered(signed)
    parts.events.emit(EventName.RUN_RECEIVED, remote=first, run_id=signed.run_id, name=spec.name)
    choose: ChoosePart = partial(choose_stage, parts, spec, signed.run_id, stage)
    if (number := await expert_of(parts, spec, expert)) is not None:
        check_spec(spec, number)
        choose = partial(stays_at, number)
    facts.now_doing("fetching the data")
    source = BlobsOfPeers(parts, parts.sources, first, expert=facts.expert)
    return signed, await parts.provision.obtain(spec, source, choose)


async def _enter_successor(
    parts: PeerParts, bootstrap: Bootstrap, following: Following
) -> tuple[PeerId, Hello]:
    """Find the swarm of the run that follows, within UNREACHED_S. Raises LocoError, Refused."""
    which = f"the run {following.run_id}, which follows that of this home,"
    again = "loco-peer start goes back to the old run, and tries again if that is over"
    try:
        with trio.fail_after(UNREACHED_S):
            first, hello = await enter_swarm(parts, bootstrap)
    except trio.TooSlowError:
        why = next(iter(parts.facts.unlinked.failing.values()), "nobody answers")
        minutes = f"{UNREACHED_S / 60:.0f} minutes"
        raise LocoError(f"{which} was not reached for {minutes} ({why}); {again}") from None
    if hello.run_id != following.run_id:
        raise LocoError(f"{which} is not what {first} trains ({hello.run_id}); {again}")
    return first, hello


def usable_spec(signed: SignedSpec, software: str) -> RunSpec:
    """A founder has checked it, so what is wrong with it is the version of loco-peer here.

    Raises InvalidRunSpec.
    """
    try:
        return signed.spec()
    except InvalidRunSpec as error:
        raise InvalidRunSpec(
            f"this loco-peer cannot use the run spec, and {software}, which runs it, can:"
            f" {how_to_install(software)}. What is wrong here: {error}"
        ) from error


async def enter_swarm(parts: PeerParts, bootstrap: Bootstrap) -> tuple[PeerId, Hello]:
    """Find the swarm, and use its clock and its directory. Raises Refused."""
    first, hello = await bootstrap.enter()
    parts.greeter.correct_clock()
    await parts.directory.add_peers(hello.addresses)
    return first, hello


async def go_by_the_linked(parts: PeerParts) -> None:
    """Use clock and directory of the peers that the home remembers, once one is linked."""
    while not (alive := parts.roster.alive(trio.current_time())):
        await parts.heard.park()
    parts.greeter.correct_clock()
    known = [with_peer_id(address, m.peer_id) for m in alive for address in m.addresses]
    await parts.directory.add_peers(known)


async def expert_of(
    parts: PeerParts, spec: RunSpec, name: str | None, *, comes_back: bool = False
) -> int | None:
    """The number of the expert that we train: the one that is named, or the one that needs us most.

    Before the branch that is the generalist, unless one `comes_back` to what it has trained. None
    where the run has no experts. Raises InvalidRunSpec: there is none of that name, or none fits.
    """
    number = None if name is None else spec.expert_named(name)
    if not spec.experts:
        return None
    misfits = note_fitting(parts, spec)
    if number is None and not parts.facts.fitting_experts:
        listed = "; ".join(f"'{spec.experts[n].name}': {why}" for n, why in misfits.items())
        raise InvalidRunSpec(
            f"no expert of the run '{spec.name}' fits this machine ({listed}): make room, or train"
            " one nevertheless with --expert NAME --yes"
        )
    if number is None:
        number = await choose_expert(parts, parts.facts.fitting_experts)
    elif number and spec.branch_round and not comes_back:
        number = await now_or_at_branch(parts, number)
    assert parts.facts.run_id is not None
    parts.facts.chosen_group = Group(parts.facts.run_id, part_of_expert(number))
    parts.admission.trains(number)
    parts.events.emit(EventName.EXPERT_CHOSEN, expert=spec.experts[number].name)
    return number


def note_fitting(parts: PeerParts, spec: RunSpec) -> Mapping[int, str]:
    """Note which experts this machine can train; why it cannot train the others is told."""
    misfits = parts.provision.misfits(spec)
    for number, why in misfits.items():
        name = spec.experts[number].name
        parts.events.emit(EventName.EXPERT_UNFIT, expert=name, detail=why)
    parts.facts.fitting_experts = frozenset(range(len(spec.experts))) - misfits.keys()
    return misfits


async def choose_stage(
    services: DaemonServices, spec: RunSpec, run_id: str, given: int | None = None
) -> ChosenPart:
    """Listen, choose the stage that this peer holds, if it is not `given`, and let all know.

    Newcomers that come together look again, because what others choose is heard with a beat.
    """
    facts, pipeline = services.facts, spec.pipeline
    facts.now_doing("checking which stage needs a peer")
    await listen(facts.peer_id)
    peers = StagePeers(services.roster, run_id, pipeline.stages)
    counts = [len(others) for others in peers.holders()]
    stage = needed_stage(counts, pipeline.num_visited) if given is None else given
    facts.chosen_group = Group(run_id, part_of_stage(stage))
    if given is None:
        stage = await _settled(facts.peer_id, peers, stage, pipeline.num_visited)
        facts.chosen_group = Group(run_id, part_of_stage(stage))
    alive = services.roster.alive(trio.current_time())
    return ChosenPart(
        stage,
        has_holders=not {*peers.holders()[stage]} <= {*peers.newcomers()},
        is_trained=any(member.progress.step for member in alive),
    )


async def stays_at(number: int) -> ChosenPart:
    return ChosenPart(number, has_holders=True, is_trained=True)


async def _settled(own_id: PeerId, peers: StagePeers, stage: int, visited: int) -> int:
    """The stage to begin with, where others may have chosen at the same time."""
    for look in range(1, LOOKS + 1):
        await trio.sleep(LOOK_AROUND_S)
        holders = [{*others} for others in peers.holders()]
        holders[stage].add(own_id)
        newcomers = {own_id, *peers.newcomers()}
        settled = newcomers_stage(own_id, holders, newcomers, visited, look)
        if settled is not None:
            return settled
    return stage
