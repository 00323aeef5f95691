"""Peers whose users let them follow go over to the run that the founder names; others stay."""

from dataclasses import replace

import pytest
import trio
from swarm_worlds import HOUR_S, simulated, start, toy_spec

from peer.daemon.control_requests import ControlRequests
from peer.facts import PeerState
from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from peer.process.rejoin import JoinAgain
from peer.runtime import Stream
from peer.state.kept_files import AdmissionFile
from protocol.address.multiaddr import split_peer_id
from protocol.admission.statements import Successor, is_successor
from protocol.errors import LocoError, RemoteProtocolError
from protocol.outcomes import RefusalReason
from protocol.wire.messages import Hello, Refusal, Statements
from protocol.wire.versions import HELLO
from simulation.machine import Machine
from simulation.swarm import SimulatedPeer, identity_of, open_swarm

pytestmark = pytest.mark.slow
NEXT, OTHER = "cd" * 16, "ef" * 16
ADDRESS = f"/ip4/203.0.113.5/tcp/31337/p2p/{identity_of(1, 'next').peer_id}"
FOLLOWER = Machine(follows=True)


async def name_successor(peer: SimulatedPeer, run_id: str = NEXT) -> None:
    requests = ControlRequests(peer.peer)
    await requests.name_successor({"run_id": run_id, "address": ADDRESS})


def followed(peer: SimulatedPeer) -> str | None:
    """The run that it has ended for."""
    if not peer.ended.is_set():
        return None
    assert isinstance(peer.failure, JoinAgain), peer.failure
    assert peer.failure.successor is not None
    return peer.failure.successor.run_id


@simulated()
async def test_a_follower_goes_when_its_run_is_over_and_nobody_else_does(tmp_path) -> None:
    async with open_swarm(1, toy_spec(rounds=6), tmp_path) as swarm:
        ends = Machine(exit_when_done=True)
        machines = {"b": FOLLOWER, "d": ends, "e": replace(ends, follows=True)}
        await start(swarm, *"abcde", machine_of=machines)
        await name_successor(swarm["a"])
        await swarm.until(lambda: all(swarm[name].facts.successor for name in "abcde"))
        assert not any(swarm[name].ended.is_set() for name in "abcde")
        await swarm.until(lambda: all(swarm[name].ended.is_set() for name in "bde"))
        assert followed(swarm["b"]) == followed(swarm["e"]) == NEXT
        assert swarm["b"].events(EventName.RUN_FINISHED), "not before"
        assert swarm["d"].failure is None
        await trio.sleep(60)
        assert not any(swarm[name].ended.is_set() for name in "ac")
        assert all(swarm[name].facts.state is PeerState.FINISHED for name in "ac")
        left = [each["remote"] for each in swarm["c"].events(EventName.PEER_LEFT)]
        assert swarm["b"].peer_id in left, "it has said so"
        told = swarm["c"].status().successor
        assert told == {"run_id": NEXT, "address": ADDRESS}


@simulated()
async def test_a_run_that_has_ended_can_still_be_followed(tmp_path) -> None:
    async with open_swarm(1, toy_spec(rounds=3), tmp_path) as swarm:
        await start(swarm, "a", "b", machine_of={"b": FOLLOWER})
        await swarm.until(lambda: swarm["b"].facts.state is PeerState.FINISHED)
        await trio.sleep(30)
        assert not swarm["b"].ended.is_set()
        await name_successor(swarm["a"])
        await swarm.until(swarm["b"].ended.is_set)
        assert followed(swarm["b"]) == NEXT


@simulated()
async def test_who_has_followed_is_missed_by_nobody(tmp_path) -> None:
    asked: list[float] = []

    async def refuse(stream: Stream) -> None:
        asked.append(trio.current_time())
        talk = Conversation(stream)
        await talk.receive(Hello)
        await talk.send(Refusal(RefusalReason.OTHER_RUN, "this swarm trains another run"))

    async with open_swarm(1, toy_spec(rounds=3), tmp_path) as swarm:
        await start(swarm, "a", "b", machine_of={"b": FOLLOWER})
        await name_successor(swarm["a"])
        await swarm.until(swarm["b"].ended.is_set)
        where, _ = split_peer_id(swarm["b"].network.addresses[0])
        async with swarm.internet.open_network(swarm["b"].peer_id, where) as network:
            await network.serve(HELLO, refuse)
            await trio.sleep(HOUR_S / 6)
        assert asked, "it was still known"
        assert trio.current_time() - asked[-1] > HOUR_S / 12, "and is left alone then"
        assert "refused" not in [each.name for each in swarm["a"].status().problems]


@simulated()
async def test_who_comes_later_hears_of_it_from_any_member_and_the_founder_may_correct_it(
    tmp_path,
) -> None:
    async with open_swarm(1, toy_spec(rounds=40), tmp_path) as swarm:
        await start(swarm, "a", "b")
        await name_successor(swarm["a"])
        await name_successor(swarm["a"], OTHER)
        await swarm.until(
            lambda: (kept := swarm["b"].facts.successor) is not None and kept.version == 2
        )
        swarm.kill("a")
        swarm.join("c", through=["b"])
        await trio.sleep(1)
        await swarm["c"].known.wait()
        await swarm.until(lambda: swarm["c"].facts.successor is not None)
        assert swarm["c"].facts.successor == swarm["b"].facts.successor
        kept = AdmissionFile(swarm["c"].folder / "admission").read()
        assert [each for each in kept.statements if is_successor(each)], "it outlives a restart"


@simulated()
async def test_the_word_of_anybody_else_is_none(tmp_path) -> None:
    async with open_swarm(1, toy_spec(rounds=40), tmp_path) as swarm:
        await start(swarm, "a", "b")
        with pytest.raises(LocoError, match="founder's key"):
            await name_successor(swarm["b"])
        own, run_id = identity_of(1, "b"), swarm["a"].facts.run_id
        assert run_id is not None
        forged = Successor.made(run_id, 1, NEXT, ADDRESS, own.public_key, own.sign).sealed
        for message in (Statements((), None, forged), Statements((forged,))):
            with pytest.raises(RemoteProtocolError, match="founder has not named"):
                swarm["a"].parts.admission.heard(message)
        assert swarm["a"].facts.successor is None


@simulated()
async def test_peers_of_an_earlier_version_find_nothing_unknown_among_the_statements(
    tmp_path,
) -> None:
    """They refuse, and blame, a kind of statement that they do not know."""
    async with open_swarm(1, toy_spec(rounds=40), tmp_path) as swarm:
        await start(swarm, "a", "b")
        await name_successor(swarm["a"])
        told = swarm["a"].parts.admission.all_told()
        assert [is_successor(each.successor) for each in told if each.successor] == [True]
        assert not any(is_successor(each) for message in told for each in message.statements)
