"""Snapshots: one name for what all have measured; nobody can make anything up; who proposes."""

import dataclasses

import msgpack
import pytest
from msgspec.structs import replace
from routing_worlds import RUN_ID, WORK, MeasuredWorld

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.routing.measures import LinkTimes, WorkTimes, encode_vector
from protocol.routing.snapshots import REPLAN_EVERY_S, LinkSnapshot, Proposals

STAGES = [0, 0, 1, 1, 2]


def world(rtt_us=lambda a, b: 10_000 * (1 + abs(a - b))):
    return MeasuredWorld(STAGES, rtt_us)


def test_a_snapshot_comes_back_under_its_name():
    snapshot = world().snapshot()
    again = LinkSnapshot.read(snapshot.data, RUN_ID)
    assert again == snapshot
    assert again.digest == snapshot.digest
    assert again.stages == tuple(STAGES)


def test_what_was_changed_on_the_way_is_refused():
    data = world().snapshot().data
    for bad in (b"", b"\x80", data[:-1], data[:200] + b"x" + data[201:], data + b"\x00"):
        with pytest.raises(RemoteProtocolError):
            LinkSnapshot.read(bad, RUN_ID)
    with pytest.raises(RemoteProtocolError):
        LinkSnapshot.read(data, "cd" * 16)


@pytest.mark.parametrize(
    "part",
    [
        "x" * 70_000,
        1000,
        1 << 40,
        [],
        None,
        {},
    ],
    ids=["a text", "a number", "a huge number", "a list", "nothing", "a map"],
)
def test_a_snapshot_of_what_is_no_vector_is_refused(part):
    with pytest.raises(RemoteProtocolError, match="not a snapshot"):
        LinkSnapshot.read(msgpack.packb([RUN_ID, [part]]), RUN_ID)


def test_a_snapshot_needs_a_peer():
    with pytest.raises(LocalProtocolError):
        LinkSnapshot.of(RUN_ID, [])


def test_the_worse_of_two_ends_counts():
    measured = world()
    honest = measured.snapshot().problem(measured.terms(), 3)
    for liar_rtt_us, line_us in ((1, 1), (900_000, 300_000)):
        lying = world()
        vector = lying.vector

        def lies(one, vector=vector, rtt_us=liar_rtt_us, line_us=line_us):
            told = vector(one)
            if one != 2:
                return told
            links = tuple(LinkTimes(x.peer_id, rtt_us, line_us, line_us) for x in told.links)
            return replace(told, links=links)

        lying.vector = lies
        problem = lying.snapshot().problem(lying.terms(), 3)
        for a in range(5):
            for b in range(5):
                if a == b:
                    continue
                before = honest.latency_us[a][b], -honest.bytes_per_s[a][b]
                after = problem.latency_us[a][b], -problem.bytes_per_s[a][b]
                if 2 in (a, b) and liar_rtt_us > 1:
                    assert after > before  # it keeps work away from itself
                else:
                    assert after == before


def test_a_sender_waits_for_what_its_work_does_not_hide_of_a_round_trip():
    short_us, long_us = 40_000, 400_000
    measured = MeasuredWorld(STAGES, lambda a, b: long_us if 2 in (a, b) else short_us)
    latency_us = measured.snapshot().problem(measured.terms(), 3).latency_us
    assert latency_us[0][1] == short_us // 2
    hidden_us = (WORK.forward_us + WORK.backward_us) // 2
    assert latency_us[0][2] == long_us // 2 + long_us - hidden_us


def test_what_nobody_has_measured_is_taken_for_usual():
    measured = world(lambda a, b: 0 if {a, b} == {0, 1} else 40_000)
    measured.work[2] = WorkTimes()
    problem = measured.snapshot().problem(measured.terms(), 3)
    assert problem.latency_us[0][1] == problem.latency_us[0][2] == 20_000
    assert {peer.forward_us for peer in problem.peers} == {50_000}
    assert (problem.work.backward_permille, problem.work.loss_permille) == (2000, 200)


def test_a_stage_without_anybody_is_no_problem_to_plan_for():
    measured = MeasuredWorld([0, 1, 1], lambda a, b: 1000)
    terms = dataclasses.replace(measured.terms(2), stages=3)
    assert measured.snapshot().problem(terms, 2) is None


def test_every_relay_is_planned_for_with_its_own_slots():
    measured = world()
    before = measured.vector
    measured.vector = lambda one: replace(before(one), slots=2 if one == 3 else 4)
    problem = measured.snapshot().problem(measured.terms(), 3)
    assert [peer.slots for peer in problem.peers] == [4, 4, 4, 2, 4]


# --- proposing ------------------------------------------------------------------------------------
def gathered(measured):
    proposals = Proposals(RUN_ID)
    take_all(proposals, measured)
    return proposals


def take_all(proposals, measured):
    for one in range(len(measured.stages)):
        proposals.take(measured.vector(one), measured.signed(one))


def test_all_that_hold_the_vectors_propose_the_same():
    measured = world()
    assert gathered(measured).due(None, 0.0) == measured.snapshot()


def test_a_snapshot_stands_while_nothing_is_told():
    proposals = gathered(world())
    current = proposals.due(None, 0.0)
    take_all(proposals, world())
    assert proposals.due(current, 10 * REPLAN_EVERY_S) is None


def test_new_numbers_wait_their_turn_and_new_peers_do_not():
    measured = world()
    proposals = gathered(measured)
    current = proposals.due(None, 0.0)
    measured.numbers[2] = 2
    take_all(proposals, measured)
    assert proposals.due(current, REPLAN_EVERY_S - 0.1) is None
    newer = proposals.due(current, REPLAN_EVERY_S)
    assert newer is not None
    assert newer.digest != current.digest
    stages = {peer.peer_id: stage for peer, stage in zip(measured.peers, STAGES, strict=True)}
    del stages[measured.peers[3].peer_id]
    proposals.keep(stages)
    assert len(proposals.due(newer, REPLAN_EVERY_S + 0.1).vectors) == 4


def test_an_older_vector_is_not_taken():
    measured = world()
    proposals = gathered(measured)
    older = replace(measured.vector(0), number=0)
    signed = encode_vector(older, RUN_ID, measured.peers[0].sign)
    assert not proposals.take(older, signed)
    assert proposals.take(replace(older, incarnation=2), signed)


def test_a_peer_that_says_another_stage_than_its_beats_is_left_out():
    measured = world()
    proposals = gathered(measured)
    stages = {peer.peer_id: stage for peer, stage in zip(measured.peers, STAGES, strict=True)}
    proposals.keep(stages | {measured.peers[4].peer_id: 1})
    assert len(proposals.due(None, 0.0).vectors) == 4
