"""What others tell of iterations moves nobody far, and never to the end of the numbers."""

import msgpack
import pytest
from microbatch_worlds import PATIENCE_S

from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_ITERATION
from protocol.microbatch.core import SendNotice
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.iterations import MAX_LEAP
from protocol.microbatch.relay import RelayCore
from protocol.microbatch.trainer_messages import Finish
from protocol.pipeline.problem import PathRules
from protocol.routing.routers import RandomRouter
from protocol.wire.messages import decode_message
from protocol.wire.stage_messages import Announcement, Noted

MORE_THAN_ALL = (1 << 63) - 1


def next_after(told: dict[str, int], iterations: int = 1) -> int:
    """The iteration that a data peer sets out for, once relays have told of theirs."""
    core = DataPeerCore("data", RandomRouter("data", 0, 2, PathRules()), PATIENCE_S)
    core.peers_changed((("a", "b", "c"),), 0.0, trained=True)
    for relay, iteration in told.items():
        core.noted(relay, Announcement(1), Noted(iteration))
    for _ in range(iterations):
        core.begun(1, 0.0)
    return core.iteration


def test_a_relay_that_tells_of_one_far_ahead_takes_no_data_peer_along() -> None:
    assert next_after({"a": 40, "liar": MORE_THAN_ALL, "b": 41, "c": 41}) == 41
    assert next_after({"a": 40, "b": MORE_THAN_ALL}) == 40
    assert next_after({"a": 40, "liar": MORE_THAN_ALL}) == 40  # which is no relay any more


def test_a_stage_whose_only_relay_is_ahead_takes_data_peers_along() -> None:
    """It has waited in vain, while another stage had nobody; those of that one come anew."""
    core = DataPeerCore("data", RandomRouter("data", 0, 3, PathRules()), PATIENCE_S)
    core.peers_changed((("waited",), ("b", "c")), 0.0, trained=True)
    for relay, iteration in {"waited": 48, "b": 5, "c": 5}.items():
        core.noted(relay, Announcement(1), Noted(iteration))
    core.begun(1, 0.0)
    assert core.iteration == 48


def test_one_that_is_alone_takes_it_a_leap_and_no_further() -> None:
    assert next_after({"a": MORE_THAN_ALL}) == MAX_LEAP
    assert next_after({"a": MORE_THAN_ALL}, iterations=3) == 3 * MAX_LEAP


def test_a_data_peer_that_is_alone_takes_a_relay_a_leap_and_no_further() -> None:
    relay = RelayCore(slots=4, patience_s=PATIENCE_S)
    relay.peers_changed(("liar",), 0.0, ended=False)
    assert Finish() in relay.announced("liar", MORE_THAN_ALL, 0.0)
    assert relay.iteration == MAX_LEAP
    relay.stepped(1.0)
    assert relay.iteration == 2 * MAX_LEAP
    # One that joins with it catches up, and goes on.
    core = DataPeerCore("data", RandomRouter("data", 0, 2, PathRules()), PATIENCE_S)
    core.peers_changed((("a",),), 0.0, trained=True)
    for _ in range(2):
        core.noted("a", Announcement(1), Noted(relay.newest_for("data")))
        commands = core.begun(1, 1.0)
    assert SendNotice(("a",), Announcement(2 * MAX_LEAP)) in commands


def test_the_first_word_does_not_bind_a_relay_that_has_not_stepped_yet() -> None:
    """A lie that comes first would have it refuse all that the others send, for good."""
    relay = RelayCore(slots=4, patience_s=PATIENCE_S)
    relay.announced("liar", MORE_THAN_ALL, 0.0)
    relay.announced("a", 5, 0.1)
    assert relay.peers_changed(("liar", "a", "b"), 0.5, ended=False) == []
    assert relay.iteration == 5
    relay.announced("b", 6, 0.6)
    assert relay.iteration == 5
    assert Finish() in relay.announced("a", 6, 1.0)
    relay.stepped(2.0)
    assert relay.iteration == 6
    relay.peers_changed(("liar", "a", "b", "new"), 3.0, ended=False)
    relay.announced("new", 1, 3.0)
    relay.peers_changed(("a", "new"), 3.0, ended=False)
    assert relay.iteration == 6  # it has stepped, and nobody who is new takes it back


def test_of_two_data_peers_the_one_that_is_new_is_told_where_the_other_is() -> None:
    """Also where the relay is as new, and has heard of the new one first."""
    relay = RelayCore(slots=4, patience_s=PATIENCE_S)
    relay.peers_changed(("old", "new"), 0.0, ended=False)
    relay.announced("new", 1, 0.0)
    relay.announced("old", 5000, 0.0)
    assert Finish() in relay.announced("new", 2, 1.0)
    assert relay.newest_for("new") == 5000
    assert relay.newest_for("old") == 2
    core = DataPeerCore("new", RandomRouter("new", 0, 2, PathRules()), PATIENCE_S)
    core.peers_changed((("relay",),), 0.0, trained=True)
    core.noted("relay", Announcement(1), Noted(relay.newest_for("new")))
    assert SendNotice(("relay",), Announcement(5000)) in core.begun(1, 1.0)
    relay.announced("new", 5000, 1.0)
    relay.stepped(2.0)
    assert relay.iteration == 5000


@pytest.mark.parametrize("kind", ["noted", "announcement"])
def test_a_number_that_no_iteration_can_have_breaks_the_protocol(kind: str) -> None:
    tree = {"t": kind, "group": "ab" * 16, "iteration": MAX_ITERATION}
    told = decode_message(msgpack.packb(tree))
    assert isinstance(told, Noted | Announcement)
    assert told.iteration == MAX_ITERATION
    with pytest.raises(RemoteProtocolError, match="iteration"):
        decode_message(msgpack.packb(tree | {"iteration": MAX_ITERATION + 1}))
