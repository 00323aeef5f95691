"""Peers that train are attacked: by a member, and by somebody who needs no p2pd.

The member says all that the wire schema allows, and nearly so. It attacks in bursts, with calm
between them, so that what else the machine does is in both alike: rounds of bursts and of calm are
then compared. Each burst is by another identity, for one that lies is soon ignored. In the last
burst a newcomer joins. The short form has a dozen rounds of each kind, whose medians differ by half
where other work comes and goes; so it finds a peer that waits for the liar, and the long form what
a liar costs.

The besieger (besieger.py) has hundreds of identities at one address of the open internet, so peers
are in a network namespace in which there is one. Its niceness and paces leave the processors to the
peers. What they do in a part of the siege is compared with what they do in as much calm, half of it
before and half afterwards; in the rest of the siege a newcomer joins. The short form of a siege
finds what breaks at once.
"""

import json
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import besieger
import psutil
import pytest
import trio
from hostile_member import SERVED, attacking, new_member
from swarm import (
    NUM_ROUNDS_ALONE,
    START_S,
    Event,
    Peer,
    Swarm,
    all_averaging,
    ending,
    nothing_broke,
    open_swarm,
    wait_until,
)
from test_private_run import PRIVATE

from bench.fuzzing.shots import kinds_of
from bench.namespaces import in_namespace, open_namespaces, run, why_none
from peer.observe.event_names import EventName
from protocol.address.multiaddr import split_peer_id, to_bytes
from protocol.address.peer_id import KEY_PROTOBUF_PREFIX, peer_id_from_public_key

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

BURSTS = 3
NUM_ROUNDS = 3
"""Rounds that each peer closes at least, in each burst and each calm."""
PART_WITH_NEWCOMER = 0.4
"""Of the time."""
TYPES = {kind.__name__ for protocol in SERVED for kind in kinds_of(protocol)}
TYPES_FIRED = 30
"""So many of the 37 TYPES of six conversations must have gone out at least."""


def lives(peers: Sequence[Peer]) -> list[tuple[object, ...]]:
    """Processes and incarnations."""
    return [
        (
            peer.process.pid,
            peer.trainer().pid,
            peer.p2pd().pid,
            *(event["incarnation"] for event in peer.events(EventName.DAEMON_STARTED)),
        )
        for peer in peers
    ]


async def rounds_in(peers: Sequence[Peer], seconds: float) -> list[float]:
    """Lengths of the rounds that begin and end within so long, or longer: each peer has some."""
    before = {peer: len(closed(peer)) for peer in peers}
    await trio.sleep(seconds)
    await trio.to_thread.run_sync(
        wait_until,
        lambda: all(len(closed(peer)) - before[peer] >= NUM_ROUNDS for peer in peers),
        f"{NUM_ROUNDS} rounds",
    )
    return [
        later["monotonic_s"] - earlier["monotonic_s"]
        for peer in peers
        for earlier, later in pairwise(closed(peer)[before[peer] :])
    ]


def closed(peer: Peer) -> list[Event]:
    return peer.events(EventName.ROUND_CLOSED)


@pytest.mark.long
@pytest.mark.parametrize(("attack_s", "longer"), [(15.0, 2.0), (60.0, 1.2)])
async def test_a_hostile_member_costs_the_others_little_and_a_newcomer_joins(
    swarm: Swarm, tmp_path_factory: pytest.TempPathFactory, attack_s: float, longer: float
) -> None:
    peers = swarm.at_least(2)
    seen, before = {peer: len(peer.events()) for peer in peers}, lives(peers)
    liars = [await new_member(tmp_path_factory.mktemp("raw"), peers) for _ in range(BURSTS + 1)]
    burst_s = attack_s * (1 - PART_WITH_NEWCOMER) / BURSTS
    calm, attacked, fired = list[float](), list[float](), Counter[str]()
    for liar in liars[:BURSTS]:
        calm += await rounds_in(peers, burst_s)
        async with attacking(liar, peers) as hostile:
            attacked += await rounds_in(peers, burst_s)
        fired += hostile.fired
    async with attacking(liars[-1], peers) as hostile:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, attack_s * PART_WITH_NEWCOMER)
            newcomer = swarm.join(peers[1])
            with ending(newcomer):
                await trio.to_thread.run_sync(newcomer.wait_averaging)
                await trio.to_thread.run_sync(all_averaging, peers)
                nothing_broke(peers, seen, *(liar.peer_id for liar in liars))
        fired += hostile.fired
    ratio = statistics.median(attacked) / statistics.median(calm)
    print(f"median round {ratio:.2f} times as long, {fired.total()} messages")
    assert lives(peers) == before
    assert len(TYPES & fired.keys()) >= TYPES_FIRED
    assert ratio <= longer


# --- a besieger -----------------------------------------------------------------------------------
NO_NAMESPACES = why_none(["ip"])
in_a_namespace = pytest.mark.skipif(NO_NAMESPACES is not None, reason=NO_NAMESPACES or "")
SOURCE = "8.8.8.8"
HOSTS = ("9.9.1.1", "9.9.2.1", "9.9.3.1", "9.9.4.1")
OUTSIDER_S = 30.0
SAMPLE_S = 1.0
MOST_GROWTH = 1.5
"""Of the memory of a process, in a siege."""


@contextmanager
def machine_of_peers() -> Iterator[list[str]]:
    """The start of commands for a namespace with the addresses of HOSTS, and SOURCE."""
    with open_namespaces() as namespaces:
        name = f"{namespaces.prefix}-siege"
        namespaces.add(name)
        for address in (SOURCE, *HOSTS):
            run("ip", "-netns", name, "address", "add", f"{address}/32", "dev", "lo")
        yield in_namespace(name, [])


def at(inside: list[str], host: int) -> dict[str, Any]:
    """Where a peer runs and listens."""
    return {"prefix": inside, "listen": f"{HOSTS[host]}:0"}


@contextmanager
def besieged(
    inside: list[str],
    victims: Sequence[Peer],
    seconds: float,
    run_id: str = "-",
    notes: str = "-",
) -> Iterator["subprocess.Popen[str]"]:
    program = [sys.executable, besieger.__file__, SOURCE, str(seconds), run_id, notes]
    command = [*inside, *program, *(victim.address for victim in victims)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


class Watched:
    """What some peers do, and how large they become."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers
        self._processes = {
            f"{peer.name} {name}": process
            for peer in peers
            for name, process in (
                ("daemon", psutil.Process(peer.process.pid)),
                ("p2pd", peer.p2pd()),
            )
        }
        self.most_bytes = Counter[str]()

    def watch(self, seconds: float) -> Counter[str]:
        """For so long. How often each event came, and how long the processes ran."""
        before, until_s = self._counts(), time.monotonic() + seconds
        while time.monotonic() < until_s:
            for name, process in self._processes.items():
                self.most_bytes[name] = max(self.most_bytes[name], process.memory_info().rss)
            time.sleep(SAMPLE_S)
        return self._counts() - before

    def _counts(self) -> Counter[str]:
        counts = Counter(event["event"] for peer in self._peers for event in peer.events())
        ran_s = sum(sum(process.cpu_times()[:2]) for process in self._processes.values())
        return counts + Counter(processor_s=round(ran_s))


@pytest.mark.long
@in_a_namespace
@pytest.mark.parametrize(("siege_s", "slower"), [(50.0, 2.0), (300.0, 1.2)])
def test_hundreds_from_one_address_cost_the_others_little_and_a_newcomer_joins(
    tmp_path: Path, siege_s: float, slower: float
) -> None:
    with machine_of_peers() as inside, open_swarm(tmp_path) as swarm:
        founder = swarm.found(NUM_ROUNDS_ALONE, **at(inside, 0))
        peers = [founder, *(swarm.join(founder, **at(inside, host)) for host in (1, 2))]
        all_averaging(peers, NUM_ROUNDS)
        seen, before = {peer: len(peer.events()) for peer in peers}, lives(peers)
        strangers = [identity.peer_id for identity in besieger.identities()]
        part_s = siege_s * (1 - PART_WITH_NEWCOMER)
        calm, attacked = Watched(peers), Watched(peers)
        in_calm = calm.watch(part_s / 2)
        with besieged(inside, peers, siege_s, founder.status()["run_id"]) as siege:
            in_siege = attacked.watch(part_s)
            with ending(swarm.join(peers[1], **at(inside, 3))) as newcomer:
                newcomer.wait_averaging()
                assert siege.poll() is None, "it joined in the siege"
                while siege.poll() is None:
                    attacked.watch(SAMPLE_S)
                all_averaging(peers)
                nothing_broke(peers, seen, *strangers)
            assert siege.stdout is not None
            tried = json.loads(siege.stdout.read())
        growth = {name: attacked.most_bytes[name] / most for name, most in calm.most_bytes.items()}
        in_calm += calm.watch(part_s / 2)
        for did in (in_calm, in_siege):
            print({name: did[name] for name in ("processor_s", "RoundClosed", "RoundAveraged")})
        print({name: f"{calm.most_bytes[name] >> 20} MiB x {growth[name]:.2f}" for name in growth})
        print(tried)
        assert lives(peers) == before
        for tactic in besieger.TACTICS:
            assert tried["connected"][tactic.__name__] > tried["begun"][tactic.__name__] / 2
        assert max(growth.values()) < MOST_GROWTH
        assert in_siege["RoundClosed"] * slower >= in_calm["RoundClosed"]


@pytest.mark.long
@in_a_namespace
def test_an_outsider_of_a_private_run_learns_whom_it_dialled_and_nothing_else(
    tmp_path: Path,
) -> None:
    with machine_of_peers() as inside, open_swarm(tmp_path, PRIVATE) as swarm:
        founder = swarm.found(**at(inside, 0))
        line = swarm.loco("invite", "--home", str(founder.home.root), "--uses", "2").stdout
        invited = swarm.environment | dict([line.split()[0].split("=", 1)])
        guests = [swarm.join(founder, environment=invited, **at(inside, host)) for host in (1, 2)]
        members = [founder, *guests]
        all_averaging(members)
        run_id = founder.status()["run_id"]
        strangers = {identity.peer_id for identity in besieger.identities()}
        for dialled in (founder, guests[0]):
            notes = tmp_path / "notes"
            with besieged(inside, [dialled], OUTSIDER_S, notes=str(notes)) as siege:
                assert siege.wait(OUTSIDER_S + START_S) == 0
            told = notes.read_bytes()
            assert ids_in(told) - strangers == {dialled.peer_id}
            for member in members:
                assert any(mark in told for mark in listens_at(member)) == (member is dialled)
            assert run_id.encode() not in told
            assert bytes.fromhex(run_id) not in told


def ids_in(told: bytes) -> set[str]:
    """All peer ids, as text or as bytes."""
    texts = re.findall(rb"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}", told)
    keys = re.findall(re.escape(KEY_PROTOBUF_PREFIX) + rb"(.{32})", told, re.DOTALL)
    return {text.decode() for text in texts} | set(map(peer_id_from_public_key, keys))


def listens_at(peer: Peer) -> tuple[bytes, bytes]:
    """Where others reach it, as libp2p says that and as people do."""
    address, _ = split_peer_id(peer.address)
    return to_bytes(address), address.encode()
