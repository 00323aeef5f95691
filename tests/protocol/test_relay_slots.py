"""Slots of a relay: who takes them, and that everybody gives them back."""

from microbatch_worlds import PATIENCE_S
from msgspec.structs import replace

from protocol.microbatch.core import AnswerOffer, Command, MicrobatchEvent, SendBoundary, SendNotice
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.relay import GONE_S, RelayCore
from protocol.microbatch.trainer_messages import Drop, Filled, Freed
from protocol.outcomes import RefusalReason
from protocol.pipeline.problem import PathRules
from protocol.routing.routers import RandomRouter
from protocol.wire.stage_messages import Direction, Hop, Lost, Microbatch, Noted, Path

PATH = Path(("relay", "next"), (1, 2))


def relay_of(*origins: str, slots: int = 2) -> RelayCore:
    """A relay in the first iteration of these data peers."""
    relay = RelayCore(slots, PATIENCE_S)
    relay.peers_changed(origins, 0.0, ended=False)
    for origin in origins:
        relay.announced(origin, 1, 0.0)
    return relay


def hop(
    index: int, direction: Direction = Direction.FORWARD, attempt: int = 0, origin: str = "data"
) -> Hop:
    """A hop to the first relay of a path of two."""
    return Hop(Microbatch(origin, 1, index), direction, PATH, 1, attempt)


def bring(relay: RelayCore, brought: Hop) -> list[Command]:
    """A boundary that is offered and comes."""
    assert relay.offered(brought.microbatch.index, brought) == [
        AnswerOffer(brought.microbatch.index)
    ]
    return relay.arrived(brought, 0, None)


def test_what_a_data_peer_that_is_gone_has_left_makes_room() -> None:
    relay = relay_of("gone", "data", slots=3)
    for index in (1, 2, 3):
        bring(relay, hop(index, origin="gone"))
    assert relay.offered(4, hop(4, origin="gone")) == []
    assert relay.offered(5, hop(5)) == []
    for now_s, alive in ((1.0, ["gone"]), (2.0, []), (GONE_S, ["gone"]), (GONE_S + 1.0, [])):
        assert not relay.peers_changed(["data"], now_s, ended=False, alive=alive)
    commands = relay.peers_changed(["data"], 2 * GONE_S + 1.0, ended=False)
    answers = {each.ticket: each.refusal for each in commands if isinstance(each, AnswerOffer)}
    assert answers == {4: RefusalReason.UNAVAILABLE, 5: None}
    assert [each.number for each in commands if isinstance(each, Drop)] == [0, 1, 2]
    assert relay.counts[MicrobatchEvent.LOST] == 3


def test_a_score_is_given_no_gradient() -> None:
    relay = relay_of("data", slots=1)
    score = hop(0, Direction.SCORE)
    bring(relay, score)
    for attempt in (0, 1):
        backward = hop(0, Direction.BACKWARD, attempt)
        assert AnswerOffer(1) not in relay.offered(1, backward)
        assert relay.arrived(backward, 1, 2.0) == [Freed(1)]
    (sent,) = relay.produced(Direction.SCORE, 0, 7, None, 0.0)
    assert isinstance(sent, SendBoundary)
    assert relay.offered(2, hop(2)) == []
    assert relay.sent(sent.hop, 0.0, taken=True) == [AnswerOffer(2)]


def test_a_score_that_sets_out_again_is_refused() -> None:
    score = hop(1, Direction.SCORE, attempt=1)
    assert relay_of("data").offered(1, score) == [AnswerOffer(1, RefusalReason.UNAVAILABLE)]


def test_a_score_under_a_name_that_was_lost_is_refused() -> None:
    relay = relay_of("data")
    relay.given_up(hop(1).microbatch, "data")
    assert relay.offered(1, hop(1, Direction.SCORE)) == [AnswerOffer(1, RefusalReason.UNAVAILABLE)]


def test_a_score_that_goes_nowhere_is_forgotten_in_the_end() -> None:
    relay = relay_of("data", slots=1)
    bring(relay, hop(0, Direction.SCORE))
    (sent,) = relay.produced(Direction.SCORE, 0, 7, None, 0.0)
    assert relay.offered(1, hop(1, Direction.SCORE)) == []
    assert Drop(0) not in [*relay.ticked(1.0), *relay.ticked(PATIENCE_S)]
    forgotten = relay.ticked(PATIENCE_S + 1.0)
    assert forgotten[:2] == [SendNotice(("data",), Lost(hop(0).microbatch)), Drop(0)]
    assert AnswerOffer(1) in forgotten
    assert isinstance(sent, SendBoundary)
    assert relay.sent(sent.hop, 0.0, taken=False) == []
    assert not +relay.counts  # no gradient of it is missed
    relay.restarted(1)
    assert not +relay.counts


def test_a_score_that_the_next_one_does_not_take_is_told_to_be_lost() -> None:
    """Its data peer would wait for it as long as an iteration may last."""
    relay = relay_of("data", slots=1)
    bring(relay, hop(0, Direction.SCORE))
    (sent,) = relay.produced(Direction.SCORE, 0, 7, None, 0.0)
    assert isinstance(sent, SendBoundary)
    lost = SendNotice(("data",), Lost(hop(0).microbatch, failed="next"))
    assert relay.sent(sent.hop, 0.0, taken=False) == [lost]
    router = RandomRouter("data", 0, 3, PathRules())
    data_peer = DataPeerCore("data", router, PATIENCE_S)
    data_peer.peers_changed((("relay",), ("next",)), 0.0, trained=True)
    (score,) = data_peer.produced(Direction.SCORE, 0, 7, None, 0.0)
    assert isinstance(score, SendBoundary)
    assert Drop(0) in data_peer.lost(Lost(score.hop.microbatch, failed="next"), "relay")


def test_a_trainer_that_dies_with_a_score_under_way_has_lost_no_gradient() -> None:
    data_peer = DataPeerCore("data", RandomRouter("data", 0, 2, PathRules()), PATIENCE_S)
    data_peer.peers_changed((("relay",),), 0.0, trained=True)
    data_peer.produced(Direction.SCORE, 0, 7, None, 0.0)
    (told,) = data_peer.restarted(2)
    assert isinstance(told, SendNotice)
    assert isinstance(told.message, Lost)
    assert not +data_peer.counts


def test_what_comes_by_another_path_than_was_welcome_is_not_taken() -> None:
    relay = relay_of("data")
    assert relay.offered(1, hop(1)) == [AnswerOffer(1)]
    other = replace(hop(1), path=Path(("relay", "another"), (1, 2)))
    assert relay.arrived(other, 0, None) == [Freed(0)]
    assert relay.arrived(hop(1), 1, None) == [Filled(Direction.FORWARD, 0, 1, None)]
    backward = replace(other, direction=Direction.BACKWARD)
    assert relay.arrived(backward, 2, 2.0) == [Freed(2)]


def test_a_late_break_of_the_attempt_before_leaves_the_new_one_alone() -> None:
    relay = relay_of("data")
    old, new = (
        hop(0, attempt=1),
        replace(hop(0, attempt=2), path=Path(("relay", "other"), (1, 2))),
    )
    assert relay.offered(1, old) == [AnswerOffer(1)]
    relay.given_up(old.microbatch, "data", 1)
    assert relay.offered(2, new) == [AnswerOffer(2)]
    assert relay.broke_off(old, 1.0) == []
    assert relay.arrived(new, 5, None) == [Filled(Direction.FORWARD, 1, 5, None)]


def test_a_gradient_counts_once_though_the_receipt_of_its_forward_is_lost() -> None:
    relay = relay_of("data")
    forward = hop(0)
    bring(relay, forward)
    (sent,) = relay.produced(Direction.FORWARD, 0, 7, None, 0.0)
    assert isinstance(sent, SendBoundary)
    bring(relay, hop(0, Direction.BACKWARD))
    assert relay.sent(sent.hop, 0.1, taken=False) == []
    relay.produced(Direction.BACKWARD, 0, 8, 2.0, 0.2)
    relay.returned(0, 0.2)
    assert relay.counts[MicrobatchEvent.DONE] == 1
    relay.given_up(forward.microbatch, "data")
    bring(relay, hop(0, attempt=1))
    (compute,) = bring(relay, hop(0, Direction.BACKWARD, attempt=1))
    assert isinstance(compute, Filled)
    assert not compute.adds


def test_a_data_peer_gives_up_its_own_microbatches_alone() -> None:
    relay = relay_of("data", "other")
    for origin in ("data", "other"):
        bring(relay, hop(0, origin=origin))
    assert relay.on_message("data", Lost(hop(0, origin="other").microbatch), 0.0) == (Noted(1), [])
    assert relay.on_message("data", Lost(hop(0).microbatch), 0.0) == (Noted(1), [Drop(0)])
