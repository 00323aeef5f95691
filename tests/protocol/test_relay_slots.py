"""Slots of a relay: who takes them, and that everybody gives them back."""

from microbatch_worlds import PATIENCE_S

from protocol.microbatch.commands import Answer, Command, Forget, Release
from protocol.microbatch.counts import Counted
from protocol.microbatch.departed import GONE_S
from protocol.microbatch.relay import RelayCore
from protocol.microbatch.trip import Leg, Microbatch, Trip
from protocol.outcomes import RefusalReason

PATH, STAGES = ("relay", "next"), (1, 2)


def relay_of(*origins: str, slots: int = 2) -> RelayCore:
    """A relay in the first iteration of these data peers."""
    relay = RelayCore(slots, PATIENCE_S)
    relay.present(origins, 0.0, ended=False)
    for origin in origins:
        relay.announced(origin, 1, 0.0)
    return relay


def trip(
    index: int, leg: Leg = Leg.FORWARD, attempt: int = 0, origin: str = "data", until: int = 0
) -> Trip:
    """A trip to the first relay of a path of two."""
    return Trip(Microbatch(origin, 1, index), leg, PATH, 1, STAGES, None, attempt, until)


def bring(relay: RelayCore, brought: Trip) -> list[Command]:
    """A boundary that is offered and comes."""
    assert relay.offered(brought.microbatch.index, brought) == [Answer(brought.microbatch.index)]
    return relay.arrived(brought, 0, None)


def test_what_a_data_peer_that_is_gone_has_left_makes_room() -> None:
    relay = relay_of("gone", "data", slots=3)
    bring(relay, trip(0, origin="gone"))
    relay.produced(Leg.FORWARD, 0, 7, None, 0.0)
    bring(relay, trip(0, Leg.BACKWARD, origin="gone"))
    relay.produced(Leg.BACKWARD, 0, 8, None, 0.0)  # sent, and kept in slot 8
    relay.returned(0, 0.0)
    for index in (1, 2, 3):
        bring(relay, trip(index, origin="gone"))
    assert relay.offered(4, trip(4, origin="gone")) == []
    assert relay.offered(5, trip(5)) == []
    for now_s, alive in ((1.0, ["gone"]), (2.0, []), (GONE_S, ["gone"]), (GONE_S + 1.0, [])):
        assert not relay.present(["data"], now_s, ended=False, alive=alive)
    commands = relay.present(["data"], 2 * GONE_S + 1.0, ended=False)
    answers = {each.ticket: each.refusal for each in commands if isinstance(each, Answer)}
    assert answers == {4: RefusalReason.UNAVAILABLE, 5: None}
    assert [each.number for each in commands if isinstance(each, Forget)] == [1, 2, 3]
    assert Release(8) in commands
    assert relay.counts[Counted.LOST] == 3
