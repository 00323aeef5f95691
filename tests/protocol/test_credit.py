"""A credit holds memory of its receiver, so each move has one at a time, however often offered."""

import pytest
from microbatch_worlds import PATIENCE_S

from protocol.microbatch.core import AnswerOffer, OfferAhead, SendBoundary, SendNotice
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.relay import RelayCore
from protocol.microbatch.trainer_messages import Drop, Filled, Freed
from protocol.outcomes import RefusalReason
from protocol.pipeline.problem import PathRules
from protocol.routing.routers import RandomRouter
from protocol.wire.stage_messages import Direction, Hop, Lost, Microbatch, Path

WELCOME, TWICE = AnswerOffer(1), AnswerOffer(1, RefusalReason.TWICE)
PATH = Path(("relay",), (1,))
FIRST = Hop(Microbatch("data", 1, 1), Direction.FORWARD, PATH, 1)


@pytest.fixture
def relay() -> RelayCore:
    """One that has done a forward, and waits for its gradient."""
    relay = RelayCore(4, PATIENCE_S)
    relay.announced("data", 1, 0.0)
    assert relay.offered(1, FIRST) == [WELCOME]
    relay.arrived(FIRST, 0, None)
    relay.produced(Direction.FORWARD, 0, 7, None, 0.0)
    return relay


def backward(attempt: int = 0) -> Hop:
    return Hop(FIRST.microbatch, Direction.BACKWARD, PATH, 1, attempt=attempt)


def test_a_relay_welcomes_a_gradient_once_and_again_after_it_broke_off(relay: RelayCore) -> None:
    assert relay.offered(1, backward()) == [WELCOME]
    assert relay.offered(1, backward()) == [TWICE]
    assert relay.broke_off(backward(), 0.0) == []
    assert relay.offered(1, backward()) == [WELCOME]


def test_a_later_attempt_waits_until_the_one_before_is_forgotten(relay: RelayCore) -> None:
    assert relay.offered(1, backward()) == [WELCOME]
    again = Hop(FIRST.microbatch, Direction.FORWARD, PATH, 1, attempt=1)
    assert relay.offered(1, again) == []
    assert relay.given_up(FIRST.microbatch, "another") == []
    assert relay.given_up(FIRST.microbatch, "data") == [Drop(0), WELCOME]
    assert relay.broke_off(backward(), 0.0) == []
    assert relay.offered(2, again) == [AnswerOffer(2, RefusalReason.TWICE)]
    assert relay.offered(2, FIRST) == [AnswerOffer(2, RefusalReason.UNAVAILABLE)]


def test_what_is_being_added_is_waited_for_and_comes_again_without_being_added(
    relay: RelayCore,
) -> None:
    assert relay.offered(1, backward()) == [WELCOME]
    assert relay.arrived(backward(), 3, 2.0) == [Filled(Direction.BACKWARD, 0, 3, 2.0)]
    assert relay.given_up(FIRST.microbatch, "data") == []
    again = Hop(FIRST.microbatch, Direction.FORWARD, PATH, 1, attempt=1)
    assert relay.offered(1, again) == []
    assert relay.produced(Direction.BACKWARD, 0, 7, 2.0, 0.0) == [Freed(7)]
    assert relay.returned(0, 0.0) == [WELCOME]
    assert relay.arrived(again, 4, None) == [Filled(Direction.FORWARD, 1, 4, None, adds=False)]


@pytest.fixture
def data_peer() -> DataPeerCore:
    """One with a microbatch that has set out."""
    core = DataPeerCore("data", RandomRouter("data", 0, 2, PathRules()), PATIENCE_S)
    core.peers_changed((("relay",),), 0.0, trained=True)
    core.begun(1, 0.0)
    (sent,) = core.produced(Direction.FORWARD, 0, 7, None, 0.0)
    assert isinstance(sent, SendBoundary)
    assert sent.hop == FIRST
    return core


@pytest.mark.parametrize("hop", [FIRST.onward(), FIRST.back()], ids=["loss", "home"])
def test_a_data_peer_welcomes_a_hop_once(data_peer: DataPeerCore, hop: Hop) -> None:
    assert data_peer.offered(1, hop)[0] == WELCOME
    assert data_peer.offered(1, hop) == [TWICE]
    data_peer.arrived(hop, 0, 2.0)
    assert WELCOME not in data_peer.offered(1, hop)


def test_a_data_peer_welcomes_what_was_offered_ahead_once_until_it_breaks_off() -> None:
    router = RandomRouter("data", 0, 2, PathRules())
    core = DataPeerCore("data", router, PATIENCE_S, in_flight=1)
    core.peers_changed((("relay",),), 0.0, trained=True)
    core.begun(1, 0.0)
    for _ in range(2):
        assert core.offered(1, FIRST.onward()) == [WELCOME]
        assert core.offered(1, FIRST.onward()) == [TWICE]
        assert core.broke_off(FIRST.onward(), 0.0) == []


def test_what_was_offered_ahead_under_a_name_that_a_relay_has_forgotten_is_taken_back() -> None:
    router = RandomRouter("data", 0, 2, PathRules())
    core = DataPeerCore("data", router, PATIENCE_S, in_flight=1)
    core.peers_changed((("relay",),), 0.0, trained=True)
    assert OfferAhead(FIRST) in core.begun(1, 0.0)
    lost = Lost(FIRST.microbatch)
    assert core.lost(lost, "another") == []
    assert core.lost(lost, "relay") == [SendNotice(("relay",), lost)]
    assert core.lost(lost, "relay") == []
    (sent,) = core.produced(Direction.FORWARD, 0, 7, None, 0.0)
    assert isinstance(sent, SendBoundary)
    assert sent.hop.microbatch == Microbatch("data", 1, 2)


def test_what_trains_does_not_come_back_as_a_score(data_peer: DataPeerCore) -> None:
    score = Hop(FIRST.microbatch, Direction.SCORE, PATH, 2)
    assert data_peer.offered(1, score) == [AnswerOffer(1, RefusalReason.UNAVAILABLE)]
