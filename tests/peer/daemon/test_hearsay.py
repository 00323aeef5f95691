"""Peers that others have named: noted and dialled within the budget of whoever named them."""

from typing import Any

import pytest
import trio
from swarm_worlds import simulated, start, toy_spec
from test_admission import beat, greet

from peer.daemon.links import Dial, Dialler
from protocol.errors import Refused, StreamLost
from protocol.limits import (
    ANSWER_S,
    HEARSAY,
    HEARSAY_DIALS,
    MAX_DIALS,
    MAX_HEARSAY_TRIES,
    MAX_LINKS,
    MAX_MEMBERS,
)
from protocol.membership.book import Allowance, PeerBook
from protocol.membership.records import PeerRecord
from protocol.membership.view import Member, Roster
from protocol.outcomes import RefusalReason
from protocol.wire.messages import PeerEntry, PeerList
from simulation.swarm import identity_of, open_swarm

NOWHERE = ("/ip4/203.0.113.1/tcp/1",)


def named(*peers: str) -> PeerList:
    return PeerList(tuple(PeerEntry(peer, 1, NOWHERE) for peer in peers))


def many(of: str, count: int = HEARSAY.per_peer) -> PeerList:
    return named(*(f"{of}-{number}" for number in range(count)))


def dialler_of(roster: Roster, dial: Dial | None = None) -> tuple[Dialler, PeerBook]:
    """One whose dials are the caller's, and the book that it goes by."""

    async def nobody(*_: object) -> None:
        raise StreamLost("dial: nobody there")

    book = PeerBook()
    return Dialler(roster, "me", dial or nobody, book, lambda _: True), book


def test_one_peer_names_so_many_and_all_together_so_many():
    roster = Roster(10.0)
    hearsay, _ = dialler_of(roster)
    hearsay.on_peer_list(0.0, "liar", many("x"))
    hearsay.on_peer_list(0.0, "liar", many("y"))
    assert len(roster.members()) == HEARSAY.per_peer
    hearsay.on_peer_list(0.0, "honest", named("real", "me"))
    assert roster.get("real") is not None
    assert roster.get("me") is None
    for number in range(2 * HEARSAY.total // HEARSAY.per_peer):
        hearsay.on_peer_list(0.0, f"liar-{number}", many(f"z{number}"))
    assert len(roster.members()) == HEARSAY.total


def test_a_name_that_is_linked_makes_room_for_another():
    roster = Roster(10.0)
    hearsay, _ = dialler_of(roster)
    hearsay.on_peer_list(0.0, "b", many("x", HEARSAY.per_peer))
    hearsay.linked("x-0")
    hearsay.on_peer_list(0.0, "b", named("y", "z"))
    assert (roster.get("y") is None, roster.get("z") is None) == (False, True)


def test_names_say_nothing_of_whom_we_know_and_drive_nobody_out():
    roster = Roster(10.0, max_members=2)
    hearsay, _ = dialler_of(roster)
    roster.record(PeerRecord("a", 3, ("/ip4/10.0.0.1/tcp/1",), 1.0))
    roster.heard(0.0, "quiet", 4)
    hearsay.on_peer_list(0.0, "liar", named("a", "quiet", "new"))
    a, quiet = roster.get("a"), roster.get("quiet")
    assert a is not None
    assert quiet is not None
    assert a.addresses == ("/ip4/10.0.0.1/tcp/1",)
    assert (quiet.incarnation, quiet.addresses) == (4, NOWHERE)
    assert roster.get("new") is None


@pytest.mark.long
async def test_dials_to_names_leave_room_and_end(autojump_clock):
    roster, dialling, most = Roster(10.0), set[str](), 0

    async def dial(peer_id, _):
        nonlocal most
        dialling.add(peer_id)
        most = max(most, len(dialling))
        try:
            await trio.sleep(0.9 * ANSWER_S)
        finally:
            dialling.discard(peer_id)
        raise StreamLost("dial: nobody there")

    dialler, _ = dialler_of(roster, dial)
    async with trio.open_nursery() as nursery:

        async def look(seconds: float) -> None:
            end_s = trio.current_time() + seconds
            while trio.current_time() < end_s:
                dialler.dial_due(nursery, trio.current_time(), (), MAX_LINKS)
                await trio.sleep(1.0)

        dialler.on_peer_list(0.0, "liar", many("x"))
        await look(3.0)
        assert most == HEARSAY_DIALS.per_peer
        for number in range(4):
            dialler.on_peer_list(0.0, f"liar-{number}", many(f"x{number}"))
        await look(3.0)
        assert most == HEARSAY_DIALS.total
        roster.record(PeerRecord("zz", 1, NOWHERE, 1.0))  # from its own record
        await look(3.0)
        assert "zz" in dialling
        for number in range(2 * MAX_LINKS):
            roster.record(PeerRecord(f"z{number}", 1, NOWHERE, 1.0))
        await look(3.0)
        assert most == MAX_DIALS
        await look(7200.0)
        assert not [m for m in roster.members() if m.peer_id.startswith("x")], "forgotten"
        nursery.cancel_scope.cancel()
    assert MAX_HEARSAY_TRIES < 10


async def test_a_peer_whose_own_dial_was_quicker_refuses_nobody(autojump_clock):
    roster, linked = Roster(10.0), set[str]()

    async def dial(peer_id, _):
        await trio.sleep(0.1)
        if peer_id == "quicker":
            linked.add(peer_id)
        raise Refused(RefusalReason.TOO_MANY, "we are linked already")

    dialler, _ = dialler_of(roster, dial)
    for name in ("quicker", "other"):
        roster.record(PeerRecord(name, 1, NOWHERE, 1.0))
    async with trio.open_nursery() as nursery:
        dialler.dial_due(nursery, trio.current_time(), linked, MAX_LINKS)
    assert list(dialler.refusals) == list(dialler.failures) == ["other"]


def test_a_list_of_peers_is_no_work_for_a_full_roster():
    roster = Roster(10.0)
    for number in range(MAX_MEMBERS):
        roster.record(PeerRecord(f"known-{number}", 1, NOWHERE, 1.0))
    looked = 0

    class Counted(dict[str, Member]):
        def values(self) -> Any:
            nonlocal looked
            looked += 1
            return super().values()

    roster._members = Counted(roster._members)
    dialler_of(roster)[0].on_peer_list(0.0, "liar", many("x"))
    assert looked == 0
    for number in range(HEARSAY.per_peer):  # what peers say of themselves has a place
        roster.heard(1.0, f"alive-{number}", 1)
    assert looked == 1


def test_an_allowance_lets_a_burst_pass_and_then_so_much_a_second():
    allowance = Allowance(per_s=10.0, burst=20.0)
    assert [allowance.spend(0.0, 10.0) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert allowance.spend(2.0, 10.0) == 0.0
    assert allowance.spend(1000.0, 20.0) == 0.0
    assert allowance.spend(1000.0, 5.0) == 0.5


@simulated()
async def test_a_liar_with_lists_of_nobody_holds_no_newcomer_up(tmp_path):
    async with open_swarm(1, toy_spec(200), tmp_path) as swarm:
        await start(swarm, "a")
        liar = identity_of(1, "liar").peer_id
        async with swarm.internet.open_network(liar) as network, trio.open_nursery() as nursery:
            talk, _ = await greet(swarm, network)
            nursery.start_soon(beat, talk)
            for batch in range(20):
                ids = [identity_of(batch + 2, f"n{number}").peer_id for number in range(64)]
                await talk.send(PeerList(tuple(PeerEntry(i, 1, NOWHERE) for i in ids)))
            await trio.sleep(2.0)
            assert len(swarm["a"].roster.members()) <= HEARSAY.per_peer + 1
            swarm.join("b")
            swarm.join("c")
            await swarm.until(lambda: all(swarm[name].ready.is_set() for name in "bc"))
            await swarm.until(lambda: swarm["a"].links.num_live == 3)
            assert trio.current_time() < 60.0
            nursery.cancel_scope.cancel()
