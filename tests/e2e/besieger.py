"""A besieger: hundreds of identities from one address, without a p2pd (bare_libp2p.py).

    python besieger.py SOURCE SECONDS RUN_ID NOTES VICTIM...

It does all of TACTICS to each victim at once, each at a pace of its own, and lets go of what it
holds after HOLD_S: what is tried is what a stranger may do, not how much of it a machine bears. It
writes all that it was told to the file NOTES ("-": to none), stream by stream, and prints how often
each tactic was begun, and how often it got a connection. RUN_ID is "-" where it does not know it.
"""

import itertools
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import trio

# The root too: in tests/, where that comes first, `peer` is a folder that is no package.
sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from bare_libp2p import MULTISTREAM, SYN, TLS, Bare, agree_on, bare_connection, dial, frame, said
from missiles import framed, hello, missiles

from peer.network.directory import wall_time_s
from peer.network.identity import Identity
from peer.network.relay import HOP
from protocol.limits import INBOUND_STREAMS, MAX_HEADER_BYTES
from protocol.membership.group import Group
from protocol.membership.records import PeerRecord, encode_record, place_of, record_keys
from protocol.wire.content_messages import GetSpec, GetState
from protocol.wire.directory_messages import FindRecords, KeepRecord
from protocol.wire.versions import CONTENT, DIRECTORY, FRAGMENT, GOSSIP, HELLO, REACH, STAGE

NUM_IDENTITIES: Final = 400
HOLD_S: Final = 16.0
"""p2pd gives a handshake 15 seconds."""
NICENESS: Final = 5
"""Of trainers it is 10: on a busy machine they would leave it no time to attack in."""
OURS: Final = (HELLO, GOSSIP, CONTENT, FRAGMENT, STAGE, REACH, DIRECTORY, HOP)
LIBP2P: Final = ("/ipfs/id/1.0.0", "/ipfs/id/push/1.0.0", "/ipfs/kad/1.0.0", "/ipfs/ping/1.0.0")
LOST: Final = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


def identities() -> tuple[Identity, ...]:
    """All that it goes by."""
    return tuple(Identity(bytes([7, *number.to_bytes(31)])) for number in range(NUM_IDENTITIES))


def asked(protocol: str, data: bytes = b"") -> bytes:
    return said(MULTISTREAM, protocol) + data


@dataclass
class Besieger:
    """What it knows, and has done."""

    source: str
    run_id: str | None
    keeps_notes: bool
    notes: list[bytes] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    begun: Counter[str] = field(default_factory=Counter)
    connected: Counter[str] = field(default_factory=Counter)
    faces: Iterator[Identity] = field(default_factory=lambda: itertools.cycle(identities()))

    async def go(self, victim: str, tactic: "Tactic") -> None:
        """Try it once, with the next identity."""
        identity, name = next(self.faces), tactic.__name__
        self.begun[name] += 1
        with trio.move_on_after(HOLD_S), suppress(*LOST):
            async with bare_connection(victim, identity, self.source) as bare:
                self.connected[name] += 1
                try:
                    await tactic(self, bare, identity)
                    await bare.drain()
                finally:
                    self.note(*map(bytes, bare.heard.values()))

    async def half_made(self, victim: str) -> None:
        """A handshake that ends somewhere on its way."""
        self.begun["half_made"] += 1
        with trio.move_on_after(HOLD_S), suppress(*LOST):
            async with await dial(victim, self.source) as tcp:
                match self.begun["half_made"] % 4:
                    case 1:
                        await tcp.send_all(said(MULTISTREAM)[:-3])
                    case 2:
                        await agree_on(tcp, TLS)
                    case 3:
                        await agree_on(tcp, TLS)
                        await tcp.send_all(b"\x16\x03\x01\x40\x00\x01" + self.chance.randbytes(500))
                while data := await tcp.receive_some():
                    self.note(data)

    def note(self, *told: bytes) -> None:
        if self.keeps_notes:
            self.notes += told


Tactic = Callable[[Besieger, Bare, Identity], Awaitable[None]]


# --- tactics --------------------------------------------------------------------------------------
async def stay(attack: Besieger, bare: Bare, identity: Identity) -> None:
    """Keep a connection for nothing."""


async def leave_streams(attack: Besieger, bare: Bare, identity: Identity) -> None:
    """Streams that have named their protocol, or not even that, and say no more."""
    for protocol in (*OURS, *LIBP2P, "/none/1"):
        await bare.open_streams(3, asked(protocol))
    await bare.open_streams(3, said(MULTISTREAM)[:-1])


async def talk_garbage(attack: Besieger, bare: Bare, identity: Identity) -> None:
    protocols = OURS if attack.keeps_notes else [attack.chance.choice(OURS)]
    for protocol, data in itertools.product(protocols, missiles().values()):
        await bare.open_streams(1, asked(protocol, data))


async def greet(attack: Besieger, bare: Bare, identity: Identity) -> None:
    """A hello that might be a member's; then a member that says nothing."""
    await bare.open_streams(1, asked(HELLO, framed(hello(run_id=attack.run_id))))
    for protocol in LIBP2P:
        await bare.open_streams(1, asked(protocol))


async def question(attack: Besieger, bare: Bare, identity: Identity) -> None:
    """Ask the directory for places, and have it keep records, ours and right."""
    name = Group(attack.run_id).digest if attack.run_id else "?"
    for key in (*record_keys(name), attack.chance.randbytes(32)):
        record = PeerRecord(identity.peer_id, 1, ("/ip4/8.8.8.8/tcp/1",), wall_time_s() + 600)
        value = encode_record(record, key, identity.sign)
        for message in (FindRecords(place_of(key)), KeepRecord(place_of(key), value)):
            await bare.open_streams(1, asked(DIRECTORY, framed(message)))


async def say_too_much(attack: Besieger, bare: Bare, identity: Identity) -> None:
    """Frames beyond every bound: ours, multistream's, at last yamux's."""
    huge = bytes(4 * MAX_HEADER_BYTES)
    too_long = b"loc\1" + b"\xff" * 12 + huge[:MAX_HEADER_BYTES]
    for protocol in OURS:
        await bare.open_streams(1, asked(protocol, too_long))
    await bare.open_streams(4, b"\xff" * 9 + b"\1" + huge[:1000])
    await bare.send(frame(1001, SYN, huge) + b"\0\0\0\0\0\0\0\1\xff\xff\xff\xff" + huge)


async def read_nothing(attack: Besieger, bare: Bare, identity: Identity) -> None:
    """Ask for what is long, again and again, and leave it unread."""
    group = Group(attack.run_id).digest if attack.run_id else "0" * 32
    for _ in range(INBOUND_STREAMS.per_peer // 2):
        says = framed(GetSpec()) + framed(GetState(group, 0))
        await bare.open_streams(1, asked(CONTENT, says))
    await bare.open_streams(1, asked(HELLO, framed(hello(run_id=attack.run_id))))
    if not attack.keeps_notes:
        await trio.sleep_forever()


TACTICS: Final[dict[Tactic, float]] = {
    stay: 0.75,
    leave_streams: 0.15,
    talk_garbage: 0.1,
    greet: 0.25,
    question: 0.15,
    say_too_much: 0.0625,
    read_nothing: 0.125,
}
"""How often a second each is begun, at each victim. At twice the pace three peers spent 0.3 of a
processor on it, and the besieger its own share: two processors that do nothing but train did that
1.27 times more slowly."""
HALF_MADE_PER_S: Final = 1.5


async def at_pace(per_s: float, begin: Callable[[], Awaitable[None]]) -> None:
    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(begin)
            await trio.sleep(1 / per_s)


async def besiege(attack: Besieger, victims: Sequence[str], seconds: float) -> None:
    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for victim in victims:
                nursery.start_soon(at_pace, HALF_MADE_PER_S, partial(attack.half_made, victim))
                for tactic, per_s in TACTICS.items():
                    nursery.start_soon(at_pace, per_s, partial(attack.go, victim, tactic))


def main() -> None:
    os.nice(NICENESS)
    source, seconds, run_id, notes, *victims = sys.argv[1:]
    attack = Besieger(source, None if run_id == "-" else run_id, notes != "-")
    trio.run(besiege, attack, victims, float(seconds))
    if attack.keeps_notes:
        Path(notes).write_bytes(b"\n\n".join(attack.notes))
    print(json.dumps({"begun": attack.begun, "connected": attack.connected}))


if __name__ == "__main__":
    main()
