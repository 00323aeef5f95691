"""What some peers do in the middle of a round leaves the round of the others as it is."""

from collections import defaultdict

import pytest
from swarm_worlds import outcomes, simulated, start, toy_spec

from peer.observe.event_names import EventName
from peer.rounds.shares import DataShares
from simulation.network import LinkModel
from simulation.swarm import SwarmOptions, open_swarm

pytestmark = pytest.mark.slow

SEED = 1
LONG_EXCHANGES = SwarmOptions(
    padded_parameters=68 * 1024, link=LinkModel(0.02, bandwidth_bytes_per_s=1e5)
)
"""An exchange takes about a second."""


def test_a_join_in_mid_round_changes_no_share_of_that_round(tmp_path, monkeypatch):
    shares = defaultdict[str, list[set[str]]](list)
    now = DataShares.now

    def noted(self, training, trusted):
        found = now(self, training, trusted)
        shares[self._facts.peer_id].append({peer for peer, _ in found})
        return found

    monkeypatch.setattr(DataShares, "now", noted)

    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, toy_spec(12, inner_steps=100), tmp_path) as swarm:
            await start(swarm, *"ab")
            a, b = swarm["a"], swarm["b"]
            await swarm.until(lambda: a.facts.round == b.facts.round == 3)
            swarm.join("c")
            await swarm.until(swarm["c"].ready.is_set)
            both, c = {a.peer_id, b.peer_id}, swarm["c"].peer_id
            given = {peer.peer_id: len(shares[peer.peer_id]) for peer in (a, b)}
            assert {a.facts.round, b.facts.round} == {3}, "it came before the round was over"
            await swarm.until(lambda: min(a.facts.round, b.facts.round) > 5)
            for peer_id, number in given.items():
                assert shares[peer_id][number - 1 : number + 1] == [both, both | {c}]
            for peer in (a, b):
                opened = peer.events(EventName.ROUND_OPENED)
                assert len(shares[peer.peer_id]) == len(opened), "once for each round"

    run()


@simulated(SEED)
async def test_two_that_give_up_in_mid_exchange_leave_two_others_to_complete_theirs(tmp_path):
    async with open_swarm(SEED, toy_spec(6), tmp_path, LONG_EXCHANGES) as swarm:
        await start(swarm, *"abcd")

        ids = {peer.peer_id: name for name, peer in swarm.peers.items()}

        def exchanging() -> set[frozenset[str]]:
            """The pairs that have agreed on an exchange which has not ended."""
            pairs = set()
            for name, peer in swarm.peers.items():
                ends = peer.events(
                    EventName.PROPOSAL_ACCEPTED, EventName.ROUND_AVERAGED, EventName.ROUND_SKIPPED
                )
                if ends and ends[-1]["event"] == EventName.PROPOSAL_ACCEPTED:
                    pairs.add(frozenset((name, ids[ends[-1]["remote"]])))
            return pairs

        await swarm.until(lambda: len(exchanging()) == 2)
        first, second = exchanging()
        assert not first & second
        before = {name: len(outcomes(swarm[name])) for name in second}
        for name in first:
            swarm[name].scope.cancel()
        await swarm.until(lambda: all(len(outcomes(swarm[name])) > before[name] for name in second))
        for name in second:
            assert outcomes(swarm[name])[before[name]] == "averaged"
