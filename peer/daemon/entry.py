"""How a peer comes to its run: it founds one, joins one, or comes back to that of its home.

An entry ends with the signed run spec and with what the run trains with here. beginning.py says
where the first state comes from; returning.py has the entry of one that comes back.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import blake3
import trio

from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.runtime import PeerId
from peer.stages.company import StageCompany
from protocol.address.multiaddr import with_peer_id
from protocol.errors import InvalidRunSpec
from protocol.membership.group import Group
from protocol.run.assignment import needed_stage, newcomers_stage
from protocol.run.layout import part_of_expert, part_of_stage
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.wire.messages import Hello
from protocol.wire.versions import how_to_install

from .bootstrap import Bootstrap
from .domains import BlobsOfPeers
from .parts import PeerParts
from .ports import Ports
from .provision import ChoosePart, ChosenPart, Supplies

CheckSpec = Callable[[RunSpec], None]
"""Raises when this peer's options do not fit a run: InvalidRunSpec, ConfigError, HomeError."""
Entered = tuple[SignedSpec, Supplies]
Entry = Callable[[PeerParts, CheckSpec, trio.Nursery], Awaitable[Entered]]
"""One way to come to a run; meanwhile, it says in status and events what goes on.

In the nursery it may go on looking for the swarm while the run is trained. Raises, here and there,
Refused: trying again cannot change that; and what `CheckSpec` does."""


async def found(
    spec: RunSpec, expert: str | None, parts: PeerParts, check_spec: CheckSpec, _: trio.Nursery
) -> Entered:
    check_spec(spec)
    number = spec.expert_named(expert or first_expert(spec))
    founder = parts.keys.founder
    assert founder is not None, "a home that founds a run has a founder's key"
    parts.facts.now_doing("preparing the data", PeerState.STARTING)
    frozen, supplies = await parts.provision.found(spec, number)
    closed = parts.admission.closed(frozen)
    signed = SignedSpec.signed_by(closed, founder.public_key, founder.sign)
    parts.admission.founded(signed, number)
    return signed, supplies


def first_expert(spec: RunSpec) -> str | None:
    """The name of the generalist, which a founder trains if it is told nothing else."""
    return spec.experts[0].name if spec.experts else None


async def join(
    addresses: Sequence[str],
    stage: int | None,
    expert: str | None,
    parts: PeerParts,
    check_spec: CheckSpec,
    _: trio.Nursery,
) -> Entered:
    """Join the run that the addresses lead to: run spec and data come from the swarm.

    Args:
        stage: of a pipeline, to be held; None lets it choose.
        expert: the name of that to be trained, where the run has any.
    """
    facts = parts.facts
    facts.now_doing("looking for the swarm", PeerState.CONNECTING)
    first, hello = await enter_swarm(parts, Bootstrap(parts, parts.links, addresses))
    facts.now_doing("fetching the run spec", PeerState.DOWNLOADING)
    signed = await parts.sources.fetch(
        lambda fetcher: fetcher.spec(hello.run_id), parts.roster, first
    )
    spec = usable_spec(signed, hello.software)
    number = spec.expert_named(expert)
    parts.admission.entered(signed, number)
    parts.events.emit(EventName.RUN_RECEIVED, remote=first, run_id=signed.run_id, name=spec.name)
    check_spec(spec)
    facts.now_doing("fetching the data")
    choose: ChoosePart = partial(choose_stage, parts, spec, signed.run_id, stage)
    if number is not None:
        facts.chosen = Group(signed.run_id, part_of_expert(number))
        choose = partial(stays_at, number)
    source = BlobsOfPeers(parts, parts.sources, first, expert=facts.expert)
    return signed, await parts.provision.obtain(spec, source, choose)


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
    """Find the swarm, and go by its clock and its directory. Raises Refused."""
    first, hello = await bootstrap.enter()
    parts.greeter.correct_clock()
    await parts.directory.add_peers(hello.addresses)
    return first, hello


async def go_by_the_linked(parts: PeerParts) -> None:
    """The same by the peers that the home remembers, as soon as one of them is linked."""
    while not (alive := parts.roster.alive(trio.current_time())):
        await parts.heard.park()
    parts.greeter.correct_clock()
    known = [with_peer_id(address, m.peer_id) for m in alive for address in m.addresses]
    await parts.directory.add_peers(known)


LOOK_AROUND_S: Final = 2.0
"""For how long a newcomer to a pipeline listens before it chooses a stage: its first link has told
it of all others, and they beat every second."""
LATECOMERS: Final = 2
"""The longest listening lasts so many times longer."""
LOOKS: Final = 3
"""A newcomer looks again so often, at most, after LOOK_AROUND_S, who has chosen what."""


async def choose_stage(
    ports: Ports, spec: RunSpec, run_id: str, given: int | None = None
) -> ChosenPart:
    """Listen, choose the stage that this peer holds, if it is not `given`, and let all know.

    Newcomers that come together listen for different times, so that the later ones hear what the
    earlier ones have chosen; and they look again, for that is heard with a beat.
    """
    facts, pipeline = ports.facts, spec.pipeline
    facts.now_doing("checking which stage needs a peer")
    drawn = blake3.blake3(facts.peer_id.encode()).digest(length=4)
    share = int.from_bytes(drawn, "big") / 2**32  # in [0, 1), and this peer's own
    await trio.sleep(LOOK_AROUND_S * (1 + LATECOMERS * share))
    company = StageCompany(ports.roster, run_id, pipeline.stages)
    counts = [len(others) for others in company.holders()]
    stage = needed_stage(counts, pipeline.num_visited) if given is None else given
    facts.chosen = Group(run_id, part_of_stage(stage))
    if given is None:
        stage = await _settled(facts.peer_id, company, stage, pipeline.num_visited)
        facts.chosen = Group(run_id, part_of_stage(stage))
    alive = ports.roster.alive(trio.current_time())
    return ChosenPart(
        stage,
        has_holders=not {*company.holders()[stage]} <= {*company.newcomers()},
        is_trained=any(member.progress.step for member in alive),
    )


async def stays_at(number: int) -> ChosenPart:
    return ChosenPart(number, has_holders=True, is_trained=True)


async def _settled(own_id: PeerId, company: StageCompany, stage: int, visited: int) -> int:
    """The stage to begin with, where others may have chosen at the same time."""
    for look in range(1, LOOKS + 1):
        await trio.sleep(LOOK_AROUND_S)
        holders = [{*others} for others in company.holders()]
        holders[stage].add(own_id)
        newcomers = {own_id, *company.newcomers()}
        settled = newcomers_stage(own_id, holders, newcomers, visited, look)
        if settled is not None:
            return settled
    return stage
