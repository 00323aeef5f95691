"""Simulated swarms under siege: honest peers that train, and a hostile one among them.

In a simulation nothing hides an error that nobody expected: it ends the world, here with the
volleys that were under way. After the siege all honest peers must still be there, linked with each
other, and average on. Nobody is ignored for its faults: every message has to be looked at. The
honest ones find out how they are reached, relay, and serve pieces of a small corpus, as real ones.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
import trio
from msgspec import structs

from bench.fuzzing.hostile import Hostile
from bench.fuzzing.shots import Gunner, Magazine
from bench.fuzzing.statements import statements_by
from bench.fuzzing.values import World
from peer.codec import BLOCK, get_codec
from peer.codec.differences import pack
from peer.content.pieces import PieceStore
from peer.daemon.outside import be_reached
from peer.network.identity import Identity
from peer.network.relay import HOP
from peer.observe.event_names import EventName
from protocol.address.multiaddr import split_peer_id
from protocol.content.manifest import CorpusManifest, digest_of
from protocol.fragment.fragments import fragments_of_run
from protocol.membership import book
from protocol.run.run_spec import RunSpec
from protocol.wire.messages import Beat, Free, Hello
from protocol.wire.versions import CONTENT, FRAGMENT, GOSSIP, HELLO, REACH, SPOKEN
from simulation.swarm import (
    SimulatedPeer,
    SimulatedSwarm,
    SwarmOptions,
    identity_of,
    open_swarm,
)
from simulation.trainer import simulated_layout
from simulation.virtual_time import run_in_virtual_time

HONEST: Final = "abc"
STEPS: Final = 20
"""A round has so many: two virtual seconds."""
CALM_ROUNDS: Final = 3
"""What the honest peers average before, and afterwards."""
HOUR_S: Final = 3600.0
PARAMETERS: Final = {"noloco": 256, "streaming": 6 * 16384, "diloco": 6 * 16384}
METHODS: Final = tuple(PARAMETERS)
CODECS: Final = {"noloco": "int8-diff", "streaming": "int8", "diloco": "int8"}
SERVED: Final = {
    "noloco": (HELLO, GOSSIP, CONTENT, REACH, HOP),
    "streaming": (HELLO, GOSSIP, CONTENT, REACH, HOP),
    "diloco": (HELLO, FRAGMENT, CONTENT, REACH, HOP),
}
"""Conversations in which peers of such a run take part."""
RELAY_MBPS: Final = 10.0
NUM_PIECES: Final = 4
"""How many the corpus has that honest peers serve; they lack the last one."""
PEERS: Final = ("peer_id", "owner", "origin", "contributors", "path", "failed")
"""Fields that hold peer ids."""
ENDED: Final = (EventName.ROUND_AVERAGED, EventName.FRAGMENT_RETURNED)


@dataclass(frozen=True, slots=True)
class Siege:
    """Messages that are thrown at a swarm, and that swarm.

    Attributes:
        examples: volleys that begin with each type of message.
        pool: shots of each type, of which volleys are put together.
        linked: whether the hostile peer says a proper hello, and beats.
    """

    method: str
    linked: bool
    examples: int
    pool: int
    seed: int = 1


class FoundBug(AssertionError):
    """An error that nobody expected, or honest peers that do not go on as before."""


def besieged(siege: Siege, folder: Path) -> Counter[str]:
    """Play it. Returns how many messages of each type were fired; raises FoundBug."""
    came: list[Hostile] = []
    try:
        with patient():
            run_in_virtual_time(
                siege.seed, lambda: _play(siege, folder, came.append), limit_s=24 * HOUR_S
            )
    except Exception as bug:
        words = came[0].last_words() if came else "before the siege"
        raise FoundBug(f"{siege}\n{words}") from bug
    return came[0].fired


@contextmanager
def patient() -> Iterator[None]:
    """No peer is slowed or ignored for its faults."""
    with patch.multiple(book, SLOWED_FROM=math.inf, IGNORED_FROM=math.inf):
        yield


async def _play(siege: Siege, folder: Path, came: Callable[[Hostile], None]) -> None:
    options = SwarmOptions(padded_parameters=PARAMETERS[siege.method])
    async with (
        open_swarm(siege.seed, spec_of(siege.method), folder, options) as swarm,
        trio.open_nursery() as nursery,
    ):
        await _start(swarm)
        for name in HONEST:
            _open_up(swarm[name], corpus_in(folder / name), nursery)
        await _average(swarm, CALM_ROUNDS)
        seen = {name: len(swarm[name].lines) for name in HONEST}
        identity = identity_of(siege.seed, "hostile")
        async with swarm.internet.open_network(identity.peer_id) as network:
            world = world_of(swarm, siege, identity, network.addresses)
            magazine = Magazine(world, SERVED[siege.method], siege.pool, siege.seed)
            hostile = Hostile(
                network,
                {swarm[name].peer_id: swarm[name].network.addresses for name in HONEST},
                hello=lambda: hello_like(swarm["a"], network.addresses),
                beat=lambda: beat_like(swarm["a"]),
                magazine=magazine,
                gunner=Gunner(identity, world, siege.seed),
            )
            came(hostile)
            volleys = magazine.volleys(siege.examples)
            await hostile.attack(volleys, linked=siege.linked, asked=siege.linked)
        await _average(swarm, CALM_ROUNDS)
        _check(swarm, seen, {identity.peer_id})
        nursery.cancel_scope.cancel()


def spec_of(method: str) -> RunSpec:
    """A run that does not end by itself."""
    sync: dict[str, Any] = {"method": method, "inner_steps": STEPS, "codec": CODECS[method]}
    if method == "diloco":
        sync["diloco"] = {"blocks_per_fragment": 2}
    return RunSpec.model_validate(
        {
            "seed": 1,
            "training": {"total_steps": 1_000_000},
            "optimizer": {"warmup_steps": 0, "schedule": "constant"},
            "sync": sync,
        }
    )


# --- the world ------------------------------------------------------------------------------------
def world_of(
    swarm: SimulatedSwarm, siege: Siege, identity: Identity, addresses: Sequence[str]
) -> World:
    """The run and itself, as a member knows them."""
    facts, honest = swarm["a"].facts, [swarm[name] for name in HONEST]
    run_id, peers = str(facts.run_id), (*(peer.peer_id for peer in honest), identity.peer_id)
    statements = statements_by(identity, run_id, peers, siege.seed)
    return known_world(
        {
            "group": (str(facts.group),),
            "run_id": (run_id,),
            "layout_digest": (str(facts.layout_digest),),
            "addresses": (*(peer.network.addresses[0] for peer in honest), *addresses),
            "tried": tuple(split_peer_id(address)[0] for address in addresses),
            "corpus": (corpus_manifest().name,),
            "content": (corpus_manifest().name,),
            "statements": statements,
            "pass_shown": statements[-1:],
            **dict.fromkeys(PEERS, peers),
        },
        range(facts.round, facts.round + 40),
        codes_of(siege.method),
    )


def known_world(
    own: Mapping[str, tuple[Any, ...]], rounds: range, codes: tuple[bytes, ...]
) -> World:
    """The values of a run by the names of the fields that hold them.

    Args:
        own: those that only this run has.
        rounds: those that are now, or soon.
    """
    steps = tuple(STEPS * round_ for round_ in rounds)
    named: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("round", "cycle", "proposed", "iteration"), tuple(rounds)),
        **dict.fromkeys(("step", "minimum_step"), steps),
        **dict.fromkeys(("fragment", "chunk", "carried", "index", "first"), (0, 1, 2)),
        **dict.fromkeys(("piece", "parts", "known"), tuple(range(NUM_PIECES + 1))),
        **dict.fromkeys(("steps", "tokens", "count", "attempt", "place"), (1, 2, STEPS)),
        "codec": ("int8", "int8-diff"),
        "packed": (0, 133, 138, 255, 260),
        "protocols": SPOKEN,
        "state": ("training", "finished", "leaving", "downloading"),
        "incarnation": (1, 2),
        "stripes": (0, 1, 24),
        "vectors": (1,),
        "mask": (b"\1", b"\3", b"\7", b"\x0f"),
        **own,
    }
    values = [value for known in own.values() for value in known[:4]]
    return World((*values, *rounds[:3], *steps[:3]), named, codes)


def codes_of(method: str) -> tuple[bytes, ...]:
    """Codes of the lengths that this run's vectors, fragments and chunks have."""
    sizes = {PARAMETERS[method]}
    section = spec_of(method).sync
    cut = section.diloco or section.pairs
    if cut.fragments != "whole":
        for fragment in fragments_of_run(cut, simulated_layout(PARAMETERS[method])):
            sizes |= {fragment.size, *(stop - start for start, stop in fragment.chunks)}
    codec, made = get_codec("int8"), []
    generator = torch.Generator().manual_seed(1)
    for size in sorted(sizes):
        codes = torch.empty(codec.code_bytes(size), dtype=torch.uint8)
        codec.encode(torch.randn(size, generator=generator), codes)
        made.append(codes.numpy().tobytes())
        if CODECS[method] == "int8-diff":
            widths = np.full(size // BLOCK, 4, np.uint8)
            made.append(bytes(pack(made[-1], widths)))
    return (*made, made[0][:-1], bytes(len(made[-1])), b"\xff" * len(made[0]))


# --- the corpus -----------------------------------------------------------------------------------
def corpus_manifest() -> CorpusManifest:
    """That of a corpus of NUM_PIECES pieces."""
    manifest = CorpusManifest(
        context_length=32,
        piece_blocks=8,
        num_tokens=NUM_PIECES * 8 * 32 + 1,
        dtype="|u1",
        vocabulary_size=256,
        tokenizer_digest="",
        held_out_blocks=0,
        held_out="",
        digests=b"",
    )
    digests = b"".join(map(digest_of, _pieces_of(manifest)))
    return structs.replace(manifest, digests=digests)


def _pieces_of(manifest: CorpusManifest) -> list[bytes]:
    return [bytes([piece]) * manifest.piece_bytes(piece) for piece in range(NUM_PIECES)]


def corpus_in(folder: Path) -> PieceStore:
    """That corpus in this folder, without its last piece."""
    store = PieceStore(folder, corpus_manifest())
    for piece, data in enumerate(_pieces_of(store.manifest)[:-1]):
        store.add(piece, data)
    return store


# --- members --------------------------------------------------------------------------------------
def hello_like(peer: SimulatedPeer, addresses: Sequence[str]) -> Hello:
    """A hello of somebody who is where this peer is."""
    facts = peer.facts
    return Hello(
        software="hostile 1.0",
        protocols=SPOKEN,
        run_id=facts.run_id,
        incarnation=1,
        addresses=tuple(addresses),
        swarm_time_s=peer.directory.swarm_time_s(),
        state="training",
        round=facts.round,
        layout_digest=facts.layout_digest,
        group=facts.group,
        step=facts.step,
    )


def beat_like(peer: SimulatedPeer) -> Beat:
    """A beat of somebody who is where this peer is, and free to average."""
    facts = peer.facts
    free = tuple(Free(p, facts.round, facts.step) for p in (*facts.free, 0, 1))
    return Beat(
        sequence=1,
        state="training",
        round=facts.round,
        fraction=0.5,
        steps_per_s=facts.steps_per_s,
        epoch=facts.epoch,
        position=facts.position,
        step=facts.step,
        tokens=facts.tokens,
        sent_s=trio.current_time(),
        echo_s=None,
        echo_hold_s=0.0,
        swarm_time_s=peer.directory.swarm_time_s(),
        free=tuple({one.fragment: one for one in free}.values()),
        group=facts.group,
    )


# --- the honest -----------------------------------------------------------------------------------
async def _start(swarm: SimulatedSwarm) -> None:
    swarm.found(HONEST[0])
    await swarm.until(swarm[HONEST[0]].known.is_set)
    for name in HONEST[1:]:
        swarm.join(name)
    await swarm.until(lambda: all(swarm[name].ready.is_set() for name in HONEST))


def _open_up(peer: SimulatedPeer, store: PieceStore, nursery: trio.Nursery) -> None:
    """Let it do what real peers do besides, and simulated ones need not."""
    nursery.start_soon(be_reached, peer.parts, RELAY_MBPS)
    assert peer.peer.training is not None
    peer.peer.training.service.stores = {store.manifest.name: store}


async def _average(swarm: SimulatedSwarm, times: int) -> None:
    """Until each honest peer has averaged so many times more."""
    before = {name: len(swarm[name].events(*ENDED)) for name in HONEST}
    with trio.fail_after(HOUR_S):
        await swarm.until(
            lambda: all(len(swarm[name].events(*ENDED)) >= before[name] + times for name in HONEST)
        )


def _check(swarm: SimulatedSwarm, seen: Mapping[str, int], hostile: set[str]) -> None:
    """All that honest peers are there as before, and have lost nobody but the hostile one."""
    for name in HONEST:
        peer = swarm[name]
        if peer.ended.is_set() or peer.failure is not None:
            raise FoundBug(f"{name} has ended: {peer.failure}")
        told = peer.events()[seen[name] :]
        lost = {e["remote"] for e in told if e["event"] == EventName.PEER_LOST} - hostile
        honest = lost & {swarm[other].peer_id for other in HONEST}
        broken = [e for e in told if e["event"] == EventName.TRAINER_DIED]
        if honest or broken:
            raise FoundBug(f"{name} lost {honest}, and {broken}")
