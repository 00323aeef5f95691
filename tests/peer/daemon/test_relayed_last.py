"""Peers that depend on relays are given work for others only where there are no others."""

import trio

from peer.averaging.diloco.fragment_rounds import LinkedMembers
from peer.daemon.sources import in_order
from peer.facts import Facts
from peer.stages.peers import StagePeers
from protocol.diloco.peers import Peers
from protocol.membership.group import WHOLE_MODEL, Group
from protocol.membership.view import Progress, Roster, View
from protocol.run.layout import part_of_stage

RUN = "ab" * 16
RELAYED = ("/ip4/8.8.8.8/tcp/1/p2p-circuit",)
DIRECT = ("/ip4/8.8.4.4/tcp/1",)


class EndlessSpec:
    """Of a run without an end."""

    longest_rounds = 1 << 40


def roster_of(part: str, **addresses: tuple[str, ...]) -> Roster:
    roster = Roster(10.0)
    progress = Progress(state="training", round=1, step=10, group=Group(RUN, part).digest)
    for peer_id, own in addresses.items():
        roster.heard(trio.current_time(), peer_id, 1, addresses=own, progress=progress)
    return roster


async def test_sources(autojump_clock) -> None:
    far = {f"far{n}": RELAYED for n in range(8)}
    roster = roster_of(WHOLE_MODEL, near=DIRECT, **far)
    assert in_order(roster, "me", None)[0] == "near"
    assert len(in_order(roster, "me", None)) == 9


async def test_stage_holders(autojump_clock) -> None:
    both = roster_of(part_of_stage(1), near=DIRECT, far=RELAYED)
    assert StagePeers(both, RUN, 2).relays() == (("near",),)
    assert StagePeers(both, RUN, 2).stage_of("far") == 1
    alone = roster_of(part_of_stage(1), far=RELAYED)
    assert StagePeers(alone, RUN, 2).relays() == (("far",),)


async def test_owners_of_chunks(autojump_clock) -> None:
    facts = Facts("me", 1, round=1)
    view = View(roster_of(WHOLE_MODEL, near=DIRECT, far=RELAYED), Group(RUN, WHOLE_MODEL).digest)
    company = LinkedMembers("me", facts, view, EndlessSpec())  # type: ignore[arg-type]

    def owners() -> list[str]:
        peers = Peers("me", 1)
        peers.seen = company.seen()
        return peers.possible_owners(1)

    assert owners() == ["me", "near"]
    facts.reach.relays = ("near",)
    assert owners() == ["near"], "all leave us out, so we do as well"
    view = View(roster_of(WHOLE_MODEL, far=RELAYED), Group(RUN, WHOLE_MODEL).digest)
    company = LinkedMembers("me", facts, view, EndlessSpec())  # type: ignore[arg-type]
    assert owners() == ["far", "me"]
