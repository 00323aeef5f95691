"""Two groups in one run: the same links, directory and clock, and no average across."""

from typing import Any, Final

import pytest
import trio
from existing import existing
from streaming_worlds import assert_equal, contributors, fragment_spec, returned
from swarm_worlds import (
    final_outcomes,
    outcomes,
    partners,
    simulated,
    start,
    toy_spec,
    weights_bytes,
)

from peer.daemon.links import Links
from peer.facts import PeerState
from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from protocol.errors import Refused
from protocol.gossip.exchange import exchange_id
from protocol.membership.group import Group
from protocol.membership.records import record_keys
from protocol.outcomes import RefusalReason
from protocol.wire.content_messages import GetState
from protocol.wire.fields import Message
from protocol.wire.fragment_messages import Contribution, GetChunkState, GetStamps, NoResult
from protocol.wire.messages import AskSettled, PeerList, Propose, SettledOutcome, SettledReply
from protocol.wire.versions import CONTENT, FRAGMENT, GOSSIP
from simulation.machine import Machine
from simulation.swarm import SimulatedPeer, SimulatedSwarm, SwarmOptions, open_swarm

pytestmark = pytest.mark.slow

ROUNDS = 4
STAGES: Final = ("stage/0", "stage/1")
SIZES: Final = {"stage/0": 256, "stage/1": 512}
MACHINES: Final = {
    "a0": Machine(part="stage/0"),
    "b0": Machine(part="stage/1", begins_group=True),
    "a1": Machine(part="stage/0"),
    "b1": Machine(part="stage/1"),
    "a2": Machine(part="stage/0"),
    "b2": Machine(part="stage/1"),
}
"""Three hold the first stage, three the second; `a0` founds the run."""


async def start_stages(swarm: SimulatedSwarm, *names: str) -> None:
    await start(swarm, *(names or MACHINES), machine_of=MACHINES)


def holders(swarm: SimulatedSwarm, part: str) -> list[SimulatedPeer]:
    return [peer for peer in swarm.peers.values() if peer.machine.part == part]


def ids(peers: Any) -> set[str]:
    """Peer ids of peers, or of members of a view."""
    return {peer.peer_id for peer in peers}


def group_of(swarm: SimulatedSwarm, part: str) -> str:
    run_id = swarm["a0"].facts.run_id
    assert run_id is not None
    return Group(run_id, part).digest


def assert_nobody_was_refused(swarm: SimulatedSwarm) -> None:
    """No message of a peer that keeps to the rules goes to another group."""
    assert all(not peer.facts.refused[RefusalReason.OTHER_GROUP] for peer in swarm.peers.values())


@pytest.mark.parametrize("second", [512, 256], ids=["other layout", "same layout"])
def test_peers_average_inside_their_group_alone(tmp_path, second):
    @simulated()
    async def run() -> None:
        options = SwarmOptions(parts=SIZES | {"stage/1": second})
        async with open_swarm(1, toy_spec(ROUNDS), tmp_path, options) as swarm:
            await start_stages(swarm)
            await swarm.finished()
            for part in STAGES:
                peers = holders(swarm, part)
                for peer in peers:
                    assert "averaged" in outcomes(peer)
                    assert set(partners(peer).values()) <= ids(peers) - {peer.peer_id}
                    assert peer.slow_weights().size == options.parts[part]
                    assert set(final_outcomes(peer)) == {"averaged"}
                    assert peer.facts.state is PeerState.FINISHED
                    assert existing(peer.facts.validation_loss) < 1.5
            assert_nobody_was_refused(swarm)

    run()


@simulated()
async def test_fragments_are_averaged_inside_their_group_alone(tmp_path):
    options = SwarmOptions(parts={"stage/0": 3 * 16384, "stage/1": 2 * 16384})
    async with open_swarm(1, fragment_spec(4), tmp_path, options) as swarm:
        await start_stages(swarm)
        await swarm.finished()
        for part in STAGES:
            peers = holders(swarm, part)
            assert_equal(*peers)
            for peer in peers:
                assert peer.slow_weights().size == options.parts[part]
                assert contributors(peer)[3] > len(returned(peer)) / 2
                assert max(contributors(peer)) == 3
        assert_nobody_was_refused(swarm)


@simulated()
async def test_a_view_lists_its_group_and_the_links_are_the_runs(tmp_path):
    async with open_swarm(1, toy_spec(60), tmp_path, SwarmOptions(parts=SIZES)) as swarm:
        await start_stages(swarm, "a0", "b0", "a1", "b1")
        everybody = ids(swarm.peers.values())
        await swarm.until(lambda: all(peer.links.num_live == 3 for peer in swarm.peers.values()))
        await trio.sleep(2.0)  # a beat tells what the first hello could not
        now_s = trio.current_time()
        for part in STAGES:
            for peer in holders(swarm, part):
                own = {peer.peer_id}
                assert ids(peer.roster.alive(now_s)) == everybody - own
                assert ids(peer.view.alive(now_s)) == ids(holders(swarm, part)) - own
                assert ids(peer.view.members_training(now_s)) == ids(holders(swarm, part)) - own
                (entered,) = peer.events(EventName.GROUP_ENTERED)
                assert (entered["part"], entered["group"]) == (part, group_of(swarm, part))
                assert entered["padded_parameters"] == SIZES[part]
                assert (peer.status().part, peer.facts.group) == (part, group_of(swarm, part))


@simulated()
async def test_a_record_stands_under_its_group(tmp_path):
    async with open_swarm(1, toy_spec(60), tmp_path, SwarmOptions(parts=SIZES)) as swarm:
        await start_stages(swarm, "a0", "b0", "a1")
        await trio.sleep(5.0)
        for part in STAGES:
            found = set()
            for key in record_keys(group_of(swarm, part)):
                found |= set(await swarm["a0"].directory.get(key))
            assert found == ids(holders(swarm, part))


@simulated()
async def test_a_joiner_takes_the_state_of_its_own_group(tmp_path):
    async with open_swarm(1, toy_spec(60), tmp_path, SwarmOptions(parts=SIZES)) as swarm:
        await start_stages(swarm, "a0", "b0", "a1", "b1")
        for joiner, source in (("a1", "a0"), ("b1", "b0")):
            (received,) = swarm[joiner].events(EventName.STATE_RECEIVED)
            assert received["remotes"] == [swarm[source].peer_id]
            assert received["bytes"] == weights_bytes(SIZES[MACHINES[joiner].part])
        for first in ("a0", "b0"):
            assert swarm[first].events(EventName.STATE_RECEIVED) == []
        assert_nobody_was_refused(swarm)


@simulated()
async def test_a_joiner_waits_for_somebody_who_holds_its_part(tmp_path):
    async with open_swarm(1, toy_spec(60), tmp_path, SwarmOptions(parts=SIZES)) as swarm:
        await start_stages(swarm, "a0")
        early = swarm.join("b1", MACHINES["b1"])
        await trio.sleep(30.0)
        assert (early.ready.is_set(), early.failure) == (False, None)
        assert early.status().state is PeerState.DOWNLOADING
        assert early.status().doing == "waiting for a peer that could help"
        swarm.join("b0", MACHINES["b0"])
        await swarm.until(early.ready.is_set)
        (received,) = early.events(EventName.STATE_RECEIVED)
        assert received["remotes"] == [swarm["b0"].peer_id]


@simulated()
async def test_a_joiner_finds_its_group_in_the_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(Links, "_peer_list", lambda _: PeerList(()))  # nobody introduces anybody
    async with open_swarm(1, toy_spec(60), tmp_path, SwarmOptions(parts=SIZES)) as swarm:
        await start_stages(swarm, "a0", "b0")
        joiner = swarm.join("b1", MACHINES["b1"])
        with trio.fail_after(60.0):
            await joiner.ready.wait()
        assert ids(joiner.view.alive(trio.current_time())) == {swarm["b0"].peer_id}


@simulated()
async def test_alone_in_its_group_a_peer_trains_alone(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path, SwarmOptions(parts=SIZES)) as swarm:
        await start_stages(swarm, "a0", "b0", "a1")
        await swarm.finished()
        assert outcomes(swarm["b0"]) == ["no_partner"] * (ROUNDS + 1)
        assert "averaged" in outcomes(swarm["a0"])


# --- what crosses groups --------------------------------------------------------------------------
async def refused(
    swarm: SimulatedSwarm,
    protocol: str,
    message: Message,
    reason: RefusalReason = RefusalReason.OTHER_GROUP,
) -> str:
    """Say something to `b0` as `a0` would; returns the sentence with which it is refused."""
    a, b = swarm["a0"], swarm["b0"]
    before = b.facts.refused[reason]
    async with Conversation(await a.network.open_stream(b.peer_id, protocol)) as talk:
        await talk.send(message)
        with pytest.raises(Refused) as refusal:
            await talk.receive(SettledReply)
    assert refusal.value.reason is reason
    assert b.facts.refused[reason] == before + 1
    return refusal.value.sentence


@simulated()
async def test_a_proposal_that_crosses_groups_is_refused_and_counted(tmp_path):
    options = SwarmOptions(parts={"stage/0": 256, "stage/1": 256})  # their vectors would fit
    async with open_swarm(1, toy_spec(60), tmp_path, options) as swarm:
        await start_stages(swarm, "a0", "b0")
        a, b = swarm["a0"], swarm["b0"]
        ours, theirs = (group_of(swarm, part) for part in STAGES)
        layout = existing(a.facts.layout_digest)
        assert layout == b.facts.layout_digest
        proposal = Propose(ours, b.facts.round, b.facts.step, False, layout, "int8", 1, 20, 20)
        sentence = await refused(swarm, GOSSIP, proposal)
        assert ours in sentence
        assert theirs in sentence
        await refused(swarm, CONTENT, GetState(ours, 0))
        async with Conversation(await a.network.open_stream(b.peer_id, GOSSIP)) as talk:
            await talk.send(AskSettled(exchange_id(ours, (a.peer_id, 0), (b.peer_id, 0))))
            answer, _ = await talk.receive(SettledReply)
            assert answer.outcome is SettledOutcome.UNKNOWN
        assert b.facts.refused[RefusalReason.OTHER_GROUP] == 2
        assert set(outcomes(b)) <= {"no_partner"}


@simulated()
async def test_fragments_that_cross_groups_are_refused_and_counted(tmp_path):
    async with open_swarm(1, fragment_spec(60), tmp_path, SwarmOptions(parts=SIZES)) as swarm:
        await start_stages(swarm, "a0", "b0")
        await swarm.until(lambda: bool(returned(swarm["b0"])))  # it serves fragments
        ours, fragment = group_of(swarm, "stage/0"), 0
        for message in (
            Contribution(ours, fragment, swarm["b0"].facts.round, 1, 20, 20, (), (), (), bytes(64)),
            NoResult(ours, fragment, 0),
            GetStamps(ours, fragment),
            GetChunkState(ours, fragment, 0),
        ):
            await refused(swarm, FRAGMENT, message, RefusalReason.NOT_LINKED)
        await refused(swarm, CONTENT, GetState(ours, 0))
