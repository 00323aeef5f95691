"""What `ban`, `admit`, `delegate` and `invite` get from the daemon of their home."""

import pytest
from swarm_worlds import simulated, start, toy_spec

from peer.daemon.control_requests import ControlRequests, named_peer
from protocol.errors import LocoError
from protocol.names import short_id
from simulation.swarm import SimulatedPeer, identity_of, open_swarm

ONE, OTHER = "12D3KooWAAAABBBB", "12D3KooWCCCCBBBB"


def requests(peer: SimulatedPeer) -> ControlRequests:
    return ControlRequests(peer.peer)


def test_the_end_of_an_id_is_enough_where_one_peer_is_meant() -> None:
    assert named_peer("ABBBB", {ONE, OTHER}) == ONE
    with pytest.raises(LocoError, match="2 peers have ids that end in BBBB") as unclear:
        named_peer("BBBB", {ONE, OTHER})
    assert f"{ONE}, {OTHER}" in str(unclear.value)
    with pytest.raises(LocoError, match="no peer is known here whose id ends in ZZZZ") as unknown:
        named_peer("ZZZZ", {ONE, OTHER})
    assert "status --verbose" in str(unknown.value)
    whole = identity_of(1, "elsewhere").peer_id
    assert named_peer(whole, set()) == whole


@simulated()
async def test_peers_are_ruled_on_by_the_ids_that_status_shows(tmp_path) -> None:
    async with open_swarm(1, toy_spec(rounds=30), tmp_path) as swarm:
        await start(swarm, "a", "b")
        short, whole = short_id(swarm["b"].peer_id), {"peer": swarm["b"].peer_id}
        asked = requests(swarm["a"])
        assert await asked.rule({"verdict": "ban", "peer": short}) == whole
        await swarm.until(swarm["b"].ended.is_set)
        swarm["a"].roster.forget(swarm["b"].peer_id)
        assert await asked.rule({"verdict": "admit", "peer": short}) == whole, "it is not here"


@simulated()
async def test_who_may_not_rule_is_told_who_may(tmp_path) -> None:
    async with open_swarm(1, toy_spec(rounds=30), tmp_path) as swarm:
        await start(swarm, "a", "b")
        with pytest.raises(LocoError, match="no founder.key") as refused:
            await requests(swarm["b"]).rule({"verdict": "ban", "peer": swarm["a"].peer_id})
        assert f"loco-peer delegate {swarm['b'].peer_id}" in str(refused.value)
        with pytest.raises(LocoError, match="its home has founder.key") as refused:
            swarm["b"].parts.admission.founder()
        assert "delegate" not in str(refused.value), "a delegate cannot amend either"


@simulated()
async def test_a_ruling_that_would_count_for_nothing_is_not_signed(tmp_path) -> None:
    async with open_swarm(1, toy_spec(rounds=30), tmp_path) as swarm:
        await start(swarm, "a", "b")
        elsewhere = identity_of(1, "elsewhere").peer_id
        for verdict, peer_id in (("delegate", swarm["b"].peer_id), ("admit", elsewhere)):
            await requests(swarm["a"]).rule({"verdict": verdict, "peer": peer_id})
        door = swarm["b"].parts.admission
        await swarm.until(lambda: elsewhere in door.known_peers)
        held = door.all_told()
        with pytest.raises(LocoError, match="only the founder may ban this peer"):
            await requests(swarm["b"]).rule({"verdict": "ban", "peer": elsewhere})
        assert door.all_told() == held


@simulated()
async def test_nobody_bans_itself(tmp_path) -> None:
    async with open_swarm(1, toy_spec(rounds=30), tmp_path) as swarm:
        await start(swarm, "a", "b")
        with pytest.raises(LocoError, match="this peer itself; to end it: loco-peer leave"):
            await requests(swarm["a"]).rule({"verdict": "ban", "peer": swarm["a"].peer_id})
        with pytest.raises(LocoError, match="no founder.key"):
            await requests(swarm["b"]).rule({"verdict": "ban", "peer": swarm["b"].peer_id})
        assert not swarm["a"].ended.is_set()
