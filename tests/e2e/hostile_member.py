"""A hostile member of a swarm of real peers: it has a p2pd of its own, and says all it can."""

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import trio
from missiles import hello
from raw_client import ANSWER_S, raw_client
from swarm import INNER_STEPS, Peer

from bench.fuzzing.hostile import Hostile
from bench.fuzzing.shots import Gunner, Magazine
from bench.fuzzing.statements import statements_by
from bench.fuzzing.swarms import PEERS, known_world
from bench.fuzzing.values import World
from peer.codec import get_codec
from peer.network.conversation import Conversation
from peer.network.identity import Identity, load_or_create
from peer.network.relay import HOP
from peer.runtime import Network
from protocol.address.multiaddr import split_peer_id
from protocol.membership.group import Group
from protocol.run.run_spec import RunSpec, parse_bytes
from protocol.wire.content_messages import GetSpec, SpecReply
from protocol.wire.messages import Beat, Free, Hello
from protocol.wire.versions import CONTENT, DIRECTORY, GOSSIP, HELLO, REACH, SPOKEN

SEED: Final = 1
POOL: Final = 12
PAUSE_S: Final = 1.0
"""Some ten volleys a second: what is tried is what they say, not how much of it a machine bears."""
SERVED: Final = (HELLO, GOSSIP, CONTENT, REACH, DIRECTORY, HOP)
"""What a peer of a run in pairs serves: fragments and stages belong to other runs."""


@dataclass(frozen=True)
class Member:
    """What it knows of the run, and what it will say. Drawing that takes seconds."""

    folder: Path
    identity: Identity
    run_id: str
    spec: RunSpec
    world: World
    magazine: Magazine

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    def greeting(self, peer: Peer) -> Hello:
        """A hello of somebody who is where this peer is."""
        status = peer.status()
        return Hello(
            software="hostile 1.0",
            protocols=SPOKEN,
            run_id=self.run_id,
            incarnation=1,
            addresses=(),
            swarm_time_s=1.0,
            state="training",
            round=status["round"],
            layout_digest=self.spec.frozen.layout_digest if self.spec.frozen else None,
            group=Group(self.run_id).digest,
            step=status["step"],
        )

    def beat(self, peer: Peer) -> Beat:
        """A beat of somebody who is where this peer is, and free to average."""
        status = peer.status()
        return Beat(
            sequence=1,
            state="training",
            round=status["round"],
            fraction=0.5,
            steps_per_s=float(INNER_STEPS),
            epoch=0,
            position=0,
            step=status["step"],
            tokens=0,
            sent_s=trio.current_time(),
            echo_s=None,
            echo_hold_s=0.0,
            swarm_time_s=1.0,
            free=(Free(0, status["round"], status["step"]),),
            group=Group(self.run_id).digest,
        )


async def new_member(folder: Path, peers: Sequence[Peer]) -> Member:
    """Learn what is to be known of the run of these peers, and draw what will be said."""
    identity = load_or_create(folder / "raw.key")
    async with raw_client(folder, peers[0].address) as (network, peer_id):
        run_id, spec = await learnt(network, peer_id)
    status = peers[0].status()
    ids = (*(peer.peer_id for peer in peers), identity.peer_id)
    statements = statements_by(identity, run_id, ids, SEED)
    assert spec.frozen is not None
    rounds = range(status["round"], status["round"] + 100)
    steps = tuple(status["step"] + INNER_STEPS * i for i in range(100))
    world = known_world(
        {
            "group": (Group(run_id).digest,),
            "run_id": (run_id,),
            "layout_digest": (spec.frozen.layout_digest,),
            "addresses": tuple(peer.address for peer in peers),
            "tried": tuple(split_peer_id(peer.address)[0] for peer in peers),
            "corpus": (str(spec.data.manifest),),
            "step": steps,
            "statements": statements,
            "pass_shown": statements[-1:],
            **dict.fromkeys(PEERS, ids),
        },
        rounds,
        codes_of(spec.frozen.padded_parameters),
    )
    return Member(folder, identity, run_id, spec, world, Magazine(world, SERVED, POOL, SEED))


async def learnt(network: Network, peer_id: str) -> tuple[str, RunSpec]:
    """The run id and run spec, as anybody can ask for them."""
    async with Conversation(await network.open_stream(peer_id, HELLO)) as talk:
        await talk.send(hello())
        theirs, _ = await talk.receive(Hello, timeout_s=ANSWER_S)
    async with Conversation(await network.open_stream(peer_id, CONTENT)) as talk:
        await talk.send(GetSpec())
        _, spec = await talk.receive(SpecReply, timeout_s=ANSWER_S)
    assert theirs.run_id is not None
    return theirs.run_id, parse_bytes(spec)


def codes_of(padded_parameters: int) -> tuple[bytes, ...]:
    """Codes of a vector as this run's, and ones that are none."""
    codec = get_codec("int8")
    codes = torch.empty(codec.code_bytes(padded_parameters), dtype=torch.uint8)
    codec.encode(torch.randn(padded_parameters, generator=torch.Generator().manual_seed(1)), codes)
    plain = codes.numpy().tobytes()
    return plain, plain[:-1], b"\xff" * len(plain)


@asynccontextmanager
async def attacking(member: Member, peers: Sequence[Peer]) -> AsyncIterator[Hostile]:
    """Attack all of them until the block ends."""
    address = peers[0].address
    async with (
        raw_client(member.folder, address) as (network, _),
        trio.open_nursery() as nursery,
    ):
        hostile = Hostile(
            network,
            {peer.peer_id: [peer.address] for peer in peers},
            hello=lambda: member.greeting(peers[0]),
            beat=lambda: member.beat(peers[0]),
            magazine=member.magazine,
            gunner=Gunner(member.identity, member.world, SEED),
            pause_s=PAUSE_S,
        )

        async def attack() -> None:
            turns = (member.magazine.volleys(1) for _ in itertools.count())
            await hostile.attack(itertools.chain.from_iterable(turns), linked=True, asked=True)

        nursery.start_soon(attack)
        yield hostile
        nursery.cancel_scope.cancel()
