"""Two exchange machines joined by a wire that may break at any point."""

import itertools

import pytest

from protocol.errors import LocalProtocolError
from protocol.gossip.exchange import (
    TRANSITIONS,
    ExchangeEvent,
    ExchangeMachine,
    ExchangeState,
    exchange_id,
)
from protocol.gossip.matchmaking import pair_rank
from protocol.outcomes import SkipReason
from protocol.wire.messages import Received, decode_message, encode_message

RECEIPT = ExchangeEvent.RECEIPT_ARRIVED


class Pair:
    """Two machines and the four messages between them: two vectors, two receipts."""

    def __init__(self) -> None:
        self.sides = (ExchangeMachine(), ExchangeMachine())
        self.in_flight: list[tuple[int, ExchangeEvent]] = [
            (0, ExchangeEvent.VECTOR_ARRIVED),
            (1, ExchangeEvent.VECTOR_ARRIVED),
        ]

    def deliver(self, message: tuple[int, ExchangeEvent]) -> None:
        self.in_flight.remove(message)
        receiver, event = message
        self.sides[receiver].step(event)
        if event is ExchangeEvent.VECTOR_ARRIVED:
            self.in_flight.append((1 - receiver, RECEIPT))

    def lose_stream(self) -> None:
        self.in_flight.clear()
        for side in self.sides:
            if not side.is_final:
                side.step(ExchangeEvent.STREAM_LOST)


@pytest.mark.parametrize("lost_after", range(5))
def test_both_sides_end_alike_unless_the_stream_breaks_under_a_receipt(lost_after: int) -> None:
    for choices in itertools.product(range(4), repeat=lost_after):
        pair = Pair()
        for choice in choices:
            if pair.in_flight:
                pair.deliver(pair.in_flight[choice % len(pair.in_flight)])
        receipts = [side for side, event in pair.in_flight if event is RECEIPT]
        lacks = [side for side, event in pair.in_flight if event is not RECEIPT]
        pair.lose_stream()
        assert all(side.is_final for side in pair.sides)
        alike = len({side.state for side in pair.sides}) == 1
        assert alike or (len(receipts) == 1 and not lacks), choices
        if not alike:
            assert pair.sides[receipts[0]].reason is SkipReason.UNSETTLED


def test_a_whole_exchange_is_averaged_on_both_sides() -> None:
    pair = Pair()
    while pair.in_flight:
        pair.deliver(pair.in_flight[0])
    assert [side.state for side in pair.sides] == [ExchangeState.AVERAGED, ExchangeState.AVERAGED]


@pytest.mark.parametrize("state", list(ExchangeState))
def test_averaged_is_never_reached_without_their_vector(state: ExchangeState) -> None:
    for event, (after, _) in TRANSITIONS[state].items():
        if after is ExchangeState.AVERAGED:
            assert state is ExchangeState.HOLDING or event is ExchangeEvent.VECTOR_ARRIVED


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (ExchangeEvent.VECTOR_BAD, SkipReason.BAD_VECTOR),
        (ExchangeEvent.STREAM_LOST, SkipReason.PARTNER_LOST),
        (ExchangeEvent.STALLED, SkipReason.PARTNER_STALLED),
        (ExchangeEvent.DEADLINE_PASSED, SkipReason.DEADLINE),
    ],
)
def test_every_early_end_has_its_reason(event: ExchangeEvent, reason: SkipReason) -> None:
    exchange = ExchangeMachine()
    exchange.step(event)
    assert (exchange.state, exchange.reason) == (ExchangeState.SKIPPED, reason)


@pytest.mark.parametrize(
    "event", [ExchangeEvent.STREAM_LOST, ExchangeEvent.STALLED, ExchangeEvent.DEADLINE_PASSED]
)
def test_holding_without_a_receipt_is_unsettled(event: ExchangeEvent) -> None:
    exchange = ExchangeMachine()
    exchange.step(ExchangeEvent.VECTOR_ARRIVED)
    exchange.step(event)
    assert exchange.reason is SkipReason.UNSETTLED


def test_an_impossible_event_is_our_bug_and_a_late_one_is_ignored() -> None:
    exchange = ExchangeMachine()
    exchange.step(ExchangeEvent.VECTOR_ARRIVED)
    with pytest.raises(LocalProtocolError, match="vector bad"):
        exchange.step(ExchangeEvent.VECTOR_BAD)
    exchange.step(ExchangeEvent.STREAM_LOST)
    exchange.step(ExchangeEvent.VECTOR_ARRIVED)
    assert exchange.state is ExchangeState.SKIPPED


# --- the name of an exchange ----------------------------------------------------------------------
def test_the_name_of_an_exchange_is_the_same_for_both_and_new_with_every_round_of_either() -> None:
    assert exchange_id("group", ("a", 3), ("b", 9)) == exchange_id("group", ("b", 9), ("a", 3))
    names = {
        exchange_id("group", ("a", mine), (other, theirs))
        for mine in (3, 4)
        for theirs in (3, 8, 9)
        for other in "bc"
    }
    assert len(names) == 12
    assert exchange_id("another", ("a", 3), ("b", 9)) not in names


def test_a_name_goes_into_a_message_and_tells_nothing_of_the_rank() -> None:
    name = exchange_id("group", ("a", 3), ("b", 9))
    assert decode_message(encode_message(Received(name, name))) == Received(name, name)
    assert name != pair_rank("group", ("a", 3), ("b", 9)).hex()
