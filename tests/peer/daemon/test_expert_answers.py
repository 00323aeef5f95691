"""What experts say of texts, asked of them in a simulated swarm: each measures all domains."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from swarm_worlds import simulated
from test_expert_swarm import ROUNDS, experts_spec, start_all

from peer.experts.conversation import ask_expert, log_probs_of, score_of
from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from peer.observe.experts import matrix_lines
from protocol.content.manifest import blob_name
from protocol.errors import Refused, StreamLost
from protocol.membership.book import Fault
from protocol.outcomes import RefusalReason
from simulation.swarm import SimulatedSwarm, open_swarm

pytestmark = pytest.mark.slow

CODE = blob_name(b"code")
TEXT = np.arange(8, dtype=np.uint32)


@asynccontextmanager
async def talk_with(swarm: SimulatedSwarm, asker: str, name: str) -> AsyncIterator[Conversation]:
    network = swarm[asker].parts.network
    async with await ask_expert(network, swarm[name].peer_id) as talk:
        yield talk


def group_of(swarm: SimulatedSwarm, name: str) -> str:
    group = swarm[name].facts.group
    assert group is not None
    return group


@simulated()
async def test_each_peer_measures_one_domain_after_another_and_all_at_the_end(tmp_path: Path):
    spec = experts_spec(validate_every=1)
    async with open_swarm(1, spec, tmp_path) as swarm:
        await start_all(swarm)
        await swarm.finished()
        for name in "abcd":
            peer = swarm[name]
            others = peer.events(EventName.DOMAIN_VALIDATED)
            rounds = [each["round"] for each in others]
            assert 2 <= len(rounds) <= ROUNDS // 2 + 2
            assert {each["domain"] for each in others} == {"general", "code"} - {peer.facts.expert}
            assert peer.facts.losses_of_domains.keys() == {0, 1}
            own = {"general": 0, "code": 1}[peer.facts.expert or ""]
            assert peer.facts.losses_of_domains[own] == peer.facts.validation_loss
        roster = swarm["a"].parts.roster

        def are_told() -> bool:
            told = {member.peer_id: member.progress.losses for member in roster.members()}
            others = [swarm[name] for name in "bcd"]
            return all(told[each.peer_id] == each.facts.losses_of_domains for each in others)

        await swarm.until(are_told)


@simulated()
async def test_what_was_measured_is_given_and_a_text_is_scored_by_the_same_weights(tmp_path: Path):
    async with open_swarm(2, experts_spec(40, code_rounds=40), tmp_path) as swarm:
        await start_all(swarm)
        await swarm.until(lambda: 1 in swarm["b"].facts.losses_of_domains)
        group = group_of(swarm, "b")
        async with talk_with(swarm, "a", "b") as talk:
            told = await log_probs_of(talk, group, CODE, 8)
            assert told.loss == pytest.approx(swarm["b"].facts.losses_of_domains[1])
            scored = await score_of(talk, group, TEXT)
            assert scored.log_probs.size == TEXT.size - 1
            assert scored.step >= told.step
            with pytest.raises(Refused) as refused:
                await log_probs_of(talk, group, "ab" * 16, 8)
            assert refused.value.reason is RefusalReason.UNAVAILABLE
            with pytest.raises(Refused) as refused:
                await score_of(talk, group_of(swarm, "a"), TEXT)
            assert refused.value.reason is RefusalReason.OTHER_GROUP


@simulated()
async def test_a_text_of_no_tokens_of_the_run_ends_the_stream_and_is_held_against_its_sender(
    tmp_path: Path,
):
    async with open_swarm(3, experts_spec(40, code_rounds=40), tmp_path) as swarm:
        await start_all(swarm)
        await swarm.until(lambda: swarm["b"].facts.round >= 2)
        for bad in (TEXT + 250, TEXT[:1]):
            with pytest.raises(StreamLost):
                async with talk_with(swarm, "a", "b") as talk:
                    await score_of(talk, group_of(swarm, "b"), bad)
        assert swarm["b"].facts.faults[Fault.BROKEN_RULE] == 2


@simulated()
async def test_after_the_end_of_the_run_a_trainer_is_started_for_a_text(tmp_path: Path):
    async with open_swarm(4, experts_spec(2, code_rounds=2), tmp_path) as swarm:
        await start_all(swarm)
        await swarm.finished()
        async with talk_with(swarm, "a", "b") as talk:
            group = group_of(swarm, "b")
            told, scored = (
                await log_probs_of(talk, group, CODE, 8),
                await score_of(talk, group, TEXT),
            )
        assert (scored.stamp, scored.step) == (told.stamp, told.step)
        assert scored.loss == pytest.approx(told.loss)


@simulated()
async def test_status_has_what_all_tell_of_their_experts(tmp_path: Path):
    spec = experts_spec(validate_every=1)
    async with open_swarm(5, spec, tmp_path) as swarm:
        await start_all(swarm)
        await swarm.finished()
        seen = swarm["a"]

        def is_whole() -> bool:
            experts = seen.status().matrix
            return experts is not None and None not in [
                *experts["losses"][0],
                *experts["losses"][1],
            ]

        await swarm.until(is_whole)
        experts = seen.status().matrix
        assert experts is not None
        assert experts["names"] == ("general", "code")
        assert experts["together"] == [None, None]
        line = next(line for line in matrix_lines(experts) if line.startswith("code"))
        assert f"{experts['losses'][1][0]:.4f}" in line
        metrics = seen.parts.report.metrics.render().decode()
        assert 'loco_expert_loss{domain="general",expert="code"}' in metrics
        assert 'expert="ensemble"' not in metrics, "nobody has asked for it"
