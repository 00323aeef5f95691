"""What a data peer knows of its relays: who has failed, and what would be gone with each."""

from msgspec.structs import replace

from protocol.microbatch.core import MicrobatchEvent, SendBoundary
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.trainer_messages import Resend
from protocol.pipeline.problem import PathRules
from protocol.routing.routers import RandomRouter
from protocol.wire.stage_messages import Direction, Hop, Lost

BOTH = (("a", "b"),)


def data_peer() -> DataPeerCore:
    core = DataPeerCore("data", RandomRouter("data", 0, 2, PathRules()), 30.0)
    core.peers_changed(BOTH, 0.0, trained=True)
    return core


def set_out(core: DataPeerCore, number: int) -> Hop:
    """A microbatch is produced, and sent."""
    commands = core.produced(Direction.FORWARD, number, 0, None, 0.0)
    (hop,) = (each.hop for each in commands if isinstance(each, SendBoundary))
    return hop


def iteration_of(core: DataPeerCore, number: int) -> str:
    """An iteration of one microbatch, from its beginning to its end. Returns its relay."""
    core.begun(1, 0.0)
    hop = set_out(core, number)
    core.arrived(replace(hop, direction=Direction.BACKWARD, place=0), 1, 1.0)
    core.returned(number, 0.0)
    return hop.path.relays[0]


def gone_with(core: DataPeerCore, relay: str) -> int:
    """What is counted as gone once this relay is."""
    core.peers_changed((tuple(sorted({"a", "b"} - {relay})),), 0.0, trained=True)
    return core.counts[MicrobatchEvent.GONE]


def test_a_relay_that_loses_a_microbatch_and_names_nobody_has_failed() -> None:
    for number in range(8):
        core = data_peer()
        core.begun(1, 0.0)
        hop = set_out(core, number)
        (relay,) = hop.path.relays
        assert Resend(number) in core.lost(Lost(hop.microbatch), relay)
        assert set_out(core, number).path.relays == tuple({"a", "b"} - {relay})


def test_what_a_relay_has_added_is_gone_with_it_until_a_later_iteration_is_over() -> None:
    core = data_peer()
    relay = iteration_of(core, 1)
    core.begun(1, 0.0)
    assert gone_with(core, relay) == 1


def test_one_that_no_later_microbatch_has_passed_has_stepped_by_the_end_of_the_next() -> None:
    core = data_peer()
    relays = [iteration_of(core, number) for number in range(20)]
    turn = next(n for n in range(19) if relays[n] != relays[n + 1])
    core = data_peer()
    assert [iteration_of(core, number) for number in range(turn + 2)] == relays[: turn + 2]
    core.begun(1, 0.0)
    assert gone_with(core, relays[turn]) == 0
