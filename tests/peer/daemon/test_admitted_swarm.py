"""Runs that not everybody may join: invitations, lists, bans, and what strangers are told."""

from functools import partial

import pytest
import trio
from swarm_worlds import simulated, start, toy_spec

from peer.daemon.membership import PUBLISH_EVERY_S
from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from protocol.admission.statements import Verdict
from protocol.errors import LocoError, Refused
from protocol.membership.records import record_keys
from protocol.names import short_id
from protocol.outcomes import RefusalReason
from protocol.run.sections import AdmissionSection
from protocol.wire.content_messages import GetSpec, SpecReply
from protocol.wire.versions import CONTENT, GOSSIP, HELLO
from simulation.machine import Machine
from simulation.network import SimulatedDirectory
from simulation.swarm import DEFAULT_MACHINE, identity_of, open_swarm

WEEK_S = 604_800.0


def private_spec(mode="invite", peers=(), **options):
    admission = AdmissionSection(mode=mode, peers=peers)
    return toy_spec(**options).model_copy(update={"admission": admission})


def door(swarm, name):
    return swarm[name].parts.admission


def invitation(swarm, name="a", uses=1, number=1, lasts_s=WEEK_S):
    """A machine whose user was given an invitation."""
    token = door(swarm, name).invite(number.to_bytes(32, "big"), lasts_s, uses)
    return Machine(token=token)


def rule(swarm, name, verdict, other):
    messages = door(swarm, name).rule(verdict, swarm_id(swarm, other))
    swarm[name].links.tell_statements(messages)


def verdicts(swarm, name):
    """What a peer has heard of rulings."""
    return [event["verdict"] for event in swarm[name].events(EventName.PEER_RULED_ON)]


def heard_of_a_ban(swarm, name):
    return "ban" in verdicts(swarm, name)


def swarm_id(swarm, name):
    return identity_of(1, name).peer_id


async def founded(swarm):
    swarm.found("a")
    await swarm.until(swarm["a"].ready.is_set)


async def refused(swarm, name, machine=DEFAULT_MACHINE):
    """A peer that the run does not take, and what it was told."""
    swarm.join(name, machine)
    await swarm.until(swarm[name].ended.is_set)
    failure = swarm[name].failure
    assert isinstance(failure, Refused)
    assert failure.reason is RefusalReason.NOT_ADMITTED
    return failure.sentence


@simulated()
async def test_the_invited_train_together_and_a_stranger_is_told_why_it_may_not(tmp_path):
    async with open_swarm(1, private_spec(), tmp_path) as swarm:
        await founded(swarm)
        assert "--invite" in await refused(swarm, "x")
        (problem,) = swarm["a"].report.status().problems
        assert problem.name == "peer-refused"
        assert short_id(swarm["x"].peer_id) in problem.words
        swarm.join("b", invitation(swarm))
        swarm.join("c", invitation(swarm, number=2))
        await swarm.finished("a", "b", "c")
        linked = {event["remote"] for event in swarm["b"].events(EventName.PEER_LINKED)}
        assert swarm["c"].peer_id in linked
        assert swarm["a"].events(EventName.ROUND_AVERAGED)


@simulated()
async def test_an_invitation_is_for_as_many_as_it_says_and_ends(tmp_path):
    async with open_swarm(1, private_spec(rounds=8), tmp_path) as swarm:
        await founded(swarm)
        machine = invitation(swarm, uses=1)
        late = invitation(swarm, number=3, lasts_s=-1.0)
        swarm.join("b", machine)
        await swarm.until(swarm["b"].known.is_set)
        assert "as many as may" in await refused(swarm, "c", machine)
        assert "expired" in await refused(swarm, "d", late)


@simulated()
async def test_a_list_takes_those_on_it_and_those_admitted_later(tmp_path):
    async with open_swarm(
        1, private_spec("list", [identity_of(1, "b").peer_id]), tmp_path
    ) as swarm:
        await founded(swarm)
        swarm.join("b")
        await swarm.until(swarm["b"].known.is_set)
        assert "list" in await refused(swarm, "c")
        rule(swarm, "a", Verdict.ADMIT, "c")
        swarm.join("c", through=["b"])
        await swarm.finished("a", "b", "c")


@simulated()
async def test_a_ban_reaches_all_and_ends_the_banned(tmp_path):
    async with open_swarm(1, toy_spec(rounds=30), tmp_path) as swarm:
        await start(swarm, "a", "b", "c", "d")
        rule(swarm, "a", Verdict.BAN, "d")
        await swarm.until(swarm["d"].ended.is_set)
        assert isinstance(swarm["d"].failure, Refused)
        for name in "abc":
            await swarm.until(partial(heard_of_a_ban, swarm, name))
            for told in await refusals_of_all(swarm, "d", name):
                assert "banned" in told.sentence
        assert "banned" in await refused(swarm, "d")
        rule(swarm, "a", Verdict.ADMIT, "d")
        swarm.join("d")
        await swarm.until(swarm["d"].ready.is_set)


@simulated()
async def test_a_delegate_invites_and_others_may_not(tmp_path):
    async with open_swarm(1, private_spec(rounds=30), tmp_path) as swarm:
        await founded(swarm)
        swarm.join("b", invitation(swarm))
        await swarm.until(swarm["b"].ready.is_set)
        assert [door(swarm, name).may_sign for name in "ab"] == [True, False]
        with pytest.raises(LocoError, match="may not sign"):
            invitation(swarm, "b", number=5)
        rule(swarm, "a", Verdict.DELEGATE, "b")
        await swarm.until(lambda: "delegate" in verdicts(swarm, "b"))
        assert door(swarm, "b").may_sign
        swarm.join("c", invitation(swarm, "b", number=5))
        await swarm.until(swarm["c"].ready.is_set)


@simulated()
async def test_a_member_that_starts_again_needs_no_invitation(tmp_path):
    """Its pass and the secret lie in its home; the founder's home knows its guests."""
    async with open_swarm(1, private_spec(rounds=40), tmp_path) as swarm:
        await founded(swarm)
        swarm.join("b", invitation(swarm))
        await swarm.until(swarm["b"].ready.is_set)
        await killed(swarm, "b")
        swarm.join("b")
        await swarm.until(swarm["b"].ready.is_set)
        await killed(swarm, "a")
        swarm.join("a", through=["b"])
        await swarm.until(swarm["a"].ready.is_set)
        swarm.join("c", invitation(swarm, number=2), through=["b"])
        await swarm.until(swarm["c"].ready.is_set)


@simulated()
async def test_strangers_get_nothing_and_find_nothing(tmp_path):
    """No conversation serves them, no refusal names the run, and no record tells of it."""
    async with open_swarm(1, private_spec(rounds=30), tmp_path) as swarm:
        await founded(swarm)
        swarm.join("b", invitation(swarm))
        await swarm.until(swarm["b"].ready.is_set)
        facts = swarm["a"].facts
        for told in await refusals_of_all(swarm, "x", "a"):
            assert told.reason is RefusalReason.NOT_ADMITTED
            assert facts.run_id not in told.sentence
        async with swarm.internet.open_network(swarm_id(swarm, "x")):
            directory = SimulatedDirectory(swarm.directory, swarm_id(swarm, "x"))
            swarm.directory.connect(swarm_id(swarm, "x"), swarm["a"].peer_id)
            await trio.sleep(PUBLISH_EVERY_S)
            named = await door(swarm, "b").directory_name(facts.group)
            with_secret = [await directory.get(key) for key in record_keys(named)]
            without = [await directory.get(key) for key in record_keys(facts.group)]
            assert any(with_secret)
            assert not any(without)


async def killed(swarm, name):
    swarm.kill(name)
    await swarm[name].ended.wait()


async def refusals_of_all(swarm, name, other):
    """What somebody with the identity of `name` is told in each conversation but the hello."""
    served = set(swarm[other].network._handlers) - {HELLO}
    assert {CONTENT, GOSSIP} <= served
    return [await asked(swarm, name, other, protocol) for protocol in sorted(served)]


async def asked(swarm, name, other, protocol):
    async with swarm.internet.open_network(swarm_id(swarm, name)) as network:
        await network.connect(swarm[other].peer_id, swarm[other].network.addresses)
        stream = await network.open_stream(swarm[other].peer_id, protocol)
        async with Conversation(stream) as talk:
            if protocol == CONTENT:
                await talk.send(GetSpec())
            try:
                await talk.receive(SpecReply, timeout_s=5.0)
            except Refused as refusal:
                return refusal
    raise AssertionError(f"{protocol} was served")
